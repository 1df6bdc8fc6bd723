"""Rows of multimodal positions: the same answer over every connector; those that are lost are made again."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from vllm import LLM, SamplingParams
from vllm.v1.serial_utils import MsgpackEncoder

from tests.connectors.test_mooncake import ISOLATED
from tests.media import openai_messages
from tests.oracle import Golden, Oracle
from tests.processes.cluster import until
from tests.processes.conftest import MAX_LEN, STEP_TOKENS
from tests.processes.test_parity import answer, check, heard, seen, user
from tests.processes.test_take_over import same
from vllm_omni_ext.errors import RequestFailed
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.orchestrator.requests import OmniOptions
from vllm_omni_ext.wire.rows import Notice

pytestmark = pytest.mark.engine

MEDIA = ["audio", "image", "two_images_and_audio", "media_in_an_earlier_turn", "long_media_prompt"]
TEXT = ["text", "long_prompt"]
SIZE = {"max_model_len": MAX_LEN, "max_num_batched_tokens": STEP_TOKENS}
HEARD = openai_messages([user(heard(1.0, 1), "What do you hear?")])
SEEN = openai_messages([user(seen(96, 64, 2), "before " * 60 + "What is this?")])
SECOND, SOON_S = 1.0, 5.0
TIMEOUT_S = 300
FROM_OUTSIDE = "OMNI_TEST_CONNECTOR"
MOST_BYTES_A_PROMPT = 16 * 1024
"""Of a prompt with 99 rows, of which each alone would be more than 1 KiB in the released model's width."""


def within(omni: Any, stage: str, method: str) -> list[Any]:
    """What each worker of a stage answers."""
    replies = omni.collective_rpc(method, targets=[stage])
    return [value for reply in replies.values() for value in reply.value]


def rows_held(omni: Any) -> int:
    """Requests whose rows are kept or taken anywhere."""
    return sum(n or 0 for n in (*within(omni, "thinker", "rows_held"), *within(omni, "talker", "rows_open")))


def sampling(text: int = 12, frames: int = 24) -> dict[str, SamplingParams]:
    return {
        "thinker": SamplingParams(temperature=0, max_tokens=text, ignore_eos=True),
        "talker": SamplingParams(temperature=0, min_tokens=frames + 1, max_tokens=frames + 1),
    }


def ask(omni: Any, conversations: list[Any], **lengths: int) -> list[Any]:
    outputs = omni.chat(conversations, sampling(**lengths), use_tqdm=False)
    return [(o.error, o.outputs[0].token_ids, o.frames.tolist(), o.audio) for o in outputs]


@pytest.fixture(scope="module", params=["shared_memory", "tcp"])
def connected(request: Any, tiny: Path) -> Iterator[Any]:
    """A pipeline of its own, whose rows travel over one connector."""
    with LLM(str(tiny), omni=True, connectors={"rows": {"name": request.param}}, **SIZE) as omni:
        yield omni


def parity(omni: Any, oracle: Oracle, expected: dict[str, Golden]) -> None:
    """All at once: several in flight, several steps a prompt."""
    for name, output in zip(MEDIA, answer(omni, oracle, MEDIA), strict=True):
        check(output, expected[name])
    assert omni._omni.orchestrator.held() == 0
    assert until(lambda: rows_held(omni) == 0, SOON_S)


def test_text_opens_nothing(connected: Any, oracle: Oracle, expected: dict[str, Golden]) -> None:
    """Run first."""
    before = {pid: _sockets(pid) for pid in _pids(connected)}
    for name, output in zip(TEXT, answer(connected, oracle, TEXT), strict=True):
        check(output, expected[name])
    assert within(connected, "thinker", "rows_held") == [None]
    assert within(connected, "talker", "rows_open") == [None]
    assert within(connected, "thinker", "handoff_steps") == [0]
    assert {pid: _sockets(pid) for pid in before} == before


def _pids(omni: Any) -> list[int]:
    return [process.pid for process in omni._deployment.processes().values()]


def _sockets(pid: int) -> int:
    return sum(link.startswith("socket:") for link in map(os.readlink, _links(pid)))


