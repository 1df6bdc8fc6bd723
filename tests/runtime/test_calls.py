"""The replicas that a call reaches, and its answers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_omni_ext.errors import CallFailed, RequestError, RequestFailed, StageUnavailable, UnknownMember
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.pool.stage_pool import StagePool
from vllm_omni_ext.runtime.client.calls import Calls, TargetedLLM
from vllm_omni_ext.runtime.client.replica import StockReplica
from vllm_omni_ext.runtime.client.text_client import TextClient
from vllm_omni_ext.runtime.control import ReplicasSlept

COUNTS = {"thinker": 2, "talker": 2, "code2wav": 1}
NAMES = [ReplicaId(stage, i) for stage, count in COUNTS.items() for i in range(count)]
SOON_S = 0.05


class Client:
    """vLLM's client of one replica; every utility logs its call and returns its entry of `answers`."""

    def __init__(self, log: list[tuple[str, str, tuple[Any, ...]]], name: str) -> None:
        self._log = log
        self._name = name
        self.answers: dict[str, Any] = {}
        self.outputs_queue: asyncio.Queue[Any] = asyncio.Queue()
        self.resources = SimpleNamespace(engine_dead=False)

    def __getattr__(self, utility: str) -> Any:
        async def call(*args: Any) -> Any:
            self._log.append((self._name, utility.removesuffix("_async"), args))
            await asyncio.sleep(0)
            answer = self.answers.get(utility.removesuffix("_async"))
            if isinstance(answer, Exception):
                raise answer
            if isinstance(answer, asyncio.Event):
                await answer.wait()
            return answer

        return call

    async def get_output_async(self) -> Any:
        raise await self.outputs_queue.get()


