"""Routes prompts through the frontend: in one stage, or with prefill and decode in separate stages. Pure.

The frontend is the stage that runs vLLM's engine requests for clients. With separate stages, each attempt at a prompt
has its own engine request in each of the two stages. The id of an engine request is never reused, so that late outputs
of an earlier attempt are recognised.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from vllm_omni_ext.disaggregation.parameters import decode_transfer
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.orchestrator.messages import AbortEngineRequests, Effect, Output, SendKVRelease, Side
from vllm_omni_ext.orchestrator.placement import Placement
from vllm_omni_ext.orchestrator.state import KVCache, Prompt, RequestObserver, Routed

MOST_KEPT = 4096
"""Most releases of KV caches that are pending for each decode replica, and most that wait for any decode replica. Older
ones are dropped: the prefill replica frees a KV cache by itself after a time."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A prefill replica (source) and a decode replica (target) between which KV caches were transferred.

    Attributes:
        handed: number of requests whose prompt the source has computed and which were then sent to the target.
        fetching: number of these requests for which the target has not returned an output yet.
    """

    source: ReplicaId
    target: ReplicaId
    handed: int
    fetching: int


class PromptRouter:
    """Sends each prompt to stage `source` for prefill, then to stage `target` for decode.

    If `source` is None or has no replica, `target` does both.

    Args:
        out: called with each effect, i.e. each message to a replica.
        target: the frontend; with separate stages, its decode stage.
        source: the prefill stage; None: `target` computes the prompts.
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
        """Stages of the plan through which prompts pass; the last one generates the answer."""
        self.private_kv = source is not None
        """Whether outputs contain KV transfer parameters with internal addresses, which must not reach the client."""
        self._source, self._target = source, target
        self._placement = placement
        self._observer = observer
        self._out = out
        self._handed: Counter[tuple[ReplicaId, ReplicaId]] = Counter()
        self._releases = KVReleases(placement, target, out)

    def begin(self, prompt: Routed) -> None:
        """Send a prompt to a replica, or queue it; StageUnavailable if its stage has no replica and can get none.

        If a live prefill replica stores the prompt's KV cache, the prompt is sent to a decode replica. Otherwise it is
        sent to a prefill replica first.
        """
        if prompt.kv is not None and prompt.handed is None and self._is_source(prompt.kv.holder):
            self.fetch(prompt, prompt.kv.holder)
            return
        self.end(prompt)
        if self._source is None or not (self._placement.pools[self._source].takes_requests and prompt.can_split):
            self.fetch(prompt)
            return
        prompt.stage = self._source
        replica = self._placement.bind(prompt)
        if replica is not None:
            self._send(prompt, replica, None, "prefill")

    def fetch(self, prompt: Routed, holder: ReplicaId | None = None) -> None:
        """Send a prompt to a replica of the target stage, or let it wait. The replica fetches `prompt.kv` if it is set.

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

    def _send(self, prompt: Routed, replica: ReplicaId, source: str | None, side: Side) -> None:
        engine_id, kv = prompt.name, None
        if self._source is not None:
            engine_id = f"{prompt.name}/{'p' if side == 'prefill' else 'd'}{prompt.attempts}"
            prompt.attempts += 1
        self._placement.route(prompt, engine_id)
        if source is None:
            self._observer.sent(prompt.trace, prompt.source, replica, prompt.content)
        else:
            self._observer.sent(prompt.trace, source, replica)
        if prompt.kv is not None and side == "decode":
            kv = prompt.kv.transfer
        self._out(prompt.message(replica, engine_id, side, kv))

    def _is_source(self, replica: ReplicaId) -> bool:
        return self._source is not None and replica in self._placement.pools[self._source].replicas

    def answers(self, prompt: Prompt) -> bool:
        """Return whether outputs for the prompt currently go to the client."""
        return prompt.stage == self._target and not prompt.recompute

    def output(self, prompt: Routed, event: Output) -> bool:
        """Record an output for a prompt; return True if it came from the target stage, False for the source stage.

        After the source's last output, the caller must call `fetch`, unless the flow ends the request.
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
        """Release the KV cache that a late prefill output reports, whose attempt at a prompt has ended already."""
        if event.replica.stage == self._source and (kv := _kept(event)) is not None:
            self._releases.release(kv)

    def end(self, prompt: Routed) -> None:
        """End the current attempt at a prompt: abort its engine request, and release its KV cache."""
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
        """Send the releases of KV caches that wait for a replica of the target stage, if the new replica is one."""
        if replica.stage == self._target:
            self._releases.target_up()

    def replica_lost(self, replica: ReplicaId) -> list[Routed]:
        """Remove a lost replica; return the prompts that must restart, as the target fetches a KV cache lost with it.

        Without another source replica the result is empty: the target detects the loss itself and computes the prompt.
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

    def _fetching(self) -> Iterator[Routed]:
        """Iterate over the prompts that were sent to the target with a KV cache and have no output from it yet."""
        for binding in self._placement.bound(self._target):
            if isinstance(binding, Routed) and binding.handed is not None:
                yield binding

    def pairs(self) -> list[Pair]:
        """Return the pairs of live replicas between which KV caches were transferred."""
        live = {replica for stage in self.stages for replica in self._placement.pools[stage].replicas}
        fetching = Counter((p.kv.holder, p.handed[2]) for p in self._fetching() if p.kv and p.handed)
        return [
            Pair(source, target, handed, fetching[source, target])
            for (source, target), handed in sorted(self._handed.items())
            if {source, target} <= live
        ]


def _kept(event: Output) -> KVCache | None:
    """Return the KV cache that the last output of a prefill request reports; None for any other output."""
    transfer = decode_transfer(event.kv) if event.finish == "length" else None  # type: ignore[arg-type]
    return None if transfer is None else KVCache(event.replica, transfer)


class KVReleases:
    """Makes prefill replicas (sources) free KV caches that no decode replica (target) will fetch.

    Only a message to a target can make the source free a KV cache. The target may die before it reads the message, so
    each release is recorded here until a target has certainly read the message. Messages to targets are numbered in the
    order of sending.
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
        """Return the next number for a message to a target; `answered` compares these numbers."""
        return next(self._numbers)

    def release(self, kv: KVCache) -> None:
        """Send the release of a KV cache to any target replica, at once or when a target replica is up."""
        live = next(iter(self._placement.pools[self._target].replicas), None)
        if live is None:
            self._unclaimed.append(kv)
        else:
            self._out(SendKVRelease(live, "", f"unclaimed/{self.add_request(live, kv)}", kv=kv.transfer))

    def add_request(self, target: ReplicaId, kv: KVCache) -> int:
        """Record that a message to `target` releases a KV cache when it is read; return the message's number."""
        number = self.number()
        self._requests[target].append((number, kv))
        return number

    def answered(self, target: ReplicaId, number: int) -> None:
        """Drop the recorded releases that a target has certainly read.

        The target has answered the message `number`, so it has read all messages before that one.
        """
        requests = self._requests[target]
        while requests and requests[0][0] < number:
            requests.popleft()

    def target_up(self) -> None:
        """Send the releases that waited for a target replica."""
        while self._unclaimed:
            self.release(self._unclaimed.popleft())

    def target_lost(self, target: ReplicaId) -> None:
        """Send the releases that a lost target may not have read to another target.

        A release that is executed twice has no effect the second time.
        """
        for _, kv in self._requests.pop(target, ()):
            self.release(kv)

    def holder_lost(self, holder: ReplicaId) -> None:
        """Drop the releases of KV caches that a lost source replica stored, since the KV caches are lost too."""
        self._unclaimed = deque((kv for kv in self._unclaimed if kv.holder != holder), MOST_KEPT)
        for target, requests in self._requests.items():
            self._requests[target] = deque((each for each in requests if each[1].holder != holder), MOST_KEPT)
