"""Hidden states of multimodal positions give the same answers over every connector; lost ones are computed again."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from vllm import LLM, SamplingParams
from vllm.v1.serial_utils import MsgpackEncoder

from tests.processes.conftest import MAX_LEN, STEP_TOKENS
from tests.processes.test_parity import answer, check, heard, seen, user, watched
from tests.processes.test_replicas import TOLERANCE, hidden_states_held, same, within
from tests.support import held_connector
from tests.support.cluster import until
from tests.support.held_connector import gate
from tests.support.media import openai_messages
from tests.support.nested import run_suite
from tests.support.oracle import Golden, Oracle
from vllm_omni_ext.errors import RequestFailed
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.modalities.chunks import AudioChunk
from vllm_omni_ext.orchestrator import orchestrator
from vllm_omni_ext.plugins.runtime import RequestOptions
from vllm_omni_ext.wire.envelope import HiddenStatesChunkReady, unpack

pytestmark = pytest.mark.engine

MEDIA = ["audio", "image", "two_images_and_audio", "media_in_an_earlier_turn", "long_media_prompt"]
TEXT = ["text", "long_prompt"]
SIZE = {"max_model_len": MAX_LEN, "max_num_batched_tokens": STEP_TOKENS}
HEARD = openai_messages([user(heard(1.0, 1), "What do you hear?")])
SEEN = openai_messages([user(seen(96, 64, 2), "before " * 60 + "What is this?")])
LARGE = openai_messages([user(watched(4, 3), "What happens?")])
TEXT_ONLY = openai_messages([user("hello world")])
CAPACITY = 96 * 1024
"""Bytes a thinker may keep: enough for all requests of this module but the 288 hidden states of `LARGE`."""
SOON_S, ENDED_S = 30.0, 240.0
"""The first is far less than `chunk_timeout_s` and `retention_s`, after which hidden states are dropped in any case."""
TIMEOUT_S = 300
MOST_BYTES_A_PROMPT = 16 * 1024
"""Of a prompt with 99 hidden states, of which each alone would be more than 1 KiB in the released model's width."""


def sampling(text: int = 12, frames: int = 24) -> dict[str, SamplingParams]:
    return {
        "thinker": SamplingParams(temperature=0, max_tokens=text, ignore_eos=True),
        "talker": SamplingParams(temperature=0, min_tokens=frames + 1, max_tokens=frames + 1),
    }


def ask(omni: Any, conversations: list[Any], **lengths: int) -> list[Any]:
    outputs = omni.chat(conversations, sampling(**lengths), use_tqdm=False)
    frames = [[] if o.frames is None else o.frames.tolist() for o in outputs]
    return [
        (o.error, *(() if o.error else (o.outputs[0].token_ids, f, o.audio)))
        for o, f in zip(outputs, frames, strict=True)
    ]


def nothing_is_held(omni: Any) -> bool:
    return until(lambda: omni._omni.orchestrator.held() == 0 and hidden_states_held(omni) == 0, SOON_S)


@pytest.fixture(scope="module", params=["shared_memory", "tcp"])
def connected(request: Any, tiny: Path) -> Iterator[Any]:
    """A pipeline of its own, whose hidden states travel over one connector."""
    connector = {"name": request.param, "capacity_bytes": CAPACITY}
    with LLM(str(tiny), omni=True, connectors={"hidden_states": connector}, **SIZE) as omni:
        yield omni


def parity(omni: Any, oracle: Oracle, expected: Mapping[str, Golden]) -> None:
    """All at once: several in flight, several steps a prompt. Nothing is held afterwards."""
    names = list(expected)
    for name, output in zip(names, answer(omni, oracle, names), strict=True):
        check(output, expected[name])
    assert nothing_is_held(omni)


def test_text_opens_no_connection(connected: Any, oracle: Oracle, expected: dict[str, Golden]) -> None:
    """Run first."""
    before = {pid: _sockets(pid) for pid in _pids(connected)}
    for name, output in zip(TEXT, answer(connected, oracle, TEXT), strict=True):
        check(output, expected[name])
    assert within(connected, "thinker", "hidden_states_held") == [None]
    assert within(connected, "talker", "hidden_states_open") == [None]
    assert within(connected, "thinker", "handoff_steps") == [0]
    assert {pid: _sockets(pid) for pid in before} == before


