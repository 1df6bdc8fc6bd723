"""Names of things. An index never crosses a function boundary on its own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True, slots=True)
class ReplicaId:
    """One replica of one stage, printed `talker/1`."""

    stage: str
    index: int

    def __str__(self) -> str:
        return f"{self.stage}/{self.index}"

    @classmethod
    def parse(cls, text: str) -> ReplicaId:
        """Read `talker/1`. Raises ValueError on anything else."""
        stage, slash, index = text.rpartition("/")
        if not (slash and stage and index.isdecimal()):
            raise ValueError(f"'{text}' is not a replica id; write it as stage/index, e.g. talker/0")
        return cls(stage, int(index))
