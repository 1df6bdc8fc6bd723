"""Routes prompts through the frontend: in one stage, or with prefill and decode in separate stages. Pure.

With a KV edge, every attempt has its own engine request in each of the two stages, with an id that is never reused, so
that late outputs of an earlier attempt are recognised.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from vllm_omni_ext.disaggregation.parameters import decode_transfer
from vllm_omni_ext.errors import StageUnavailable
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.orchestrator.kv_releases import KVReleases
from vllm_omni_ext.orchestrator.messages import AbortEngineRequests, Output, SendPrompt
from vllm_omni_ext.orchestrator.state import KVCache, Prompt

if TYPE_CHECKING:
    from vllm_omni_ext.orchestrator.machine import RequestMachine


@dataclass(frozen=True, slots=True)
class Pair:
    """A prefill replica and a decode replica between which KV caches went.

    Attributes:
        handed: number of requests since the start.
        fetching: number of requests whose first token is still missing.
    """

    source: ReplicaId
    target: ReplicaId
    handed: int
    fetching: int


class Router(Protocol):
    """The router's interface for the request machine."""

    stages: tuple[str, ...]
    """Stages of the plan that prompts pass through; the last one produces the answer."""

    private_kv: bool
    """Whether the KV transfer parameters of outputs are internal and must not reach the client."""

    def begin(self, prompt: Prompt) -> None:
        """Send a prompt to a replica, or queue it; StageUnavailable if no replica will come."""

    def resume(self, prompt: Prompt) -> bool:
        """Send a prompt that has waited for its second stage there; returns False if it must begin again."""

    def answers(self, prompt: Prompt) -> bool:
        """Return whether outputs for the prompt currently go to the client."""

    def output(self, prompt: Prompt, event: Output) -> None:
        """Handle an output for a prompt."""

    def unclaimed(self, event: Output) -> None:
        """Handle an output that belongs to no request any more."""

    def forget(self, prompt: Prompt) -> None:
        """Drop the router's state of a prompt that has ended or restarts."""

    def replica_up(self, replica: ReplicaId) -> None:
        """A replica accepts requests."""

    def replica_lost(self, replica: ReplicaId) -> list[Prompt]:
        """A replica is lost. Returns prompts on other replicas that must nevertheless restart."""

    def pairs(self) -> list[Pair]:
        """Return the pairs of replicas between which KV caches went."""


class DirectRouter:
    """The frontend computes its prompts itself."""

    private_kv = False

    def __init__(self, machine: RequestMachine, frontend: str) -> None:
        self.stages: tuple[str, ...] = (frontend,)
        self._machine = machine
        self._placement = machine.placement

    def begin(self, prompt: Prompt) -> None:
        replica = self._placement.bind(prompt)
        if replica is not None:
            self._placement.route(prompt, prompt.name)
            self._machine.observe("sent", prompt.name, None, replica)
            self._machine.out(_prompt(prompt, prompt.name))

    def resume(self, prompt: Prompt) -> bool:
        return False

    def answers(self, prompt: Prompt) -> bool:
        return not prompt.recompute

    def output(self, prompt: Prompt, event: Output) -> None:
        if event.finish is not None:
            self._placement.release(prompt)
        self._machine.prompt_output(prompt, event)

    def unclaimed(self, event: Output) -> None:
        """Ignore the output: there are no KV caches to free."""

    def forget(self, prompt: Prompt) -> None:
        if (released := self._placement.release(prompt)) is not None:
            self._machine.out(AbortEngineRequests(*released))

    def replica_up(self, replica: ReplicaId) -> None:
        """Do nothing: there are no KV caches to free."""

    def replica_lost(self, replica: ReplicaId) -> list[Prompt]:
        return []

    def pairs(self) -> list[Pair]:
        return []


