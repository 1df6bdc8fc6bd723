"""Routes prompts through the frontend: in one stage, or with prefill and decode in separate stages. Pure.

With separate stages, each attempt has its own engine request in each of the two, with an id that is never reused, so
that late outputs of an earlier attempt are recognised.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from vllm_omni_ext.disaggregation.parameters import decode_transfer
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.orchestrator.messages import AbortEngineRequests, Effect, Output, SendKVRelease, SendPrompt
from vllm_omni_ext.orchestrator.placement import Placement
from vllm_omni_ext.orchestrator.state import KVCache, Prompt, RequestObserver

MOST_KEPT = 4096
"""Limit of pending releases per target, and for those that wait for a target; a source frees older KV caches itself."""


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


class PromptRouter:
    """Stage `source` does prefill, stage `target` decode. Without a source, or while it has no replica, `target` does
    both.

    Args:
        out: receives the effects, which are messages to replicas.
    """

    def __init__(
        self,
        placement: Placement,
        observer: RequestObserver,
        out: Callable[[Effect], None],
        *,
        target: str,
        source: str | None = None,
    ) -> None:
        self.stages = (target,) if source is None else (source, target)
        """Stages of the plan that prompts pass through; the last one produces the answer."""
        self.private_kv = source is not None
        """Whether the KV transfer parameters of outputs are internal and must not reach the client."""
        self._source, self._target = source, target
        self._placement = placement
        self._observer = observer
        self._out = out
        self._handed: Counter[tuple[ReplicaId, ReplicaId]] = Counter()
        self._releases = KVReleases(placement, target, out)

    def begin(self, prompt: Prompt) -> None:
        """Send a prompt to a replica, or queue it; StageUnavailable if no replica will come.

        A prompt whose KV cache a source replica keeps goes on to the target. Otherwise a new attempt begins.
        """
        if prompt.kv is not None and prompt.handed is None and self._is_source(prompt.kv.holder):
            self.fetch(prompt, prompt.kv.holder)
            return
        self.end(prompt)
        client = prompt.state.client
        assert client is not None
        if self._source is None or not (self._placement.pools[self._source].takes_requests and client.can_split):
            self.fetch(prompt)
            return
        prompt.stage = self._source
        replica = self._placement.bind(prompt)
        if replica is not None:
            self._send(prompt, replica, None, "prefill")

    def fetch(self, prompt: Prompt, holder: ReplicaId | None = None) -> None:
        """Send a prompt to the target, which fetches its KV cache if there is one, or queue it.

        Args:
            holder: the source replica that has computed the prompt; None: the target computes it.
        """
        prompt.stage = self._target
        replica = self._placement.bind(prompt)
        if replica is None:
            return  # `begin` is called again when a replica is up
        source = None if holder is None else self._source
        if prompt.kv is not None:
            prompt.handed = self._releases.number(), self._placement.now, replica
            self._send(prompt, replica, source, "decode")
        else:
            if self._source is not None:
                self._observer.local_prefill(self._target)
            self._send(prompt, replica, source, "whole")
        if holder is not None:
            self._handed[holder, replica] += 1

    def _send(
        self, prompt: Prompt, replica: ReplicaId, source: str | None, side: Literal["whole", "prefill", "decode"]
    ) -> None:
        state, engine_id = prompt.state, prompt.name
        assert state.client is not None
        if self._source is not None:
            engine_id = f"{prompt.name}/{'p' if side == 'prefill' else 'd'}{prompt.attempts}"
            prompt.attempts += 1
        self._placement.route(prompt, engine_id)
        self._observer.sent(prompt.trace, source, replica)
        self._out(
            SendPrompt(
                replica,
                state.request_id,
                engine_id,
                request=state.client.request,
                side=side,
                tokens=tuple(prompt.tokens),
                recompute=prompt.recompute,
                kv=prompt.kv.transfer if prompt.kv is not None and side == "decode" else None,
            )
        )

    def _is_source(self, replica: ReplicaId) -> bool:
        return self._source is not None and replica in self._placement.pools[self._source].replicas

    def answers(self, prompt: Prompt) -> bool:
        """Return whether outputs for the prompt currently go to the client."""
        return prompt.stage == self._target and not prompt.recompute

    def output(self, prompt: Prompt, event: Output) -> bool:
        """Record an output for a prompt. Returns True if it is the target's, False if it is only the source's.

        After the source's last output, `fetch` must follow, unless the flow ends the request.
        """
        if event.finish is not None:
            self._placement.release(prompt)
        if prompt.stage == self._source:
            prompt.kv = _kept(event)
            return False
        if prompt.handed is not None:  # the target's first output shows that it has fetched the KV cache
            number, since, target = prompt.handed
            assert self._source is not None
            self._releases.answered(target, number)
            self._observer.fetched(self._source, self._target, self._placement.now - since)
            prompt.handed = prompt.kv = None
        return True

    def unclaimed(self, event: Output) -> None:
        """Release the KV cache of a prompt that was computed after its attempt had ended."""
        if event.replica.stage == self._source and (kv := _kept(event)) is not None:
            self._releases.release(kv)

    def end(self, prompt: Prompt) -> None:
        """End a prompt's attempt, and release its KV cache."""
        kv, prompt.kv, prompt.handed = prompt.kv, None, None
        released = self._placement.release(prompt)
        if released is not None:
            self._out(AbortEngineRequests(*released))
        if kv is None:
            return
        if released is not None and released[0].stage == self._target:
            self._releases.add_request(released[0], kv)  # aborting a request frees the KV cache that it would fetch
        elif self._is_source(kv.holder):
            self._releases.release(kv)

    def replica_up(self, replica: ReplicaId) -> None:
        """A target replica accepts requests, and can pass on pending KV releases."""
        if replica.stage == self._target:
            self._releases.target_up()

    def replica_lost(self, replica: ReplicaId) -> list[Prompt]:
        """Return the prompts that wait in the target for a lost KV cache, and must restart.

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
        return [prompt for prompt in self._fetching() if prompt.kv is not None and prompt.kv.holder == replica]

    def _fetching(self) -> Iterator[Prompt]:
        """Iterate over the prompts that have been sent to the target with a KV cache, and have no output of it."""
        for binding in self._placement.bound(self._target):
            if isinstance(binding, Prompt) and binding.handed is not None:
                yield binding

    def pairs(self) -> list[Pair]:
        """Return the pairs of live replicas between which KV caches went, with their numbers of transfers."""
        live = {replica for stage in self.stages for replica in self._placement.pools[stage].replicas}
        fetching = Counter((p.kv.holder, p.handed[2]) for p in self._fetching() if p.kv and p.handed)
        return [
            Pair(source, target, handed, fetching[source, target])
            for (source, target), handed in sorted(self._handed.items())
            if {source, target} <= live
        ]


def _kept(event: Output) -> KVCache | None:
    """Return the KV cache that a finished prompt's output announces; None if the engine keeps none."""
    transfer = decode_transfer(event.kv) if event.finish == "length" else None  # type: ignore[arg-type]
    return None if transfer is None else KVCache(event.replica, transfer)


