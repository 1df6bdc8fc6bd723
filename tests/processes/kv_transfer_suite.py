"""Real prefill and decode engines over Mooncake; `test_kv_transfer.py` runs it where only loopback can be reached.

Every way in which a transfer is known to fail is here. The rule: decode answers as an engine does which does everything
itself, in less than `BOUND_S` on an idle machine; no block stays in use on either side; no engine ends that was not
killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import socket
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from vllm import SamplingParams

from tests.support.kv_engines import PLAIN, Engine, prefill
from tests.support.media import audio
from tests.support.mooncake_target import target, transfer_engine
from vllm_omni_ext.disaggregation.parameters import (
    DECODE,
    KEY,
    PREFILL,
    Settings,
    answer,
    decode_transfer,
    new_transfer_id,
    prefill_sampling,
    prefill_transfer,
)
from vllm_omni_ext.disaggregation.prefill_worker import SendMixin
from vllm_omni_ext.disaggregation.transfer_stats import TransferStats

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

SETTINGS = Settings(transfer_timeout_s=1.5, kv_retention_s=2.0)
PATIENT_S = 60.0
"""For tests in which nothing fails, nor shall because this machine is busy."""

BOUND_S = 5.0
AT_ONCE_S = 1.5
SLACK = 10
"""A bound is later by so many times what it takes this machine, now, to do everything in one engine."""

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
LENGTHS = (3, 127, 128, 129, 700, 2000)

_serial = itertools.count(1)


def prompt(length: int = 300) -> dict[str, Any]:
    """Token ids that no other prompt begins with, so that nothing of it is in a prefix cache."""
    n = next(_serial)
    return {"prompt_token_ids": [n % 200 + 3, n // 200 + 3, *((5 * i + n) % 200 + 3 for i in range(length - 2))]}


class Pair:
    """One engine of each kind; a prefill and a decode engine that a test may kill come on top."""

    def __init__(self, model: str, settings: Settings) -> None:
        self.model, self.settings = model, settings
        self.plain = Engine(model, PLAIN, settings)
        self.prefill = self.start(PREFILL)
        self.decode = self.start(DECODE)

    def start(self, role: str, settings: Settings | None = None, **args: Any) -> Engine:
        return Engine(self.model, role, settings or self.settings, **{"enable_prefix_caching": True, **args})

    @contextlib.contextmanager
    def another(self, role: str, settings: Settings | None = None, **args: Any) -> Iterator[Engine]:
        engine = self.start(role, settings, **args)
        try:
            yield engine
        finally:
            engine.close()

    async def expected(self, asked: Any, params: SamplingParams = GREEDY) -> list[int]:
        return list((await self.plain.run(asked, params)).outputs[0].token_ids)

    async def check(
        self,
        asked: Any,
        transfer: Any,
        *,
        decode: Engine | None = None,
        params: SamplingParams = GREEDY,
        bound_s: float = BOUND_S,
    ) -> float:
        """Decode says what the plain engine says; seconds it took."""
        began = time.monotonic()
        expected = await self.expected(asked, params)
        since = time.monotonic()
        output = await (decode or self.decode).run(asked, params, transfer)
        took = time.monotonic() - since
        assert list(output.outputs[0].token_ids) == expected
        assert took < bound_s + SLACK * (since - began)
        return took

    async def empty(self) -> None:
        """Nothing is in use on either side."""
        await self.decode.empty(self.settings.kv_retention_s + PATIENT_S)
        await self.prefill.empty(self.settings.kv_retention_s + PATIENT_S)

    async def wait_up_to(self, transfer_timeout_s: float, kv_retention_s: float) -> None:
        """Change how long both sides wait."""
        for engine in (self.prefill, self.decode):
            await engine.ask("be_patient", transfer_timeout_s, kv_retention_s)

    def close(self) -> None:
        for engine in (self.plain, self.prefill, self.decode):
            engine.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tiny: Path) -> AsyncIterator[Pair]:
    made = Pair(str(tiny), SETTINGS)
    # Decode knows prefill from here on: who hangs before that is never asked for anything.
    await made.check(first := prompt(), await prefill(made.prefill, first))
    yield made
    made.close()


@pytest_asyncio.fixture(loop_scope="module")
async def patient(pair: Pair) -> AsyncIterator[Pair]:
    """The same pair, which gives nothing up during this test."""
    await pair.wait_up_to(PATIENT_S, PATIENT_S)
    yield pair
    await pair.wait_up_to(SETTINGS.transfer_timeout_s, SETTINGS.kv_retention_s)


@pytest_asyncio.fixture(loop_scope="module")
async def keeping(pair: Pair) -> AsyncIterator[Pair]:
    """The same pair, whose prefill frees nothing during this test because nobody has fetched it."""
    await pair.prefill.ask("be_patient", SETTINGS.transfer_timeout_s, PATIENT_S)
    yield pair
    await pair.prefill.ask("be_patient", SETTINGS.transfer_timeout_s, SETTINGS.kv_retention_s)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def spare(pair: Pair) -> AsyncIterator[Engine]:
    """Another decode engine, which knows prefill, until a test kills it.

    Without a prefix cache what is freed last is used first: another request would get blocks that are written late.
    """
    with pair.another(DECODE, enable_prefix_caching=False) as engine:
        await pair.check(first := prompt(), await prefill(pair.prefill, first), decode=engine)
        yield engine


async def counted(engine: Engine, name: str) -> float:
    return (await engine.ask("transfer_counters")).get(name, 0)


@pytest.mark.parametrize("length", LENGTHS)
async def test_blocks_of_a_prompt_arrive(length: int, patient: Pair) -> None:
    sent, received = await counted(patient.prefill, "bytes"), await counted(patient.decode, "received")
    asked = prompt(length)
    await patient.check(asked, await prefill(patient.prefill, asked))
    assert await counted(patient.prefill, "bytes") > sent
    assert await counted(patient.decode, "received") == received + 1
    await patient.empty()


async def test_eight_at_once(patient: Pair) -> None:
    async def one(length: int) -> None:
        asked = prompt(length)
        await patient.check(asked, await prefill(patient.prefill, asked))

    failed = await counted(patient.decode, "failed_receives")
    await asyncio.gather(*(one(50 + 90 * i) for i in range(8)))
    assert await counted(patient.decode, "failed_receives") == failed
    await patient.empty()


async def test_the_encoder_runs_in_prefill_only(patient: Pair) -> None:
    tokens = patient.plain.llm.get_tokenizer().encode("<|audio_start|><|audio_pad|><|audio_end|>What do you hear?")
    asked = {"prompt_token_ids": tokens, "multi_modal_data": {"audio": [(audio(2.0, 1), 16000)]}}
    before = await patient.prefill.ask("encoder_steps"), await patient.decode.ask("encoder_steps")
    await patient.check(asked, await prefill(patient.prefill, asked))
    after = await patient.prefill.ask("encoder_steps"), await patient.decode.ask("encoder_steps")
    assert (after[0] - before[0], after[1] - before[1]) == (1, 0)
    await patient.empty()


async def test_what_decode_has_already_is_not_sent(patient: Pair) -> None:
    asked = prompt(900)
    await patient.check(asked, await prefill(patient.prefill, asked))
    sent = await counted(patient.prefill, "bytes")
    await patient.check(asked, await prefill(patient.prefill, asked))
    longer = {"prompt_token_ids": asked["prompt_token_ids"] + prompt(200)["prompt_token_ids"]}
    await patient.check(longer, await prefill(patient.prefill, longer))
    again = await counted(patient.prefill, "bytes") - sent
    assert 0 < again < sent
    await patient.empty()


@contextlib.contextmanager
def silent_server() -> Iterator[str]:
    """Takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