class Bench:
    """Calls over stock replicas with scripted clients."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str, tuple[Any, ...]]] = []
        self.clients: dict[str, Any] = {str(name): Client(self.log, str(name)) for name in NAMES}
        self.replicas = {name: StockReplica(name, self.clients[str(name)]) for name in NAMES}
        self.pools = {stage: StagePool(stage, [n for n in NAMES if n.stage == stage]) for stage in COUNTS}
        self.calls = Calls(self.replicas, self.pools, "thinker")
        self.calls.share = self.apply

    def answer(self, utility: str, value: Any, *names: str) -> None:
        for name in names or self.clients:
            self.clients[name].answers[utility] = value

    async def apply(self, change: ReplicasSlept) -> None:
        for replica in change.replicas:
            pool = self.pools[replica.stage]
            (pool.mark_asleep if change.asleep else pool.mark_awake)(replica)

    def lose(self, name: str) -> None:
        replica = ReplicaId.parse(name)
        del self.replicas[replica]
        self.pools[replica.stage].remove(replica)

    def called(self) -> list[str]:
        return [name for name, *_ in self.log]


def texts(replies: Any) -> dict[str, Any]:
    return {str(replica): reply.value if reply.error is None else reply.error for replica, reply in replies.items()}


@pytest.mark.parametrize(
    ("targets", "reached"),
    [
        (["talker/1"], ["talker/1"]),
        (["talker"], ["talker/0", "talker/1"]),
        (["code2wav", "talker/0"], ["talker/0", "code2wav/0"]),
        (["talker/1", "talker", "talker/1"], ["talker/0", "talker/1"]),
        (list(COUNTS), [str(name) for name in NAMES]),
        ("thinker", ["thinker/0", "thinker/1"]),
    ],
    ids=str,
)
async def test_a_call_reaches_exactly_its_targets(targets: Any, reached: list[str]) -> None:
    bench = Bench()
    bench.answer("reset_prefix_cache", True)
    bench.answer("reset_prefix_cache", False, "talker/1")
    replies = await bench.calls.to(targets, "reset_prefix_cache_async", True, False)
    assert texts(replies) == {name: name != "talker/1" for name in reached}
    assert bench.log == [(name, "reset_prefix_cache", (True, False)) for name in reached]


@pytest.mark.parametrize("target", ["vocoder", "talker/2", "talker/", "/0", "", "talker/01", "Talker", "talker/-1"])
async def test_an_unknown_target_is_refused_before_any_replica_is_called(target: str) -> None:
    bench = Bench()
    with pytest.raises(UnknownMember, match=r"thinker, talker, code2wav; live replicas: thinker/0, .*code2wav/0") as it:
        await bench.calls.to(["talker/0", target], "sleep_async", 1, "abort")
    assert f"'{target}'" in str(it.value)
    assert bench.log == [] and bench.pools["talker"].admit() == ReplicaId("talker", 0)
    with pytest.raises(UnknownMember, match="no targets"):
        await bench.calls.to([], "sleep_async")


async def test_a_lost_replica_is_unknown_and_its_stage_is_reachable() -> None:
    bench = Bench()
    bench.lose("talker/0")
    with pytest.raises(UnknownMember, match=r"no stage or live replica 'talker/0'.*: thinker/0, thinker/1, talker/1"):
        bench.calls.resolve(["talker/0"])
    assert list(map(str, bench.calls.resolve(["talker"]))) == ["talker/1"]
    bench.lose("talker/1")
    with pytest.raises(StageUnavailable, match="'talker' has no live replica"):
        bench.calls.resolve(["thinker", "talker"])


async def test_failure_or_death_of_one_replica_hides_no_other_answer() -> None:
    bench = Bench()
    bench.answer("list_loras", {1})
    bench.answer("list_loras", ValueError("no such method"), "talker/1")
    bench.answer("list_loras", asyncio.Event(), "talker/0")
    dying = bench.replicas[ReplicaId("talker", 0)]
    pump = asyncio.create_task(dying.outputs())
    call = asyncio.create_task(bench.calls.to(["talker", "code2wav"], "list_loras_async"))
    await asyncio.sleep(SOON_S)
    assert not call.done()
    dying.fail("its process was killed")
    replies = texts(await asyncio.wait_for(call, 2))
    assert str(replies.pop("talker/0")) == "replica talker/0 is gone"
    assert isinstance(replies.pop("talker/1"), ValueError) and replies == {"code2wav/0": {1}}
    for later in (pump, dying.call("list_loras_async")):
        with pytest.raises(EngineDeadError):
            await later


async def test_a_replica_that_is_lost_while_sleep_is_shared_hides_no_other_answer() -> None:
    bench = Bench()

    async def share(change: ReplicasSlept) -> None:
        await bench.apply(change)
        bench.lose("talker/1")

    bench.calls.share = share  # type: ignore[assignment]
    replies = texts(await bench.calls.to(["talker", "code2wav"], "sleep_async", 1, "abort"))
    assert str(replies.pop("talker/1")) == "replica talker/1 is gone"
    assert replies == {"talker/0": None, "code2wav/0": None} and bench.called() == ["talker/0", "code2wav/0"]


async def test_a_silent_replica_has_failed_after_the_timeout_and_nothing_is_kept_of_the_call() -> None:
    bench = Bench()
    bench.answer("is_sleeping", asyncio.Event(), "talker/1")
    replies = texts(await bench.calls.to(["talker"], "is_sleeping_async", timeout_s=SOON_S))
    assert isinstance(replies["talker/1"], RequestFailed) and "0.05 s" in str(replies["talker/1"])
    assert replies["talker/0"] is None
    cancelled = asyncio.create_task(bench.calls.to(["talker"], "is_sleeping_async"))
    await asyncio.sleep(SOON_S)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert not any(replica._calls for replica in bench.replicas.values())


@pytest.mark.parametrize(
    ("utility", "answer", "whole", "folded"),
    [
        ("reset_prefix_cache", True, True, True),
        ("is_sleeping", False, True, False),
        ("reset_encoder_cache", None, True, None),
        ("collective_rpc", ["a"], False, ["a", "a"]),
        ("add_lora", True, False, True),
        ("get_weight_version", "3", False, "3"),
    ],
)
async def test_a_call_without_targets_returns_one_answer(utility: str, answer: Any, whole: bool, folded: Any) -> None:
    bench = Bench()
    bench.answer(utility, answer)
    assert await bench.calls.everywhere(f"{utility}_async") == folded
    assert bench.called() == [str(name) for name in NAMES if whole or name.stage == "thinker"]


async def test_different_answers_are_folded_and_a_failure_has_all_answers() -> None:
    bench = Bench()
    for utility, odd in (("is_sleeping", True), ("wake_up", False)):
        bench.answer(utility, not odd)
        bench.answer(utility, odd, "code2wav/0")
        assert await bench.calls.everywhere(f"{utility}_async") is odd
    bench.answer("list_loras", {1, 2}, "thinker/0")
    bench.answer("list_loras", {2, 3}, "thinker/1")
    assert await bench.calls.everywhere("list_loras_async") == {2}
    bench.answer("reset_prefix_cache", True)
    bench.answer("reset_prefix_cache", ValueError("held"), "talker/0")
    with pytest.raises(CallFailed, match=r"^talker/0: held$") as failure:
        await bench.calls.everywhere("reset_prefix_cache_async")
    assert texts(failure.value.replies)["code2wav/0"] is True
    for name in map(str, NAMES):
        bench.lose(name)
    with pytest.raises(StageUnavailable):
        await bench.calls.everywhere("reset_prefix_cache_async")


async def test_sleep_is_shared_before_the_call_and_wake_after_it() -> None:
    bench, shared = Bench(), []
    talker = bench.pools["talker"]
    zero, one = talker.replicas

    async def share(change: ReplicasSlept) -> None:
        shared.append((change, len(bench.log)))
        await bench.apply(change)

    bench.calls.share = share
    await bench.calls.to(["talker/0"], "sleep_async", 1, "abort")
    assert {talker.admit() for i in range(4)} == {one}, "no request is routed to a sleeping replica"
    bench.answer("wake_up", False)
    await bench.calls.to(["talker/0"], "wake_up_async", ["weights"])
    assert talker.admit() == one, "partly awake is asleep"
    bench.answer("wake_up", True)
    await bench.calls.to(["talker"], "wake_up_async", None)
    assert talker.admit() == zero
    assert shared == [
        (ReplicasSlept((zero,), asleep=True), 0),
        (ReplicasSlept((), asleep=False), 2),
        (ReplicasSlept((zero, one), asleep=False), 4),
    ]


async def test_profiles_are_named_after_replicas() -> None:
    bench = Bench()
    await bench.calls.everywhere("profile_async", True, None, None, 3)
    await bench.calls.to(["talker/1"], "profile_async", True, "run", None, None)
    await bench.calls.to(["talker/1"], "profile_async", False)
    assert bench.log[0][2] == (True, "thinker-0", None, 3) and bench.log[4][2] == (True, "code2wav-0", None, 3)
    assert [args for *_, args in bench.log[5:]] == [(True, "run_talker-1", None, None), (False,)]


class Renderer:
    """Counts how often its media cache is forgotten."""

    def __init__(self) -> None:
        self.cleared = 0

    def _join_mm_warmup(self) -> None:
        pass

    async def clear_mm_cache_async(self) -> None:
        self.cleared += 1


def targeted(bench: Bench) -> Any:
    llm: Any = TargetedLLM.__new__(TargetedLLM)
    llm.engine_core = SimpleNamespace(calls=bench.calls, shutdown=lambda timeout=None: None)
    llm.renderer = Renderer()
    llm.logger_manager = None
    llm.shutdown = lambda timeout=None: None  # `__del__` calls it
    return llm


@pytest.mark.parametrize(
    ("method", "given"), [("list_loras", ()), ("pin_lora", (3,)), ("collective_rpc", ("f", None, (1,), {"a": 2}))]
)
async def test_targeted_methods_have_a_timeout(method: str, given: tuple[Any, ...]) -> None:
    """`tests/serving/test_stage_calls.py` has the other methods."""
    bench = Bench()
    llm = targeted(bench)
    bench.answer(method, "done")
    assert texts(await getattr(llm, method)(*given, targets=["talker/1"])) == {"talker/1": "done"}
    assert bench.log == [("talker/1", method, given)]
    bench.answer(method, asyncio.Event())
    late = texts(await getattr(llm, method)(*given, targets=["talker/1"], timeout_s=0.01))
    assert isinstance(late["talker/1"], RequestFailed) and "0.01 s" in str(late["talker/1"])


async def test_the_timeout_of_a_remote_call_is_its_own_argument() -> None:
    bench = Bench()
    bench.answer("collective_rpc", asyncio.Event())
    late = texts(await targeted(bench).collective_rpc("f", 0.01, targets=["talker/1"]))
    assert "0.01 s" in str(late["talker/1"])


async def test_the_media_cache_is_cleared_with_that_of_the_text_stage() -> None:
    llm = targeted(Bench())
    await llm.reset_mm_cache(targets=["talker"])
    await llm.sleep(0, targets=["thinker"])
    assert llm.renderer.cleared == 0
    await llm.reset_mm_cache(targets=["talker", "thinker/1"])
    await llm.sleep(1, targets=["thinker/0"])
    assert llm.renderer.cleared == 2


def split() -> Bench:
    """The thinker's replicas are the prefill side of a text stage, the talker's its decode side."""
    bench = Bench()
    bench.calls = Calls(bench.replicas, bench.pools, "talker", {"text": ("thinker", "talker")})
    bench.calls.share = bench.apply
    return bench


async def test_a_split_stage_has_one_name_and_needs_its_decode_side_only() -> None:
    bench, both = split(), ["thinker/0", "thinker/1", "talker/0", "talker/1"]
    bench.answer("add_lora", True)
    assert list(texts(await bench.calls.to(["text"], "sleep_async", 1))) == both
    assert list(texts(await bench.calls.to(["talker"], "sleep_async", 1))) == both[2:]
    with pytest.raises(UnknownMember, match=r"stages: text, thinker, talker, code2wav"):
        bench.calls.resolve(["txt"])
    calls, media = bench.calls, {"thinker", "code2wav"}
    common = [calls.common({"thinker", "talker"}), calls.common({"thinker"}), calls.common(media)]
    assert common == ["text", "thinker", None] and Bench().calls.common({"thinker", "talker"}) is None
    assert [bench.calls.is_text(stage) for stage in ("text", "thinker", "talker", "code2wav")] == [True] * 3 + [False]
    bench.log.clear()
    assert await bench.calls.everywhere("add_lora_async", None)
    assert bench.called() == both
    for name in ("thinker/0", "thinker/1"):
        bench.lose(name)
    assert await bench.calls.everywhere("add_lora_async", None)
    assert bench.called()[4:] == both[2:]
    with pytest.raises(StageUnavailable, match="stage 'thinker' has no live replica"):
        bench.calls.resolve(["text"])
    for name in ("talker/0", "talker/1"):
        bench.lose(name)
    with pytest.raises(StageUnavailable, match="stage 'talker' has no live replica"):
        await bench.calls.everywhere("add_lora_async", None)


@pytest.mark.parametrize(
    ("utility", "args", "parameter"),
    [
        ("sleep", (2, "abort"), "level"),
        ("collective_rpc", ("reload_weights", None, (), {}), "method"),
        ("collective_rpc", ("start_weight_update", None, (), {}), "method"),
    ],
)
async def test_a_stage_whose_weights_cannot_be_replaced_keeps_them(
    utility: str, args: tuple[Any, ...], parameter: str
) -> None:
    """Tensors that its model has computed from the weights at the start, and graphs over them, would be wrong."""
    bench = Bench()
    bench.calls = Calls(bench.replicas, bench.pools, "thinker", own_models=["talker", "code2wav"])
    bench.calls.share = bench.apply
    with pytest.raises(RequestError, match=r"stages? 'talker'") as it:
        await bench.calls.to(["thinker", "talker/0"], f"{utility}_async", *args)
    assert it.value.parameter == parameter
    if utility == "sleep":
        with pytest.raises(RequestError, match=r"stages 'talker', 'code2wav'.*level 1.*targets"):
            await bench.calls.everywhere("sleep_async", *args)
    assert bench.log == [] and not any(bench.pools[name.stage].is_asleep(name) for name in NAMES)
    bench.answer(utility, None)
    await bench.calls.to(["thinker"], f"{utility}_async", *args)
    await bench.calls.to(["talker"], "sleep_async", 1, "abort")
    await bench.calls.to(["talker"], "collective_rpc_async", "check_health", None, (), {})
    assert len(bench.called()) == 6


async def test_a_pause_of_vllm_0_33_is_the_pause_of_all_stages() -> None:
    bench = Bench()
    await bench.calls.everywhere("pause_generation_async", mode="keep", clear_cache=True)
    assert bench.log == [(str(name), "pause_scheduler", ("keep", True)) for name in NAMES]
    assert all(pool.is_asleep(replica) for pool in bench.pools.values() for replica in pool.replicas)


async def test_pauses_reach_all_stages_by_the_names_that_this_vllm_calls() -> None:
    bench = Bench()
    client = TextClient.__new__(TextClient)
    client.calls = bench.calls
    llm: Any = SimpleNamespace(engine_core=client, renderer=Renderer())
    await AsyncLLM.pause_generation(llm, mode="wait", clear_cache=False)
    assert all(pool.is_asleep(replica) for pool in bench.pools.values() for replica in pool.replicas)
    bench.answer("is_scheduler_paused", False)
    bench.answer("is_scheduler_paused", True, "code2wav/0")
    assert await AsyncLLM.is_paused(llm) is True
    await AsyncLLM.resume_generation(llm)
    assert not any(pool.is_asleep(replica) for pool in bench.pools.values() for replica in pool.replicas)
    utilities = [("pause_scheduler", ("wait", False)), ("is_scheduler_paused", ()), ("resume_scheduler", ())]
    assert bench.log == [(str(name), utility, args) for utility, args in utilities for name in NAMES]
