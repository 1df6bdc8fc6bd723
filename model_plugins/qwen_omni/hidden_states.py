"""Stores where the hidden states are that the thinker has exported for a request's talker. Pure: no I/O."""

from __future__ import annotations

import msgspec

from vllm_omni_ext.wire.envelope import HiddenStatesChunkReady
from vllm_omni_ext.wire.stage_input import HiddenStatesRef


class HiddenStates:
    """Stores the locations of one request's exported hidden states; the request's flow sends one to the talker.

    After a failover there can be several locations: the new thinker replica exports a second copy. With prefill and
    decode replicas, the hidden states of the prompt and those of the reply have different locations.

    Args:
        expected: number of hidden states that the talker needs.

    Attributes:
        ref: the location with the most hidden states, the latest among locations with equal numbers; None without one.
            A location whose first hidden states are nowhere is not returned.
    """

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self.ref: HiddenStatesRef | None = None
        self._places: dict[tuple[str, str], HiddenStatesRef] = {}  # without `before`
        self._lost: set[tuple[str, str]] = set()

    @property
    def count(self) -> int:
        return 0 if self.ref is None else self.ref.count

    @property
    def complete(self) -> bool:
        return self.count >= self.expected

    def add(self, ready: HiddenStatesChunkReady) -> None:
        """Add a chunk of hidden states that a thinker replica has exported.

        Raises:
            ValueError: the export has failed, or hidden states before this chunk are missing at its location.
        """
        if ready.failed:
            raise ValueError(f"the thinker could not hand its hidden states over: {ready.failed}")
        place = ready.source, ready.name
        if place in self._lost:
            return
        known = self._places[place].count if place in self._places else ready.start
        if ready.first != known:
            raise ValueError(f"multimodal hidden states {known} to {ready.first} are missing")
        self._places[place] = HiddenStatesRef(
            source=ready.source, name=ready.name, count=known + ready.count, start=ready.start
        )
        self.ref = self._best()

    def lose(self, ref: HiddenStatesRef) -> None:
        """Remove a location whose hidden states the talker could not read; later chunks at the location are ignored.

        If the location continues another one (`HiddenStatesRef.before`), both are removed.
        """
        for each, _ in ref.places():
            place = each.source, each.name
            self._lost.add(place)
            self._places.pop(place, None)
        self.ref = self._best()

    def _best(self) -> HiddenStatesRef | None:
        """Return the value of `ref`: each location continues the best one of those that begin before it."""
        best: HiddenStatesRef | None = None
        for place in sorted(self._places.values(), key=lambda ref: ref.start):
            before = best.before if best is not None and best.start == place.start else best
            begins = place.start <= (0 if before is None else before.count)
            if begins and (best is None or (place.count, -place.start) >= (best.count, -best.start)):
                best = msgspec.structs.replace(place, before=before)
        return best