WRONG: dict[str, dict[str, Any]] = {
    "bootstrap refuses": {"remote_bootstrap_addr": "http://127.0.0.1:9"},
    "bootstrap is no address": {"remote_bootstrap_addr": "127.0.0.1:9"},
    "bootstrap is no host": {"remote_bootstrap_addr": "http://["},
    "unknown engine": {"remote_engine_id": "nobody"},
    "never prefilled": {"transfer_id": "never"},
    "no engine": {"remote_engine_id": None},
    "no transfer": {"transfer_id": None},
    "a list for an id": {"transfer_id": ["a"]},
    "meant for prefill": prefill_transfer("x"),
    "both roles at once": {"do_remote_decode": True},
    "no role": {"do_remote_prefill": False},
}


@pytest.mark.parametrize("case", WRONG)
async def test_decode_does_without_what_it_cannot_get(case: str, pair: Pair) -> None:
    asked = prompt()
    told = await prefill(pair.prefill, asked)
    await pair.check(asked, {**told, **WRONG[case]})
    await pair.decode.empty()
    await pair.decode.reject(told)
    if case == "never prefilled":  # and does not keep others from being served
        await pair.check(other := prompt(), await prefill(pair.prefill, other))
    await pair.empty()


async def test_a_bootstrap_server_that_is_silent(pair: Pair) -> None:
    asked = prompt()
    told = await prefill(pair.prefill, asked)
    with silent_server() as address:
        await pair.check(asked, {**told, "remote_bootstrap_addr": address})
        await pair.decode.empty()
    await pair.empty()