class DisaggregatedRouter:
    """Stage `source` does prefill, stage `target` decode. While `source` has no replica, `target` does both."""

    private_kv = True

    def __init__(self, machine: RequestMachine, source: str, target: str) -> None:
        self.stages: tuple[str, ...] = (source, target)
        self._source, self._target = source, target
        self._machine = machine
        self._placement = machine.placement
        self._handed: Counter[tuple[ReplicaId, ReplicaId]] = Counter()
        self._releases = KVReleases(machine.placement.pools[target], machine.out)

    def begin(self, prompt: Prompt) -> None:
        """Begin an attempt; `forget` must have ended the previous one."""
        client = prompt.state.client
        assert client is not None
        if not (self._placement.pools[self._source].takes_requests and client.can_split):
            self._to_target(prompt)
            return
        prompt.stage = self._source
        replica = self._placement.bind(prompt)
        if replica is not None:
            engine_id = self._name(prompt, "p")
            self._machine.observe("sent", prompt.name, None, replica)
            self._machine.out(_prompt(prompt, engine_id, side="prefill"))

    def resume(self, prompt: Prompt) -> bool:
        """Fetch the KV cache that a source replica keeps for a prompt that has waited for a target replica."""
        kv = prompt.kv
        if prompt.stage != self._target or prompt.handed is not None or kv is None:
            return False
        if kv.holder not in self._placement.pools[self._source].replicas:
            return False
        self._to_target(prompt, kv.holder)
        return True

    def _to_target(self, prompt: Prompt, holder: ReplicaId | None = None) -> None:
        prompt.stage = self._target
        replica = self._placement.bind(prompt)
        if replica is None:
            return  # `begin` is called again when a replica is up
        engine_id, kv = self._name(prompt, "d"), prompt.kv
        self._machine.observe("sent", prompt.name, None if holder is None else self._source, replica)
        if kv is None:
            self._machine.observe("alone", self._target)
            self._machine.out(_prompt(prompt, engine_id))
        else:
            prompt.handed = self._releases.number(), self._machine.now, replica
            self._machine.out(_prompt(prompt, engine_id, side="decode", kv=kv))
        if holder is not None:
            self._handed[holder, replica] += 1

    def _name(self, prompt: Prompt, side: str) -> str:
        engine_id = f"{prompt.name}/{side}{prompt.attempts}"
        prompt.attempts += 1
        self._placement.route(prompt, engine_id)
        return engine_id

    def answers(self, prompt: Prompt) -> bool:
        return prompt.stage == self._target and not prompt.recompute

    def output(self, prompt: Prompt, event: Output) -> None:
        if prompt.stage == self._source:
            self._computed(prompt, event)
            return
        if prompt.handed is not None:  # the target's first output shows that it has fetched the KV cache
            number, since, target = prompt.handed
            self._releases.answered(target, number)
            self._machine.observe("fetched", self._source, self._target, event.at - since)
            prompt.handed = prompt.kv = None
        if event.finish is not None:
            self._placement.release(prompt)
        self._machine.prompt_output(prompt, event)

    def _computed(self, prompt: Prompt, event: Output) -> None:
        """Handle an output of the source, which may be the end of the prompt."""
        kv = _kept(event)
        if event.finish is not None:
            self._placement.release(prompt)
        self._machine.prompt_payload(prompt, event)
        if prompt.name not in prompt.state.prompts:  # the flow has ended the request
            if kv is not None:
                self._releases.release(kv)
        elif event.finish is not None:
            prompt.kv = kv
            try:
                self._to_target(prompt, event.replica)
            except StageUnavailable as error:
                self._machine.fail(prompt.state, self._target, error)

    def unclaimed(self, event: Output) -> None:
        """Release the KV cache of a prompt that was computed after its attempt had ended."""
        if event.replica.stage == self._source and (kv := _kept(event)) is not None:
            self._releases.release(kv)

    def forget(self, prompt: Prompt) -> None:
        """Drop the prompt's state and release its KV cache."""
        kv, prompt.kv, prompt.handed = prompt.kv, None, None
        released = self._placement.release(prompt)
        if released is not None:
            self._machine.out(AbortEngineRequests(*released))
        if kv is None:
            return
        if released is not None and released[0].stage == self._target:
            self._releases.add_request(released[0], kv)  # aborting a request frees the KV cache that it would fetch
        elif kv.holder in self._placement.pools[self._source].replicas:
            self._releases.release(kv)

    def replica_up(self, replica: ReplicaId) -> None:
        """A target replica accepts requests, and can pass on pending KV releases."""
        if replica.stage == self._target:
            self._releases.target_up()

    def replica_lost(self, replica: ReplicaId) -> list[Prompt]:
        """Return the prompts that wait in the target for a lost KV cache.

        Without another source replica, the target detects the loss itself and computes the prompt.
        """
        for pair in [pair for pair in self._handed if replica in pair]:
            del self._handed[pair]
        if replica.stage == self._target:
            self._releases.target_lost(replica)
        if replica.stage != self._source:
            return []
        self._releases.holder_lost(replica)
        if not self._placement.pools[self._source].takes_requests:
            return []
        return [p for p in self._fetching() if p.kv is not None and p.kv.holder == replica]

    def _fetching(self) -> list[Prompt]:
        prompts = (prompt for state in self._machine.requests.values() for prompt in state.prompts.values())
        return [prompt for prompt in prompts if prompt.handed is not None]

    def pairs(self) -> list[Pair]:
        """Return the pairs of live replicas, with their numbers of transfers."""
        live = {replica for stage in self.stages for replica in self._placement.pools[stage].replicas}
        fetching = Counter((p.kv.holder, p.handed[2]) for p in self._fetching() if p.kv and p.handed)
        return [
            Pair(source, target, handed, fetching[source, target])
            for (source, target), handed in sorted(self._handed.items())
            if {source, target} <= live
        ]


def _prompt(prompt: Prompt, engine_id: str, side: str = "whole", kv: KVCache | None = None) -> SendPrompt:
    assert prompt.replica is not None and prompt.state.client is not None
    return SendPrompt(
        prompt.replica,
        prompt.state.request_id,
        engine_id,
        request=prompt.state.client.request,
        side=side,  # type: ignore[arg-type]
        tokens=tuple(prompt.tokens),
        recompute=prompt.recompute,
        kv=None if kv is None else kv.transfer,
    )


def _kept(event: Output) -> KVCache | None:
    """Return the KV cache that a finished prompt's output announces; None if the engine keeps none."""
    transfer = decode_transfer(event.kv) if event.finish == "length" else None  # type: ignore[arg-type]
    return None if transfer is None else KVCache(event.replica, transfer)