def _pids(omni: Any) -> list[int]:
    return [process.pid for process in omni._deployment.processes().values()]


def _sockets(pid: int) -> int:
    return sum(os.readlink(link).startswith("socket:") for link in Path(f"/proc/{pid}/fd").iterdir())


def test_answers_to_media_equal_transformers(connected: Any, oracle: Oracle, expected: dict[str, Golden]) -> None:
    parity(connected, oracle, {name: expected[name] for name in MEDIA})
    assert within(connected, "thinker", "hidden_states_held") == [0], "a producer was opened"


def test_a_prompt_with_a_known_beginning_computes_only_its_end(
    connected: Any, oracle: Oracle, expected: dict[str, Golden]
) -> None:
    """The hidden states of the beginning are kept. A reset of the prefix cache frees them."""
    (name,) = MEDIA[-1:]
    cached = []
    for _ in range(2):
        (output,) = answer(connected, oracle, [name])
        check(output, expected[name])
        cached.append(output.num_cached_tokens)
    size = connected._omni.vllm_config.cache_config.block_size
    assert cached[1] == (len(expected[name].prompt_ids) - 1) // size * size > 0
    assert within(connected, "thinker", "hidden_states_kept")[0] > 0
    connected.reset_prefix_cache()
    (output,) = answer(connected, oracle, [name])
    check(output, expected[name])
    assert output.num_cached_tokens == 0
    assert nothing_is_held(connected)


def test_hidden_states_do_not_pass_through_the_orchestrator(
    connected: Any, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = connected._omni.orchestrator.replicas[ReplicaId("talker", 0)]
    add, sizes, encoder = replica.add, [], MsgpackEncoder()

    async def counted(request: Any) -> None:
        sizes.append(sum(memoryview(part).nbytes for part in encoder.encode(request)))
        await add(request)

    def unpacked(tensor: Any) -> Any:
        found = unpack(tensor)
        if found is not None:
            sizes.append(tensor.nbytes)
        return found

    monkeypatch.setattr(orchestrator, "unpack", unpacked)
    monkeypatch.setattr(replica, "add", counted)
    answer(connected, oracle, ["long_media_prompt"])
    assert 0 < sum(sizes) < MOST_BYTES_A_PROMPT


@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.1, 0.4])
def test_nothing_is_held_of_requests_aborted(connected: Any, after_s: float) -> None:
    prompt, lengths = connected._preprocess_chat_one(SEEN), sampling(text=400, frames=800)
    options = RequestOptions(modalities=("text", "audio"), params={"talker": lengths["talker"]})

    async def read(name: str) -> None:
        stream = connected._omni.generate(prompt, lengths["thinker"], name, options=options)
        async with contextlib.aclosing(stream):
            async for _ in stream:
                pass

    async def abort() -> None:
        tasks = [asyncio.create_task(read(f"aborted {after_s} {i}")) for i in range(3)]
        await asyncio.sleep(after_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    connected._run(abort())
    assert nothing_is_held(connected)


Change = Callable[[HiddenStatesChunkReady], HiddenStatesChunkReady]


def elsewhere(notice: HiddenStatesChunkReady) -> HiddenStatesChunkReady:
    """At an address where no process listens."""
    gone = notice.source.replace("ipc://@omni-", "ipc://@gone-")
    host, _, rest = gone.partition("tcp://127.0.0.1:")
    gone = gone if not rest else f"{host}tcp://127.0.0.1:1#{rest.partition('#')[2]}"
    return HiddenStatesChunkReady(source=gone, name=notice.name, first=notice.first, count=notice.count)


def dropped(notice: HiddenStatesChunkReady) -> HiddenStatesChunkReady:
    """Of a chunk that does not exist; the notice of the one that does is lost."""
    return msgspec.structs.replace(notice, name=f"dropped/{notice.name}")


@pytest.fixture
def changing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Change, int], list[str]]:
    """Change some of the next notices on their way; returns the names of chunks whose notices are lost."""

    def change(how: Change, times: int) -> list[str]:
        numbers, lost = itertools.count(), list[str]()

        def unpacked(tensor: Any) -> Any:
            found = unpack(tensor)
            if not isinstance(found, HiddenStatesChunkReady) or next(numbers) >= times:
                return found
            changed = how(found)
            lost.extend({found.name} - {changed.name})
            return changed

        monkeypatch.setattr(orchestrator, "unpack", unpacked)
        return lost

    return change