async def test_many_that_were_never_prefilled_do_not_keep_prefill_from_sending(patient: Pair) -> None:
    asked = prompt()
    told = await prefill(patient.prefill, asked)
    lost = [
        asyncio.create_task(patient.decode.run(prompt(40), GREEDY, {**told, "transfer_id": f"never-{i}"}))
        for i in range(12)
    ]
    await asyncio.sleep(0.3)
    received = await counted(patient.decode, "received")
    await patient.check(asked, told)
    assert await counted(patient.decode, "received") == received + 1
    await asyncio.gather(*lost)
    await patient.empty()


NOT_FOR_PREFILL: dict[str, dict[str, Any]] = {
    "meant for decode": answer("x", "y", "http://z"),
    "both roles at once": {**prefill_transfer("x"), "do_remote_prefill": True},
    "no transfer": {"do_remote_decode": True},
    "a number for an id": prefill_transfer(3),
    "nothing": {},
}


@pytest.mark.parametrize("transfer", NOT_FOR_PREFILL.values(), ids=NOT_FOR_PREFILL)
async def test_prefill_survives_parameters_that_are_not_for_it(transfer: dict[str, Any], pair: Pair) -> None:
    asked = prompt()
    output = await pair.prefill.run(asked, GREEDY, transfer)
    assert list(output.outputs[0].token_ids) == await pair.expected(asked)
    assert output.kv_transfer_params is None
    await pair.empty()


async def test_a_prefill_that_ends_by_a_stop_keeps_nothing(pair: Pair) -> None:
    asked = prompt()
    first = (await pair.expected(asked))[0]
    good = await prefill(pair.prefill, prompt())
    transfer = new_transfer_id()
    params = SamplingParams(**{**prefill_sampling(), "stop_token_ids": [first]})
    output = await pair.prefill.run(asked, params, prefill_transfer(transfer))
    assert decode_transfer(output.kv_transfer_params) is None
    await pair.check(asked, {**good, "transfer_id": transfer})
    await pair.empty()


async def test_a_transfer_that_is_asked_for_twice(pair: Pair, spare: Engine) -> None:
    asked = prompt()
    told = await prefill(pair.prefill, asked)
    await pair.check(asked, told)
    await pair.check(asked, told, decode=spare)
    await spare.empty()
    await pair.empty()


async def test_unclaimed_blocks_are_freed_in_time(pair: Pair) -> None:
    before = await counted(pair.prefill, "expired")
    await prefill(pair.prefill, prompt())
    assert await pair.prefill.ask("used_blocks") > 0
    took = await pair.prefill.empty(SETTINGS.kv_retention_s + PATIENT_S)
    assert took > SETTINGS.kv_retention_s - AT_ONCE_S
    assert await counted(pair.prefill, "expired") == before + 1


async def test_blocks_that_are_refused_are_freed_at_once(patient: Pair) -> None:
    told = await prefill(patient.prefill, prompt())
    await patient.decode.reject(told)
    assert await patient.prefill.empty(PATIENT_S) < PATIENT_S / 2
    await patient.empty()


async def test_aborting_a_finished_prefill_changes_nothing(patient: Pair) -> None:
    asked, name = prompt(), uuid.uuid4().hex
    params = SamplingParams(**prefill_sampling(), extra_args={KEY: prefill_transfer(new_transfer_id())})
    output = [each async for each in patient.prefill.llm.generate(asked, params, name)][-1]
    await patient.prefill.llm.abort(name)
    failed = await counted(patient.decode, "failed_receives")
    await patient.check(asked, decode_transfer(output.kv_transfer_params))
    assert await counted(patient.decode, "failed_receives") == failed
    await patient.empty()


@contextlib.contextmanager
def stopped(engine: Engine) -> Iterator[None]:
    engine.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        engine.signal(signal.SIGCONT)


async def test_a_prefill_that_hangs_and_comes_back(keeping: Pair) -> None:
    asked = prompt()
    told = await prefill(keeping.prefill, asked)
    with stopped(keeping.prefill):
        await keeping.check(asked, told)
        await asyncio.sleep(AT_ONCE_S)
        assert await keeping.decode.ask("used_blocks") > 0, "blocks that may still be written to were given away"
    await keeping.empty()


async def test_what_is_written_late_reaches_nobody(keeping: Pair, spare: Engine) -> None:
    asked, other, params = prompt(1500), prompt(1500), SamplingParams(temperature=0, max_tokens=780, ignore_eos=True)
    expected = await keeping.expected(other, params)
    told = await prefill(keeping.prefill, asked)
    sent = await counted(keeping.prefill, "bytes")
    with stopped(keeping.prefill):
        await keeping.check(asked, told, decode=spare)
        running = asyncio.create_task(spare.run(other, params))
        await asyncio.sleep(0.3)
    await keeping.prefill.empty()
    assert await counted(keeping.prefill, "bytes") > sent, "nothing was written late"
    assert not running.done(), "the write came too late to harm"
    assert list((await running).outputs[0].token_ids) == expected
    await spare.empty()
    await keeping.empty()