def _links(pid: int) -> list[str]:
    return [f"/proc/{pid}/fd/{fd}" for fd in os.listdir(f"/proc/{pid}/fd")]


def test_every_answer_is_that_of_transformers(connected: Any, oracle: Oracle, expected: dict[str, Golden]) -> None:
    parity(connected, oracle, expected)
    assert within(connected, "thinker", "rows_held") == [0], "a producer was opened"


def test_rows_do_not_pass_through_this_process(connected: Any, oracle: Oracle) -> None:
    replica = connected._omni.orchestrator.replicas[ReplicaId("talker", 0)]
    decode, plugin = connected._omni.orchestrator.plugin.decode, connected._omni.orchestrator.plugin
    add, sizes, encoder = replica.add, [], MsgpackEncoder()

    async def counting(request: Any) -> None:
        sizes.append(sum(memoryview(part).nbytes for part in encoder.encode(request)))
        await add(request)

    def looking(stage: str, tensor: Any) -> Any:
        if stage == "thinker":
            sizes.append(tensor.nbytes)
        return decode(stage, tensor)

    replica.add, plugin.decode = counting, looking
    try:
        answer(connected, oracle, ["long_media_prompt"])
    finally:
        replica.add, plugin.decode = add, decode
    assert 0 < sum(sizes) < MOST_BYTES_A_PROMPT