@pytest.mark.parametrize("how", [elsewhere, dropped])
def test_lost_hidden_states_are_computed_again(connected: Any, changing: Any, how: Change) -> None:
    expected = ask(connected, [HEARD])
    lost = changing(how, 1)
    began = time.monotonic()
    assert same(ask(connected, [HEARD]), expected)
    assert time.monotonic() - began < SOON_S
    assert len(lost) == (how is dropped)
    assert until(lambda: hidden_states_held(connected) == len(lost), SOON_S)
    within(connected, "thinker", "forget_hidden_states", lost)
    assert nothing_is_held(connected)


def test_a_request_whose_hidden_states_stay_lost_fails_alone(connected: Any, changing: Any) -> None:
    changing(elsewhere, 1000)
    fails_alone(connected, HEARD, "could not take the thinker's hidden states")


def test_a_request_whose_hidden_states_have_no_room_fails_alone(connected: Any) -> None:
    fails_alone(connected, LARGE, f"of {CAPACITY} are held")
    assert same(ask(connected, [HEARD]), ask(connected, [HEARD])), "there is room again"


def fails_alone(omni: Any, conversation: Any, reason: str) -> None:
    """Together with another request, whose answer stays the same."""
    other = ask(omni, [TEXT_ONLY])
    began = time.monotonic()
    (bad, good) = ask(omni, [conversation, TEXT_ONLY])
    assert time.monotonic() - began < SOON_S
    assert isinstance(bad[0], RequestFailed) and reason in str(bad[0])
    assert same([good], other)
    assert nothing_is_held(omni)


async def spoken(omni: Any, prompt: Any, name: str, frames: int, heard: Callable[[str], None]) -> Any:
    """Return all samples of an answer; `heard` is called with the request's name for each piece of sound."""
    lengths = sampling(frames=frames)
    options = RequestOptions(modalities=("text", "audio"), params={"talker": lengths["talker"]})
    pieces = []
    async for item in omni._omni.generate(prompt, lengths["thinker"], name, options=options):
        if isinstance(item, AudioChunk) and len(item.samples):
            pieces.append(item.samples)
            heard(name)
    return np.concatenate(pieces)


def test_frames_of_others_go_on_while_a_chunk_of_hidden_states_is_delayed(tiny: Path, tmp_path: Path) -> None:
    """The talker's step never waits for it, and the delayed answer is the same in the end."""
    held = gate(tmp_path / "gate")
    delaying = {"name": held_connector.NAME, "device": str(held.folder)}
    order: list[str] = []

    async def delayed(omni: Any, seen: Any, heard: Any, text: Any) -> Any:
        begun = asyncio.Event()

        def first(name: str) -> None:
            order.append(name)
            begun.set()

        running = asyncio.create_task(spoken(omni, heard, "running", 300, first))
        await asyncio.wait_for(begun.wait(), SOON_S)
        with held.armed():
            late = asyncio.create_task(spoken(omni, seen, "late", 24, order.append))
            await asyncio.wait_for(asyncio.to_thread(held.reached), SOON_S)
            assert not running.done()
            order.append("held")
            await asyncio.wait_for(running, SOON_S)
            await asyncio.wait_for(spoken(omni, text, "text", 24, order.append), SOON_S)
            order.append("released")
        return await asyncio.wait_for(late, SOON_S)

    with LLM(str(tiny), omni=True, connectors={"hidden_states": delaying}, **SIZE) as omni:
        seen, heard, text = (omni._preprocess_chat_one(each) for each in (SEEN, HEARD, TEXT_ONLY))
        undisturbed = omni._run(spoken(omni, seen, "undisturbed", 24, order.append))
        omni.reset_prefix_cache()  # positions in the cache need no hidden states
        late = omni._run(delayed(omni, seen, heard, text))
        assert late.shape == undisturbed.shape and np.abs(late - undisturbed).max() <= TOLERANCE
        during = order[order.index("held") + 1 : order.index("released")]
        assert set(during) == {"running", "text"}
        assert set(order[order.index("released") + 1 :]) == {"late"}
        assert nothing_is_held(omni)


