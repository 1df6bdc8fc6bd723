"""Real prefill and decode engines over Mooncake; `test_kv_transfer.py` runs it where only loopback can be reached.

However a transfer fails, decode answers as one engine alone does, in less than `BOUND_S` on an idle machine; no block
stays in use on either side; no engine ends that was not killed.
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
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from vllm import SamplingParams

from tests.support.kv_engines import PLAIN, Engine, prefill
from tests.support.media import audio
from vllm_omni_ext.disaggregation.parameters import (
    DECODE,
    KEY,
    PREFILL,
    TransferSettings,
    answer,
    decode_transfer,
    new_transfer_id,
    prefill_sampling,
    prefill_transfer,
)

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]
extended = pytest.mark.extended

SETTINGS = TransferSettings(transfer_timeout_s=1.5, kv_retention_s=2.0)
PATIENT_S = 60.0
"""For tests in which no time limit may pass, however busy the machine is."""

BOUND_S = 5.0
AT_ONCE_S = 1.5
SLACK = 10
"""A bound is longer by so many times the time of the plain engine."""

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
LENGTHS = (2, 127, 128, 129, 2000)

_serial = itertools.count(1)


def prompt(length: int = 300) -> dict[str, Any]:
    """Token ids that no other prompt begins with, so that none of its blocks is in a prefix cache."""
    n = next(_serial)
    ids = [n % 200 + 3, n // 200 + 3, *((5 * i + n) % 200 + 3 for i in range(length))]
    return {"prompt_token_ids": ids[:length]}


class Pair:
    """A plain, a prefill and a decode engine."""

    def __init__(self, model: str, settings: TransferSettings) -> None:
        self.model, self.settings = model, settings
        self.plain = Engine(model, PLAIN, settings)
        self.prefill, self.decode = self.start(PREFILL), self.start(DECODE)

    def start(self, role: str, settings: TransferSettings | None = None, **args: Any) -> Engine:
        return Engine(self.model, role, settings or self.settings, **{"enable_prefix_caching": True, **args})

    @contextlib.contextmanager
    def another(self, role: str, settings: TransferSettings | None = None, **args: Any) -> Iterator[Engine]:
        """One more engine, which the test may kill."""
        engine = self.start(role, settings, **args)
        try:
            yield engine
        finally:
            engine.close()

    async def expected(self, asked: Any, params: SamplingParams = GREEDY) -> list[int]:
        return list((await self.plain.run(asked, params)).outputs[0].token_ids)

    async def check(self, asked: Any, transfer: Any, *, decode: Engine | None = None, bound_s: float = BOUND_S) -> None:
        """Decode answers as the plain engine does, in time."""
        began = time.monotonic()
        expected = await self.expected(asked)
        since = time.monotonic()
        output = await (decode or self.decode).run(asked, GREEDY, transfer)
        took = time.monotonic() - since
        assert list(output.outputs[0].token_ids) == expected
        assert took < bound_s + SLACK * (since - began)

    async def both(self, asked: Any, **options: Any) -> None:
        """Prefill computes a prompt, and decode answers it."""
        await self.check(asked, await prefill(self.prefill, asked), **options)

    async def empty(self) -> None:
        """Nothing is in use on either side."""
        for engine in (self.decode, self.prefill):
            await engine.empty(self.settings.kv_retention_s + PATIENT_S)

    async def wait_up_to(self, transfer_timeout_s: float, kv_retention_s: float) -> None:
        """Change the time limits of both sides."""
        for engine in (self.prefill, self.decode):
            await engine.ask("be_patient", transfer_timeout_s, kv_retention_s)

    def close(self) -> None:
        for engine in (self.plain, self.prefill, self.decode):
            engine.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tiny: Path) -> AsyncIterator[Pair]:
    made = Pair(str(tiny), SETTINGS)
    await made.both(prompt())  # connects the two: a prefill that stops before that gets no request for blocks
    yield made
    made.close()


@pytest_asyncio.fixture(loop_scope="module")
async def patient(pair: Pair) -> AsyncIterator[Pair]:
    """The same pair, with long time limits on both sides."""
    await pair.wait_up_to(PATIENT_S, PATIENT_S)
    yield pair
    await pair.wait_up_to(SETTINGS.transfer_timeout_s, SETTINGS.kv_retention_s)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def spare(pair: Pair) -> AsyncIterator[Engine]:
    """Another decode engine, connected with prefill.

    Without a prefix cache it uses first the blocks that it freed last: those which a late write would change.
    """
    with pair.another(DECODE, enable_prefix_caching=False) as engine:
        await pair.both(prompt(), decode=engine)
        yield engine


async def counted(engine: Engine, name: str) -> float:
    return (await engine.ask("transfer_counters")).get(name, 0)


@pytest.mark.parametrize("length", LENGTHS)
async def test_blocks_of_a_prompt_arrive(length: int, patient: Pair) -> None:
    """Decode computes its last token alone."""
    asked = prompt(length)
    told, before = await prefill(patient.prefill, asked), await patient.decode.ask("computed_tokens")
    await patient.check(asked, told)
    assert await patient.decode.ask("computed_tokens") - before == GREEDY.max_tokens
    await patient.empty()


async def test_blocks_of_eight_prompts_at_once_arrive(patient: Pair) -> None:
    failed = await counted(patient.decode, "failed_receives")
    await asyncio.gather(*(patient.both(prompt(50 + 90 * i)) for i in range(8)))
    assert await counted(patient.decode, "failed_receives") == failed
    await patient.empty()


async def test_the_encoder_runs_in_prefill_only(patient: Pair) -> None:
    ids = patient.plain.llm.get_tokenizer().encode("<|audio_start|><|audio_pad|><|audio_end|>What do you hear?")
    before = await patient.prefill.ask("encoder_steps"), await patient.decode.ask("encoder_steps")
    await patient.both({"prompt_token_ids": ids, "multi_modal_data": {"audio": [(audio(2.0, 1), 16000)]}})
    after = await patient.prefill.ask("encoder_steps"), await patient.decode.ask("encoder_steps")
    assert (after[0] - before[0], after[1] - before[1]) == (1, 0)
    await patient.empty()


@extended
async def test_blocks_in_decodes_prefix_cache_are_not_sent(patient: Pair) -> None:
    asked = prompt(900)
    await patient.both(asked)
    sent = await counted(patient.prefill, "bytes")
    await patient.both(asked)
    await patient.both({"prompt_token_ids": asked["prompt_token_ids"] + prompt(200)["prompt_token_ids"]})
    assert 0 < await counted(patient.prefill, "bytes") - sent < sent
    await patient.empty()


@contextlib.contextmanager
def silent_server() -> Iterator[str]:
    """Accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


