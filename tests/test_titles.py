"""Arguments of processes that other users of the machine can read."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from vllm_omni_ext.cli.serve import KEY_VARIABLE, keep_key
from vllm_omni_ext.titles import without_secrets

NAMED = """
import multiprocessing, os, sys, time
from vllm_omni_ext.titles import name_process
name_process("head", sys.argv[1:])
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
child.start()
print(child.pid, flush=True)
child.join()
"""


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("serve m --api-key a b --port 1", "serve m --api-key *** *** --port 1"),
        ("serve m --api_key a", "serve m --api_key ***"),
        ("serve m --api-k=a --port 1", "serve m --api-k=*** --port 1"),
        ("--hf-token a", "--hf-token ***"),
        ("serve m --api-server-count 2 -oma h", "serve m --api-server-count 2 -oma h"),
    ],
)
def test_secrets_are_not_shown(given: str, shown: str) -> None:
    assert without_secrets(given.split()) == shown.split()


@pytest.mark.engine
def test_a_process_and_its_forks_show_no_secret() -> None:
    words = [sys.executable, "-c", NAMED, "serve", "/a/model", "--api-key", "very-secret"]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        forked = psutil.Process(int(process.stdout.readline()))
        try:
            for each in (psutil.Process(process.pid), forked):
                line = Path(f"/proc/{each.pid}/cmdline").read_bytes()
                assert b"secret" not in line and line.startswith(b"vllm-omni head serve /a/model --api-key ***")
        finally:
            forked.kill()
            process.wait()


def test_the_api_key_is_removed_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, expected in (([], ["from-outside"]), (["a-flag"], ["a-flag"])):
        monkeypatch.setenv(KEY_VARIABLE, "from-outside")
        args = argparse.Namespace(api_key=given)
        keep_key(args)
        assert args.api_key == expected
        with pytest.raises(KeyError):
            monkeypatch.delenv(KEY_VARIABLE)