class KVReleases:
    """KV caches of source replicas that no replica will fetch, until a message to free them was certainly read.

    Only an engine of the target stage can send that message to the source, and the engine may die before it has done
    so. Messages to targets are numbered in the order in which they are sent.
    """

    def __init__(self, placement: Placement, target: str, out: Callable[[Effect], None]) -> None:
        self._placement = placement
        self._target = target
        self._out = out
        self._unclaimed: deque[KVCache] = deque(maxlen=MOST_KEPT)
        self._requests: defaultdict[ReplicaId, deque[tuple[int, KVCache]]] = defaultdict(
            lambda: deque(maxlen=MOST_KEPT)
        )
        self._numbers = itertools.count()

    def number(self) -> int:
        """Return the number of a new message to a target."""
        return next(self._numbers)

    def release(self, kv: KVCache) -> None:
        """Have an unclaimed KV cache freed: at once, or as soon as a target is up."""
        live = next(iter(self._placement.pools[self._target].replicas), None)
        if live is None:
            self._unclaimed.append(kv)
        else:
            self._out(SendKVRelease(live, "", f"unclaimed/{self.add_request(live, kv)}", kv=kv.transfer))

    def add_request(self, target: ReplicaId, kv: KVCache) -> int:
        """Record that a message to a target releases a KV cache once it is read; return the message's number."""
        number = self.number()
        self._requests[target].append((number, kv))
        return number

    def answered(self, target: ReplicaId, number: int) -> None:
        """Record that a target answered the message with this number, and so has read all earlier messages."""
        requests = self._requests[target]
        while requests and requests[0][0] < number:
            requests.popleft()

    def target_up(self) -> None:
        """A target is up: send the pending releases."""
        while self._unclaimed:
            self.release(self._unclaimed.popleft())

    def target_lost(self, target: ReplicaId) -> None:
        """A target is lost: other targets get the releases that it may not have read. A second release does no harm."""
        for _, kv in self._requests.pop(target, ()):
            self.release(kv)

    def holder_lost(self, holder: ReplicaId) -> None:
        """A source is lost, and its KV caches with it."""
        self._unclaimed = deque((kv for kv in self._unclaimed if kv.holder != holder), MOST_KEPT)
        for target, requests in self._requests.items():
            self._requests[target] = deque((each for each in requests if each[1].holder != holder), MOST_KEPT)
