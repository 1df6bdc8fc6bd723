"""What a plan is made of. Frozen data that can be pickled into every process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from vllm_omni_ext.config.schema import OmniConfig
from vllm_omni_ext.errors import UnknownMember
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.model_plugins.registry import KV, EdgeSpec
from vllm_omni_ext.topology.budget import Sheet


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where the replicas will run. `memory_bytes` is the host's.

    Attributes:
        device_bytes: memory of each CUDA device as NVML reports it; empty if not known.
    """

    platform: Literal["cpu", "cuda"]
    device_count: int
    cpu_count: int
    memory_bytes: int
    device_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ReplicaPlan:
    """One replica: its name and its CUDA devices (none on a CPU machine)."""

    id: ReplicaId
    devices: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """One stage, everything decided.

    Attributes:
        engine_args: `EngineArgs` fields of its replicas, without `model` and devices; what is not named is left to
            vLLM's default.
        part_of: the stage of the model it is a side of; "" if it is a whole one.
        env: environment variables of the replica processes, on top of the inherited ones.
        sampling: default `SamplingParams` fields.
    """

    name: str
    text_stage: bool
    engine_args: Mapping[str, Any]
    env: Mapping[str, str]
    replicas: tuple[ReplicaPlan, ...]
    sampling: Mapping[str, Any]
    part_of: str = ""

    @property
    def model_stage(self) -> str:
        """The stage as the model's flow and its callers know it."""
        return self.part_of or self.name


@dataclass(frozen=True, kw_only=True)
class Headless:
    """A process without API server, whose replicas join a head.

    Attributes:
        stage: the one stage it runs.
        replicas: how many of it.
        master: host and TCP port where the head takes registrations.
        replica_address: host under which the head reaches the replicas; None = the one that routes to the head.
    """

    stage: str
    replicas: int
    master: tuple[str, int]
    replica_address: str | None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is going to be started.

    Attributes:
        pipeline: name of the pipeline.
        stages: in start order.
        chunks: sizes of successive chunks, or "all", by the name of the hand-over; "adaptive": whether they adapt.
        connectors: fields of `ConnectorConfig` by the name of the hand-over.
        sheets: who has what of each CUDA device; empty on a CPU machine, and where sizes are not known.
    """

    model: str
    pipeline: str
    machine: Machine
    stages: tuple[StagePlan, ...]
    edges: tuple[EdgeSpec, ...]
    api_servers: int
    config: OmniConfig
    chunks: Mapping[str, Any] = field(default_factory=dict)
    connectors: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    sheets: tuple[Sheet, ...] = ()

    def stage(self, name: str) -> StagePlan:
        """Return the stage of that name; UnknownMember names the known ones."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise UnknownMember(f"no stage '{name}'; the plan has {', '.join(s.name for s in self.stages)}")

    def text_stage(self) -> StagePlan:
        """Return the stage that answers text."""
        return next(stage for stage in self.stages if stage.text_stage)

    def sides(self) -> dict[str, tuple[str, ...]]:
        """The stages that are one stage of the model, by its name there."""
        whole = dict.fromkeys(stage.part_of for stage in self.stages if stage.part_of)
        return {name: tuple(stage.name for stage in self.stages if stage.part_of == name) for name in whole}

    def source_of(self, name: str) -> str | None:
        """The stage that computes the prompts of another one; None if that does it itself."""
        return next((edge.source for edge in self.edges_to(name) if edge.kind == KV), None)

    def model_stage(self, name: str) -> StagePlan:
        """Return the stage that callers know by that name; UnknownMember names the known ones."""
        stages = self.model_stages()
        for stage in stages:
            if stage.model_stage == name:
                return stage
        raise UnknownMember(f"no stage '{name}'; the plan has {', '.join(s.model_stage for s in stages)}")

    def model_stages(self) -> tuple[StagePlan, ...]:
        """The stages as callers know them: those that only compute prompts for another one are left out."""
        sources = {edge.source for edge in self.edges if edge.kind == KV}
        return tuple(stage for stage in self.stages if stage.name not in sources)

    def replica(self, replica_id: ReplicaId) -> ReplicaPlan:
        """Return the replica of that name; UnknownMember names the known ones of its stage."""
        replicas = self.stage(replica_id.stage).replicas
        for replica in replicas:
            if replica.id == replica_id:
                return replica
        raise UnknownMember(f"no replica '{replica_id}'; the plan has {', '.join(str(r.id) for r in replicas)}")

    def replicas(self) -> tuple[ReplicaPlan, ...]:
        """All replicas, stage by stage."""
        return tuple(replica for stage in self.stages for replica in stage.replicas)

    def edges_from(self, name: str) -> tuple[EdgeSpec, ...]:
        """The hand-overs that start at a stage."""
        source = self.stage(name).name
        return tuple(edge for edge in self.edges if edge.source == source)

    def edges_to(self, name: str) -> tuple[EdgeSpec, ...]:
        """The hand-overs that end at a stage."""
        target = self.stage(name).name
        return tuple(edge for edge in self.edges if edge.target == target)