WRONG: dict[str, dict[str, Any]] = {
    "bootstrap refuses": {"remote_bootstrap_addr": "http://127.0.0.1:9"},
    "bootstrap is silent": {},
    "bootstrap is no address": {"remote_bootstrap_addr": "127.0.0.1:9"},
    "bootstrap is no host": {"remote_bootstrap_addr": "http://["},
    "unknown engine": {"remote_engine_id": "nobody"},
    "never prefilled": {"transfer_id": "never"},
    "a list for an id": {"transfer_id": ["a"]},
    "both roles at once": {"do_remote_decode": True},
}


@extended
@pytest.mark.parametrize("case", WRONG)
async def test_decode_computes_a_prompt_whose_blocks_cannot_be_fetched(case: str, pair: Pair) -> None:
    asked = prompt()
    told = await prefill(pair.prefill, asked)
    with silent_server() as address:
        wrong = {"remote_bootstrap_addr": address} if case == "bootstrap is silent" else WRONG[case]
        await pair.check(asked, {**told, **wrong})
        await pair.decode.empty()
    await pair.decode.reject(told)
    await pair.both(prompt())  # other requests are served
    await pair.empty()


@extended
async def test_transfers_that_never_begin_do_not_delay_others(patient: Pair) -> None:
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


@extended
@pytest.mark.parametrize("transfer", [answer("x", "y", "http://z"), {}], ids=["for decode", "nothing"])
async def test_prefill_ignores_transfer_parameters_of_another_role(transfer: dict[str, Any], pair: Pair) -> None:
    asked = prompt()
    output = await pair.prefill.run(asked, GREEDY, transfer)
    assert list(output.outputs[0].token_ids) == await pair.expected(asked)
    assert output.kv_transfer_params is None
    await pair.empty()


