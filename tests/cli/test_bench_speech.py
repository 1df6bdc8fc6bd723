"""`vllm-omni-ext bench speech`: its options, and whole runs against a small server in this process."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.loadtest.test_http import OPENAI, SECOND, event, listed, refused, serving, streamed
from tests.loadtest.test_realtime import Scripted
from vllm_omni_ext.cli import bench_speech
from vllm_omni_ext.cli.main import main

ANSWER = b"".join(map(event, OPENAI))
LOAD = ["--concurrency", "2"]


async def bench(url: str, *options: str) -> int:
    return await asyncio.to_thread(main, ["bench", "speech", "--url", url, *options])


@pytest.mark.parametrize("load", [["--concurrency", "3"], ["--rate", "200", "--seed", "5"]])
@pytest.mark.parametrize("api", ["chat", "speech", "realtime"])
async def test_a_run_has_a_table_and_a_file(api: str, load: list[str], tmp_path: Path, capsys: Any) -> None:
    file, prompts = tmp_path / "out.json", []

    async def chat(request: web.Request) -> web.StreamResponse:
        prompts.append((await request.json())["messages"][0]["content"])
        return await streamed(ANSWER, 1000)(request)

    async def realtime(request: web.Request) -> web.StreamResponse:
        return await Scripted().serve(request)

    handlers = {"chat_completions": chat, "audio_speech": streamed(SECOND, 9600, "audio/pcm"), "realtime": realtime}
    async with serving(models=listed({"data": [{"id": "m"}]}), **handlers) as url:
        options = ["--api", api, *load, "--requests", "10", "--warmup", "2", "--json", str(file)]
        assert await bench(url.removesuffix("/v1"), *options) == 0
    printed = capsys.readouterr().out
    assert "first sound, ms" in printed
    assert "answered: 10 of 10" in printed
    document = json.loads(file.read_bytes())
    settings, found = document["settings"], document["figures"]
    assert (settings["api"], settings["model"], settings["url"]) == (api, "m", url)
    assert (found["requests"], found["answered"], found["failures"]) == (10, 10, {})
    assert found["measures"]["sound_s"]["mean"] == {"chat": 1.5, "speech": 1.0, "realtime": 1.5}[api]
    assert found["most_at_once"] <= 3 or load[0] == "--rate"
    assert len(document["answers"]) == 10
    if api == "chat":
        assert sorted(prompts) == sorted([*(bench_speech.PROMPTS * 2)[:10], *bench_speech.PROMPTS[:2]])


async def test_failures_are_counted_and_printed_and_are_the_exit_status(capsys: Any) -> None:
    async with serving(chat_completions=refused) as url:
        assert await bench(url, *LOAD, "--requests", "3", "--model", "m") == 1
    out, err = capsys.readouterr()
    assert "answered: 0 of 3" in out
    assert "failed: 3 (status 503)" in out
    assert err.splitlines() == [f'{when}: status 503: {{"error": {{"message": "busy"}}}}' for when in FAILED]


FAILED = ("failed in the warm-up", "failed")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "one of the arguments --concurrency --rate is required"),
        ([*LOAD, "--rate", "1"], "not allowed with"),
        (["--concurrency", "0"], "must be 1 or more, got 0"),
        (["--rate", "0"], "must be more than 0, got 0"),
        (["--rate", "inf"], "must be more than 0, got inf"),
        ([*LOAD, "--realtime-input-speed", "-1"], "must be 0 or more, got -1"),
        ([*LOAD, "--realtime-input-speed", "nan"], "must be 0 or more, got nan"),
        ([*LOAD, "--requests", "0"], "must be 1 or more"),
        ([*LOAD, "--warmup", "-1"], "must be 0 or more"),
        ([*LOAD, "--extra-body", "{"], "is no JSON"),
        ([*LOAD, "--extra-body", "[]"], "must be a JSON object"),
        ([*LOAD, "--api", "images"], "invalid choice"),
    ],
)
def test_wrong_options_are_refused_by_name(options: list[str], message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "speech", *options])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--url", "http://localhost:80a"], "--url: must begin with http:// or https://, and name a host"),
        (["--api", "speech", "--audio", "a.wav"], "--audio: --api speech has no such field"),
        (["--api", "speech", "--max-tokens", "3"], "--max-tokens: --api speech has no such field"),
        (["--realtime-input-speed", "0"], "--realtime-input-speed: only with --api realtime and --audio FILE"),
        (["--api", "realtime", "--turn-detection", "none"], "--turn-detection: only with --api realtime and --audio"),
        (["--api", "realtime", "--prompt", "a", "--audio", "b"], "--prompt: with --api realtime a turn is spoken or"),
        (["--json", "nowhere/out.json"], "--json nowhere/out.json: cannot be written"),
        (["--model", "m", "--audio", "nowhere.wav"], "--audio nowhere.wav: cannot be read: No such file"),
        (["--model", "m", "--api", "realtime", "--audio", "nowhere.wav"], "--audio nowhere.wav: cannot be read"),
    ],
)
def test_options_that_do_not_fit_the_api_are_refused_by_name(options: list[str], message: str, capsys: Any) -> None:
    assert main(["bench", "speech", *LOAD, *options]) == 1
    assert message in capsys.readouterr().err