@pytest.mark.parametrize("prefilled", [True, False])
async def test_a_decode_that_is_aborted_while_it_waits(prefilled: bool, pair: Pair) -> None:
    asked = prompt()
    told = await prefill(pair.prefill, asked)
    if not prefilled:
        told["transfer_id"] = "never"
    with stopped(pair.prefill) if prefilled else contextlib.nullcontext():
        waiting = asyncio.create_task(pair.decode.run(asked, GREEDY, told))
        await asyncio.sleep(0.5)
        since = time.monotonic()
        waiting.cancel()
        await asyncio.wait((waiting,))
        await pair.check(prompt(), None)
        assert time.monotonic() - since < PATIENT_S / 2
    await pair.empty()


async def test_a_decode_that_is_killed_while_blocks_are_sent(pair: Pair, spare: Engine) -> None:
    asked = prompt(2000)
    told = await prefill(pair.prefill, asked)
    with stopped(pair.prefill):
        lost = asyncio.create_task(spare.run(asked, GREEDY, told))
        await asyncio.sleep(0.5)
        spare.signal(signal.SIGSTOP)
    await asyncio.sleep(0.5)
    spare.signal(signal.SIGKILL)
    with contextlib.suppress(Exception):
        await lost
    await pair.prefill.empty()
    await pair.check(asked, await prefill(pair.prefill, asked))
    await pair.empty()


async def test_a_prefill_that_is_killed_and_started_again(patient: Pair) -> None:
    first = patient.start(PREFILL)
    try:
        await patient.check(known := prompt(), await prefill(first, known))
        held, waiting = prompt(), prompt()
        answers = [await prefill(first, each) for each in (held, waiting)]
        first.signal(signal.SIGSTOP)
        expected = await patient.expected(waiting)
        pulling = asyncio.create_task(patient.decode.run(waiting, GREEDY, answers[1]))
        await asyncio.sleep(0.5)
        assert not pulling.done()
        first.signal(signal.SIGKILL)
        since = time.monotonic()
        assert list((await pulling).outputs[0].token_ids) == expected
        assert time.monotonic() - since < PATIENT_S / 2, "its death was not noticed"
        await patient.check(held, answers[0])
        await patient.decode.empty()
    finally:
        first.close()
    with patient.another(PREFILL) as successor:
        received = await counted(patient.decode, "received")
        await patient.check(asked := prompt(), await prefill(successor, asked))
        assert await counted(patient.decode, "received") == received + 1
    await patient.empty()


async def test_blocks_of_another_size_are_refused(pair: Pair) -> None:
    with pair.another(DECODE, block_size=256) as second:
        asked = prompt(600)
        await pair.check(asked, await prefill(pair.prefill, asked), decode=second)
        assert await counted(second, "failed_receives") == 1
        await second.empty()
    await pair.empty()


async def test_decode_can_be_told_to_fail_instead(patient: Pair) -> None:
    settings = replace(SETTINGS, on_failure="fail", transfer_timeout_s=PATIENT_S)
    with patient.another(DECODE, settings) as second:
        asked = prompt()
        told = await prefill(patient.prefill, asked)
        output = await second.run(asked, GREEDY, {**told, "remote_engine_id": "nobody"})
        assert output.outputs[0].finish_reason == "error"
        await second.empty()
        await patient.check(asked, told, decode=second)
    await patient.empty()


class Writer(SendMixin):
    """The sending half of a worker, on an engine of this process."""

    def __init__(self) -> None:
        self.engine = transfer_engine()
        self.xfer_stats = TransferStats()

    def __del__(self) -> None:
        """Nothing was started."""


async def test_blocks_are_in_place_when_they_count_as_sent(tmp_path: Path) -> None:
    """Several transfers at a time, each of several blocks, into memory that this process sees too."""
    block, blocks, threads, rounds = 32 << 10, 4, 4, 200
    part = block * blocks
    writer, source = Writer(), np.zeros(part * threads, np.uint8)
    assert writer.engine.register_memory(source.ctypes.data, source.nbytes) == 0
    with target(tmp_path / "memory", source.nbytes) as (session, address, memory):

        def send(number: int) -> int:
            """How many transfers had not arrived when they counted as sent."""
            offsets, late = [number * part + at for at in range(0, part, block)], 0
            for content in range(1, rounds + 1):
                source[offsets[0] :][:part] = content
                sources, targets = ([base + offset for offset in offsets] for base in (source.ctypes.data, address))
                assert writer._send_blocks(session, sources, targets, [block] * blocks) == 0
                late += not (memory[offsets[0] :][:part] == content).all()
            return late

        with ThreadPoolExecutor(threads) as pool:
            assert list(pool.map(send, range(threads))) == [0] * threads
