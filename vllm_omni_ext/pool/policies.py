"""Which replica a new request goes to. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from vllm_omni_ext.ids import ReplicaId


class Policy(Protocol):
    """Picks one of several candidates."""

    def pick(self, candidates: Sequence[ReplicaId], load: Mapping[ReplicaId, int]) -> ReplicaId:
        """Return one of `candidates` (never empty); `load` is known for each."""


class LeastQueueLength:
    """The least loaded replica; equals take turns, so that idle replicas are all used."""

    def __init__(self) -> None:
        self._turn = 0

    def pick(self, candidates: Sequence[ReplicaId], load: Mapping[ReplicaId, int]) -> ReplicaId:
        """Return the candidate with the lowest load."""
        start = self._turn % len(candidates)
        self._turn += 1
        return min((*candidates[start:], *candidates[:start]), key=lambda replica: load[replica])
