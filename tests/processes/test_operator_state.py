"""An operator's change at one API server holds for all three, and for the ones that follow them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.server import HOST, Server
from tests.processes.test_api_servers import Caller, again, pids
from tests.support.cluster import ANSWER_S, MODEL, all_up, kill, overrides, replicas, states, until
from tests.support.lora import write_adapter, write_dense

pytestmark = [pytest.mark.engine, pytest.mark.extended]

SERVERS = 3
THINKERS = ["thinker/0", "thinker/1"]
UP_S = 60.0


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dense(tmp_path_factory.mktemp("dense") / "model")


@pytest.fixture(scope="module")
def server(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Three API servers before two thinkers, with vLLM's endpoints for operators."""
    flags = [*overrides(thinker={"replicas": 2}), "--api-server-count", str(SERVERS), "--enable-lora"]
    flags += ["--served-model-name", MODEL, "--max-model-len", "2048"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "120")
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        patch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
        with Server(dense, tmp_path_factory.mktemp("operator") / "log", flags) as started:
            assert until(lambda: all_up(started, 4))
            yield started


@pytest.fixture
def callers(server: Server) -> list[Caller]:
    return [Caller(server, which) for which in range(SERVERS)]


def operate(caller: Caller, server: Server, path: str, **fields: Any) -> httpx.Response:
    return caller.http.post(f"http://{HOST}:{server.port}{path}", timeout=ANSWER_S, **fields)


def say(caller: Caller, model: str = MODEL) -> tuple[str, str]:
    """A greedy text and the thinker that wrote it; AssertionError with the error if it is one."""
    fields = {"messages": [{"role": "user", "content": "Hello."}], "modalities": ["text"], "temperature": 0}
    more = {"max_completion_tokens": 12, "ignore_eos": True, "return_stage_metrics": True, "model": model}
    answer = caller.http.post("/chat/completions", json=fields | more)
    assert answer.status_code == 200, answer.text[:500]
    said = answer.json()
    return said["choices"][0]["message"]["content"], said["metrics"]["stages"]["thinker"]["replica"]


def shown(caller: Caller, server: Server) -> list[str]:
    """The states of all replicas, as this API server shows them."""
    stages = caller.http.get(f"http://{HOST}:{server.port}/v1/omni/status").json()["stages"]
    return [each["state"] for stage in stages for each in stage["replicas"]]


def replaced(server: Server, which: int) -> Caller:
    """Kill an API server, and return a connection to the one that follows it."""
    os.kill(pids(server)[which], signal.SIGKILL)
    assert until(lambda: again(server, which, 1), UP_S)
    return Caller(server, which)


def test_no_api_server_uses_a_replica_that_one_put_to_sleep(server: Server, callers: list[Caller]) -> None:
    slept = operate(callers[0], server, "/sleep?level=0&targets=thinker/0")
    assert slept.status_code == 200, slept.text
    assert {say(caller)[1] for caller in callers for _ in range(3)} == {"thinker/1"}
    assert states(server)["thinker/0"] == "SLEEPING"
    woken = operate(callers[1], server, "/wake_up?targets=thinker/0")
    assert woken.status_code == 200, woken.text
    assert [shown(caller, server) for caller in callers] == [["UP"] * 4] * SERVERS, "also before the next heartbeat"


def test_an_adapter_answers_on_all_api_servers_and_replicas(
    server: Server, callers: list[Caller], dense: Path, tmp_path: Path
) -> None:
    plain = say(callers[0])[0]
    body = {"lora_name": "accent", "lora_path": str(write_adapter(dense, tmp_path / "accent", seed=1))}
    loaded = operate(callers[0], server, "/v1/load_lora_adapter", json=body)
    assert loaded.status_code == 200, loaded.text
    texts = {say(caller, "accent")[0] for caller in callers}
    assert len(texts) == 1 and texts != {plain}
    again_loaded = operate(callers[1], server, "/v1/load_lora_adapter", json=body)
    assert again_loaded.status_code == 400, "the name is taken everywhere"
    follower = replaced(server, 2)
    assert say(follower, "accent")[0] in texts, "an API server that is started again knows it"
    kill(server, "thinker/0")
    assert until(lambda: replicas(server)["thinker/0"]["restarts"] == 1, UP_S)
    assert until(lambda: all(shown(caller, server) == ["UP"] * 4 for caller in (callers[1], follower)), UP_S)
    operate(callers[1], server, "/sleep?level=0&targets=thinker/1")
    text, thinker = say(follower, "accent")
    assert text in texts and thinker == "thinker/0", "so does a replica"
    operate(follower, server, "/wake_up?targets=thinker/1")
    assert {say(caller)[0] for caller in (callers[0], callers[1], follower)} == {plain}
    gone = operate(follower, server, "/v1/unload_lora_adapter", json={"lora_name": "accent"})
    assert gone.status_code == 200, gone.text
    for caller in (callers[0], callers[1], follower):
        with pytest.raises(AssertionError, match="accent"):
            say(caller, "accent")
