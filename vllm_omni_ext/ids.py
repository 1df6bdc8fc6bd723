"""Ids of replicas. Functions take and return a `ReplicaId`, not an index alone."""

from __future__ import annotations

from dataclasses import dataclass

PREFILL, DECODE = SIDES = ("prefill", "decode")
"""The two kinds of replicas of a stage with `prefill_decode`."""


@dataclass(frozen=True, order=True, slots=True)
class ReplicaId:
    """One replica of one stage, printed `talker/1`."""

    stage: str
    index: int

    def __str__(self) -> str:
        return f"{self.stage}/{self.index}"

    @classmethod
    def parse(cls, text: str) -> ReplicaId:
        """Return the id that a text such as `talker/1` names; ValueError for any other form."""
        stage, slash, index = text.rpartition("/")
        if not (slash and stage and index.isdecimal()):
            raise ValueError(f"'{text}' is not a replica id; write it as STAGE/INDEX")
        return cls(stage, int(index))
