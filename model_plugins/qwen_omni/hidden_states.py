"""Where the hidden states are that the thinker has exported for a request. Pure."""

from __future__ import annotations

from vllm_omni_ext.wire.envelope import HiddenStatesChunkReady
from vllm_omni_ext.wire.stage_input import HiddenStatesRef


class HiddenStates:
    """Stores the locations of a request's exported hidden states.

    After a failover there can be several: the new thinker replica exports a second copy.
    """

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self._places: dict[tuple[str, str], HiddenStatesRef] = {}
        self._lost: set[tuple[str, str]] = set()

    @property
    def ref(self) -> HiddenStatesRef | None:
        """The location with the most hidden states, the latest among locations with equal numbers; None without one."""
        return max(reversed(self._places.values()), key=lambda ref: ref.count, default=None)

    @property
    def count(self) -> int:
        return 0 if self.ref is None else self.ref.count

    @property
    def complete(self) -> bool:
        return self.count >= self.expected

    def add(self, ready: HiddenStatesChunkReady) -> None:
        """Add hidden states at a location; ValueError if earlier hidden states are missing or the export has failed."""
        if ready.failed:
            raise ValueError(f"the thinker could not hand its hidden states over: {ready.failed}")
        place = ready.source, ready.name
        if place in self._lost:
            return
        known = self._places[place].count if place in self._places else 0
        if ready.first != known:
            raise ValueError(f"multimodal hidden states {known} to {ready.first} are missing")
        self._places[place] = HiddenStatesRef(source=ready.source, name=ready.name, count=known + ready.count)

    def lose(self, ref: HiddenStatesRef) -> None:
        """Remove a location whose hidden states cannot be read."""
        place = ref.source, ref.name
        self._lost.add(place)
        self._places.pop(place, None)
