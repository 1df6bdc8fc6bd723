"""Ids of replicas, i.e. of the engine processes of a stage. Functions take and return a `ReplicaId`, not an index."""

from __future__ import annotations

from dataclasses import dataclass

PREFILL, DECODE = SIDES = ("prefill", "decode")
"""The two kinds of replicas of a stage with the setting `prefill_decode`, i.e. prefill/decode disaggregation."""


@dataclass(frozen=True, order=True, slots=True)
class ReplicaId:
    """Id of one replica of one stage, printed `talker/1`."""

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
