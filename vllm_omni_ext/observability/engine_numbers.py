"""Numbers of replicas in the label `engine` of vLLM's metrics. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_omni_ext.ids import ReplicaId


class EngineNumbers:
    """The number of each replica that a deployment has or may get.

    A number follows from the plan and the replica's name alone. So all API servers use the same numbers, also ones that
    start later, and a name keeps its number. The planned replicas come first, the frontend's before the others' as in
    vLLM; then those that may join, one of each stage in turn.

    Args:
        frontend: name of the stage whose tokens are vLLM's text output.
        stages: all stages of the plan.
        planned: the replicas of the plan.
    """

    def __init__(self, frontend: str, stages: Sequence[str], planned: Sequence[ReplicaId]) -> None:
        self._stages = tuple(stages)
        self._planned = tuple(sorted(planned, key=lambda replica: replica.stage != frontend))
        self._numbers = {replica: number for number, replica in enumerate(self._planned)}
        self._first_to_join = {
            stage: 1 + max((each.index for each in planned if each.stage == stage), default=-1) for stage in stages
        }

    def of(self, replica: ReplicaId) -> int:
        """Return the number of a replica."""
        if replica in self._numbers:
            return self._numbers[replica]
        turn = replica.index - self._first_to_join[replica.stage]
        return len(self._planned) + turn * len(self._stages) + self._stages.index(replica.stage)

    def replica(self, number: int) -> ReplicaId:
        """Return the replica that has a number."""
        if number < len(self._planned):
            return self._planned[number]
        turn, position = divmod(number - len(self._planned), len(self._stages))
        stage = self._stages[position]
        return ReplicaId(stage, self._first_to_join[stage] + turn)