@pytest.mark.extended
def test_answers_stay_the_same_when_a_talker_and_a_thinker_die(twofold: Any) -> None:
    """The first talker and the last thinker: the first thinker keeps hidden states that the dead talker had open."""
    conversations, lengths = [HEARD, SEEN] * 3, {"text": 150, "frames": 200}
    undisturbed = ask(twofold, conversations, **lengths)
    with ThreadPoolExecutor(1) as thread:
        got = thread.submit(ask, twofold, conversations, **lengths)
        assert until(lambda: all(within(twofold, "talker", "hidden_states_open")), SOON_S)
        pools = twofold._omni.orchestrator.pools
        for stage, which in (("talker", 0), ("thinker", -1)):
            victim = sorted(pools[stage].replicas)[which]
            os.kill(twofold._deployment.processes()[victim].pid, signal.SIGKILL)
        assert same(got.result(ENDED_S), undisturbed)
    assert until(lambda: all(len(pools[stage].replicas) == 2 for stage in ("talker", "thinker")), ENDED_S)
    assert nothing_is_held(twofold)


def test_a_conversation_continues_on_other_replicas(twofold: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns go to the replicas of the turns before, and compute only what is new. When these are killed, others
    compute the conversation once."""
    reply = {"role": "assistant", "content": "A short tone."}
    users = openai_messages([user(heard(12.0, seed)) for seed in range(4)])
    turns = [[each for one in users[: count + 1] for each in (one, reply)][:-1] for count in range(4)]
    expected = []
    for turn in turns:
        twofold.reset_prefix_cache()
        expected += ask(twofold, [turn])
    twofold.reset_prefix_cache()
    observer, seen = twofold._omni.observer, list[Any]()
    ended = observer.ended
    monkeypatch.setattr(observer, "ended", lambda trace, how: (seen.append(trace.stages), ended(trace, how)))
    answers = ask(twofold, [turns[0]]) + ask(twofold, [turns[1]])
    for stage in ("talker", "thinker"):
        os.kill(twofold._deployment.processes()[seen[1][stage].replica].pid, signal.SIGKILL)
    pools = twofold._omni.orchestrator.pools
    assert until(lambda: all(len(pools[stage].replicas) < 2 for stage in ("talker", "thinker")), SOON_S)
    assert until(lambda: all(len(pools[stage].replicas) == 2 for stage in ("talker", "thinker")), ENDED_S)
    answers += ask(twofold, [turns[2]]) + ask(twofold, [turns[3]])
    assert same(answers, expected)
    size = 128  # of a block
    length = len(twofold._preprocess_chat_one([users[0]])["prompt_token_ids"]) - 3
    assert [stages["talker"].cached // size for stages in seen] == [0, length // size, 0, 3 * length // size]
    assert [stages["thinker"].cached > 0 for stages in seen] == [False, True, False, True]
    assert len({stages["talker"].replica for stages in seen[:2]}) == 1
    assert nothing_is_held(twofold)


@pytest.mark.extended
@pytest.mark.needs("library mooncake.engine", "isolation")
def test_answers_over_mooncake_equal_transformers() -> None:
    """In a namespace: its engine listens on all addresses."""
    run_suite(Path(__file__).with_name("hidden_states_mooncake_suite.py"), "-x", timeout_s=TIMEOUT_S)
