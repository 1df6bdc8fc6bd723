"""Mooncake over TCP. Its engine listens on all interfaces, so the suite runs in a namespace with loopback only."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_omni_ext.connectors.base import ConnectorConfig
from vllm_omni_ext.connectors.registry import connector
from vllm_omni_ext.errors import ConfigError

SUITE = Path(__file__).with_name("mooncake_suite.py")
ISOLATED = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
TIMEOUT_S = 300


def unavailable(library: str = "mooncake.engine") -> str | None:
    """Why nothing with this library can run here, among nothing but loopback; None if it can."""
    probe = subprocess.run([sys.executable, "-c", f"import {library}"], capture_output=True, text=True)
    if probe.returncode:
        return f"no {library} here: {probe.stderr.strip().splitlines()[-1]}"
    if not all(map(shutil.which, ("unshare", "ip"))) or subprocess.run([*ISOLATED, "true"]).returncode:
        return "no network namespace can be made here"
    return None


@pytest.mark.parametrize("part", ["not engine", pytest.param("engine", marks=pytest.mark.engine)])
def test_the_suite(part: str) -> None:
    if reason := unavailable():
        pytest.skip(reason)
    run = subprocess.run(
        [*ISOLATED, sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", part, str(SUITE)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert " passed" in run.stdout


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("vllm_omni_ext.connectors.mooncake")
    for name in ("mooncake", "mooncake.engine"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"vllm-omni-ext\[mooncake\].*libibverbs1"):
        connector(ConnectorConfig(name="mooncake"))