@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.05, 0.1, 0.2, 0.4])
def test_nothing_is_kept_of_a_request_whose_client_has_left(connected: Any, after_s: float) -> None:
    prompt = connected._preprocess_chat_one(SEEN)
    lengths = sampling(text=400, frames=800)

    async def listen(name: str) -> None:
        options = OmniOptions(modalities=("text", "audio"), sampling={"talker": lengths["talker"]})
        stream = connected._omni.generate(prompt, lengths["thinker"], name, options=options)
        async with contextlib.aclosing(stream):
            async for _ in stream:
                pass

    async def leave() -> None:
        tasks = [asyncio.create_task(listen(f"left {after_s} {i}")) for i in range(3)]
        await asyncio.sleep(after_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    connected._run(leave())
    assert connected._omni.orchestrator.held() == 0
    assert until(lambda: rows_held(connected) == 0, SOON_S), "in time, not after keep_s"


def test_a_reply_too_short_to_speak_leaves_no_rows(connected: Any) -> None:
    ((error, *_),) = ask(connected, [HEARD], text=1, frames=1)
    assert error is None
    assert until(lambda: rows_held(connected) == 0, SOON_S)


Change = Callable[[Notice], Notice]


def elsewhere(notice: Notice) -> Notice:
    """Where nobody listens."""
    gone = notice.source.replace("ipc://@omni-", "ipc://@gone-")
    host, _, rest = gone.partition("tcp://127.0.0.1:")
    gone = gone if not rest else f"{host}tcp://127.0.0.1:1#{rest.partition('#')[2]}"
    return Notice(source=gone, name=notice.name, first=notice.first, count=notice.count)


def dropped(notice: Notice) -> Notice:
    """A chunk that was never put."""
    return Notice(source=notice.source, name=f"dropped/{notice.name}", first=notice.first, count=notice.count)


@pytest.fixture
def changing(connected: Any) -> Iterator[Callable[[Change, int], None]]:
    """Let some of the next notices be changed on their way."""
    plugin = connected._omni.orchestrator.plugin
    decode = plugin.decode

    def change(how: Change, times: int) -> None:
        numbers = itertools.count()

        def decoded(stage: str, tensor: Any) -> Any:
            found = decode(stage, tensor)
            return how(found) if isinstance(found, Notice) and next(numbers) < times else found

        plugin.decode = decoded

    yield change
    plugin.decode = decode


@pytest.mark.parametrize("how", [elsewhere, dropped])
def test_rows_that_do_not_come_are_made_again(connected: Any, changing: Any, how: Change) -> None:
    expected = ask(connected, [HEARD])
    changing(how, 1)
    began = time.monotonic()
    assert same(ask(connected, [HEARD]), expected)
    assert time.monotonic() - began < 3 * SECOND
    assert connected._omni.orchestrator.held() == 0
    assert until(lambda: rows_held(connected) == 0, SOON_S)


def test_rows_that_never_come_are_a_clear_error_in_time_and_hurt_nobody(connected: Any, changing: Any) -> None:
    other = ask(connected, [openai_messages([user("hello world")])])
    changing(elsewhere, 1000)
    began = time.monotonic()
    (bad,) = ask(connected, [HEARD])
    assert time.monotonic() - began < SECOND
    assert isinstance(bad[0], RequestFailed) and "could not take the thinker's rows" in str(bad[0])
    (bad, good) = ask(connected, [HEARD, openai_messages([user("hello world")])])
    assert isinstance(bad[0], RequestFailed)
    assert same([good], other)
    assert connected._omni.orchestrator.held() == 0


def test_no_room_is_a_clear_error(tiny: Path) -> None:
    rows = {"name": "shared_memory", "capacity_bytes": 4096}
    with LLM(str(tiny), omni=True, connectors={"rows": rows}, **SIZE) as omni:
        (bad, good) = ask(omni, [SEEN, openai_messages([user("hello world")])])
        assert isinstance(bad[0], RequestFailed) and "capacity_bytes" in str(bad[0])
        assert good[0] is None
        assert until(lambda: rows_held(omni) == 0, SOON_S)


KILLED = [["talker"], ["thinker"], ["thinker", "talker"], ["talker", "thinker"]]


@pytest.mark.parametrize("stages", KILLED, ids=" then ".join)
def test_killed_replicas_are_not_missed(twofold: Any, stages: list[str]) -> None:
    """Thinker first: its text and rows are made again by the other. Both: no rows are left where the talker looks."""
    conversations = [HEARD, SEEN] * 3
    lengths = {"text": 150, "frames": 200}
    undisturbed = ask(twofold, conversations, **lengths)
    got: list[Any] = []
    asking = threading.Thread(target=lambda: got.extend(ask(twofold, conversations, **lengths)))
    asking.start()
    pools = twofold._omni.orchestrator.pools
    assert until(lambda: any(pools["talker"].in_flight(replica) for replica in pools["talker"].replicas))
    for stage in stages:
        time.sleep(0.1)
        busy = [replica for replica in pools[stage].replicas if pools[stage].in_flight(replica)]
        gone = (busy or list(pools[stage].replicas))[0]
        os.kill(twofold._deployment.processes()[gone].pid, signal.SIGKILL)
    asking.join(120)
    assert same(got, undisturbed)
    assert twofold._omni.orchestrator.held() == 0
    assert until(lambda: all(len(pools[stage].replicas) == 2 for stage in stages), 60)
    assert until(lambda: rows_held(twofold) == 0, SOON_S)


def test_nothing_is_left_in_shared_memory(connected: Any) -> None:
    ours = {process.pid for process in psutil.Process().children(recursive=True)}
    ask(connected, [HEARD, SEEN])
    names = [file.name for file in Path("/dev/shm").iterdir() if "omni" in file.name]
    assert names == [] and ours


def test_mooncake() -> None:
    """In a namespace, since its engine listens everywhere."""
    probe = subprocess.run([sys.executable, "-c", "import mooncake.engine"], capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"no mooncake here: {probe.stderr.strip().splitlines()[-1]}")
    if not all(map(shutil.which, ("unshare", "ip"))) or subprocess.run([*ISOLATED, "true"]).returncode:
        pytest.skip("no network namespace can be made here")
    test = f"{__file__}::test_a_connector_named_from_outside"
    run = subprocess.run(
        [*ISOLATED, sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, FROM_OUTSIDE: "mooncake"},
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert "1 passed" in run.stdout


@pytest.mark.skipif(FROM_OUTSIDE not in os.environ, reason="is run by test_mooncake")
def test_a_connector_named_from_outside(tiny: Path, oracle: Oracle, expected: dict[str, Golden]) -> None:
    rows = {"name": os.environ[FROM_OUTSIDE], "capacity_bytes": 64 << 20}
    with LLM(str(tiny), omni=True, connectors={"rows": rows}, **SIZE) as omni:
        parity(omni, oracle, expected)