@extended
async def test_a_prefill_that_ends_by_a_stop_token_retains_no_block(pair: Pair) -> None:
    asked, transfer = prompt(), new_transfer_id()
    good = await prefill(pair.prefill, prompt())
    params = SamplingParams(**{**prefill_sampling(), "stop_token_ids": (await pair.expected(asked))[:1]})
    output = await pair.prefill.run(asked, params, prefill_transfer(transfer))
    assert decode_transfer(output.kv_transfer_params) is None
    await pair.check(asked, {**good, "transfer_id": transfer})
    await pair.empty()


@extended
async def test_unclaimed_blocks_are_freed_in_time(pair: Pair) -> None:
    before = await counted(pair.prefill, "expired")
    await prefill(pair.prefill, prompt())
    assert await pair.prefill.ask("used_blocks") > 0
    assert await pair.prefill.empty(SETTINGS.kv_retention_s + PATIENT_S) > SETTINGS.kv_retention_s - AT_ONCE_S
    assert await counted(pair.prefill, "expired") == before + 1


async def test_refused_blocks_are_freed_at_once(patient: Pair) -> None:
    await patient.decode.reject(await prefill(patient.prefill, prompt()))
    assert await patient.prefill.empty(PATIENT_S) < PATIENT_S / 2
    await patient.empty()


@extended
async def test_aborting_a_finished_prefill_keeps_its_blocks(patient: Pair) -> None:
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


@extended
async def test_a_late_write_changes_no_other_request(pair: Pair, spare: Engine) -> None:
    """Prefill stops before it sends, decode gives up, and prefill continues."""
    asked, other, params = prompt(1500), prompt(1500), SamplingParams(temperature=0, max_tokens=780, ignore_eos=True)
    expected = await pair.expected(other, params)
    await pair.prefill.ask("be_patient", SETTINGS.transfer_timeout_s, PATIENT_S)
    told = await prefill(pair.prefill, asked)
    sent = await counted(pair.prefill, "bytes")
    with stopped(pair.prefill):
        await pair.check(asked, told, decode=spare)
        running = asyncio.create_task(spare.run(other, params))
        await asyncio.sleep(0.3)
    await pair.prefill.empty()
    assert await counted(pair.prefill, "bytes") > sent, "nothing was written late"
    assert not running.done(), "the write came too late to harm"
    assert list((await running).outputs[0].token_ids) == expected
    await pair.prefill.ask("be_patient", SETTINGS.transfer_timeout_s, SETTINGS.kv_retention_s)
    await spare.empty()
    await pair.empty()


@pytest.mark.parametrize("prefilled", [True, False])
async def test_an_abort_while_decode_waits_frees_the_blocks(prefilled: bool, pair: Pair) -> None:
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


async def test_a_decode_engine_killed_while_blocks_are_sent_leaves_nothing(pair: Pair, spare: Engine) -> None:
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
    await pair.both(asked)
    await pair.empty()


async def test_decode_computes_the_prompts_of_a_killed_prefill_engine(patient: Pair) -> None:
    first = patient.start(PREFILL)
    try:
        await patient.check(connecting := prompt(), await prefill(first, connecting))
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
        assert time.monotonic() - since < PATIENT_S / 2, "decode did not notice that prefill had ended"
        await patient.check(held, answers[0])
        await patient.decode.empty()
    finally:
        first.close()
    with patient.another(PREFILL) as successor:
        received = await counted(patient.decode, "received")
        await patient.check(asked := prompt(), await prefill(successor, asked))
        assert await counted(patient.decode, "received") == received + 1
    await patient.empty()


@extended
async def test_decode_fails_the_request_if_on_failure_is_fail(patient: Pair) -> None:
    settings = replace(SETTINGS, on_failure="fail", transfer_timeout_s=PATIENT_S)
    with patient.another(DECODE, settings) as second:
        asked = prompt()
        told = await prefill(patient.prefill, asked)
        output = await second.run(asked, GREEDY, {**told, "remote_engine_id": "nobody"})
        assert output.outputs[0].finish_reason == "error"
        await second.empty()
        await patient.check(asked, told, decode=second)
    await patient.empty()
