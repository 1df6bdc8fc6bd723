"""Data classes of a plan: frozen, and picklable, because every process of a deployment gets the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from vllm_omni_ext.config.schema import OmniConfig
from vllm_omni_ext.errors import UnknownMember
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.plugins.spec import KV, SAMPLING_PARAMS, Accepts, EdgeSpec
from vllm_omni_ext.topology.machine import Machine
from vllm_omni_ext.topology.memory import Sheet

_Name = TypeVar("_Name")
_Member = TypeVar("_Member")


@dataclass(frozen=True, kw_only=True)
class ReplicaPlan:
    """One replica of a plan: its id, and its CUDA devices (empty on a CPU machine)."""

    id: ReplicaId
    devices: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """One stage of a plan, with its replicas and all settings.

    Attributes:
        engine_args: `EngineArgs` fields of its replicas, without `model` and devices; missing fields have vLLM's
            default.
        part_of: for a prefill or decode stage, the stage of the model that was split; else "".
        env: environment variables of the replica processes, on top of the inherited ones.
        params: default parameters of a request: fields of `params_type`.
        params_type: "pkg.mod:attr" of the type of its parameters (see `plugins.spec.make_params`).
        accepts: the kind of input that the stage accepts (see `StageSpec`).
    """

    name: str
    engine_args: Mapping[str, Any]
    env: Mapping[str, str]
    replicas: tuple[ReplicaPlan, ...]
    params: Mapping[str, Any]
    params_type: str = SAMPLING_PARAMS
    accepts: Accepts = "requests"
    part_of: str = ""

    @property
    def model_stage(self) -> str:
        """Return the name of the stage in flows: of a prefill or decode stage, the name of the stage that was split."""
        return self.part_of or self.name

    @property
    def sampling(self) -> Mapping[str, Any]:
        """Return the default parameters as fields of `SamplingParams`; empty if `params_type` is another type."""
        return self.params if self.params_type == SAMPLING_PARAMS else {}


@dataclass(frozen=True, kw_only=True)
class Headless:
    """Settings of a headless process: it has no API server. Its replicas register at the head, which has API servers.

    Attributes:
        stage: name of the only stage that it runs.
        replicas: number of its replicas.
        head: host and TCP port where the head accepts registrations.
        replica_address: host under which the head reaches the replicas; None = the address with a route to the head.
    """

    stage: str
    replicas: int
    head: tuple[str, int]
    replica_address: str | None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The processes that a deployment starts, and their settings.

    Attributes:
        family: name of the model's family.
        pipeline: name of the pipeline, one of the family's.
        frontend_stage: name in the plan of the frontend (see `frontend`).
        stages: in start order.
        chunks: sizes of successive chunks, or "all", by the name of the edge; "adaptive": flows may change the sizes.
        connectors: fields of `ConnectorConfig` by the name of the edge.
        sheets: memory of each replica on each CUDA device; empty on a CPU machine, and where sizes are not known.
    """

    model: str
    family: str
    pipeline: str
    frontend_stage: str
    machine: Machine
    stages: tuple[StagePlan, ...]
    edges: tuple[EdgeSpec, ...]
    api_servers: int
    config: OmniConfig
    chunks: Mapping[str, Any] = field(default_factory=dict)
    connectors: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    sheets: tuple[Sheet, ...] = ()

    def stage(self, name: str) -> StagePlan:
        """Return the stage of that name; UnknownMember lists the names of all stages."""
        return _member("stage", name, {stage.name: stage for stage in self.stages})

    def frontend(self) -> StagePlan:
        """Return the stage whose config, tokenizer and renderer vLLM's server uses; if split, its decode side."""
        return self.stage(self.frontend_stage)

    def sides(self) -> dict[str, tuple[str, ...]]:
        """Return the names of the prefill and decode stages of each split stage, by the name of the split stage."""
        whole = dict.fromkeys(stage.part_of for stage in self.stages if stage.part_of)
        return {name: tuple(stage.name for stage in self.stages if stage.part_of == name) for name in whole}

    def source_of(self, name: str) -> str | None:
        """Return the name of the stage that prefills the prompts of a stage; None if the stage does so itself."""
        return next((edge.source for edge in self.edges_to(name) if edge.kind == KV), None)

    def model_stage(self, name: str) -> StagePlan:
        """Return the stage with that name in flows; UnknownMember lists the names of all stages in flows."""
        return _member("stage", name, {stage.model_stage: stage for stage in self.model_stages()})

    def model_stages(self) -> tuple[StagePlan, ...]:
        """Return the stages that flows use: all but prefill stages."""
        sources = {edge.source for edge in self.edges if edge.kind == KV}
        return tuple(stage for stage in self.stages if stage.name not in sources)

    def replica(self, replica_id: ReplicaId) -> ReplicaPlan:
        """Return the replica with that id; UnknownMember lists the replicas of its stage."""
        return _member("replica", replica_id, {each.id: each for each in self.stage(replica_id.stage).replicas})

    def replicas(self) -> tuple[ReplicaPlan, ...]:
        """Return all replicas, stage by stage."""
        return tuple(replica for stage in self.stages for replica in stage.replicas)

    def edges_to(self, name: str) -> tuple[EdgeSpec, ...]:
        """Return the edges that end at a stage."""
        target = self.stage(name).name
        return tuple(edge for edge in self.edges if edge.target == target)


def _member(kind: str, name: _Name, known: Mapping[_Name, _Member]) -> _Member:
    if name not in known:
        raise UnknownMember(f"no {kind} '{name}'; the plan has {', '.join(map(str, known))}")
    return known[name]
