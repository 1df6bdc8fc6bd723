"""The data of a plan: frozen, and picklable into every process."""

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
    """One replica: its name and its CUDA devices (none on a CPU machine)."""

    id: ReplicaId
    devices: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """One stage of a plan, with all settings.

    Attributes:
        engine_args: `EngineArgs` fields of its replicas, without `model` and devices; missing fields have vLLM's
            default.
        part_of: for a prefill or decode stage, the stage of the model that was split; else "".
        env: environment variables of the replica processes, on top of the inherited ones.
        params: default parameters of a request: fields of `params_type`.
        params_type: "pkg.mod:attr" of the type of its parameters (see `plugins.spec.make_params`).
        accepts: the kind of input that the stage takes (see `StageSpec`).
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
        """Name of the stage in the model's flow, where a split stage is one."""
        return self.part_of or self.name

    @property
    def sampling(self) -> Mapping[str, Any]:
        """The default parameters as fields of vLLM's `SamplingParams`; empty if the stage has a type of its own."""
        return self.params if self.params_type == SAMPLING_PARAMS else {}


@dataclass(frozen=True, kw_only=True)
class Headless:
    """A process without API server, whose replicas join a head.

    Attributes:
        stage: the one stage it runs.
        replicas: number of its replicas.
        head: host and TCP port where the head takes registrations.
        replica_address: host under which the head reaches the replicas; None = the address with a route to the head.
    """

    stage: str
    replicas: int
    head: tuple[str, int]
    replica_address: str | None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that a deployment starts.

    Attributes:
        family: name of the model's family.
        pipeline: name of the pipeline, one of the family's.
        frontend_stage: name of the stage that `frontend` returns.
        stages: in start order.
        chunks: sizes of successive chunks, or "all", by the name of the edge; "adaptive": whether they adapt.
        connectors: fields of `ConnectorConfig` by the name of the edge.
        sheets: shares of each CUDA device; empty on a CPU machine, and where sizes are not known.
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
        """Return the stage of that name; UnknownMember names the known ones."""
        return _member("stage", name, {stage.name: stage for stage in self.stages})

    def frontend(self) -> StagePlan:
        """Return the stage whose config, tokenizer and renderer vLLM's server uses; the decode side if it is split."""
        return self.stage(self.frontend_stage)

    def sides(self) -> dict[str, tuple[str, ...]]:
        """The prefill and decode stages of each split stage, by the name of the split stage."""
        whole = dict.fromkeys(stage.part_of for stage in self.stages if stage.part_of)
        return {name: tuple(stage.name for stage in self.stages if stage.part_of == name) for name in whole}

    def source_of(self, name: str) -> str | None:
        """The stage that prefills the prompts of a stage; None if the stage does so itself."""
        return next((edge.source for edge in self.edges_to(name) if edge.kind == KV), None)

    def model_stage(self, name: str) -> StagePlan:
        """Return the stage with that name in the model's flow; UnknownMember names the known ones."""
        return _member("stage", name, {stage.model_stage: stage for stage in self.model_stages()})

    def model_stages(self) -> tuple[StagePlan, ...]:
        """The stages of the model's flow: all but prefill stages."""
        sources = {edge.source for edge in self.edges if edge.kind == KV}
        return tuple(stage for stage in self.stages if stage.name not in sources)

    def replica(self, replica_id: ReplicaId) -> ReplicaPlan:
        """Return the replica of that name; UnknownMember names the known ones of its stage."""
        return _member("replica", replica_id, {each.id: each for each in self.stage(replica_id.stage).replicas})

    def replicas(self) -> tuple[ReplicaPlan, ...]:
        """All replicas, stage by stage."""
        return tuple(replica for stage in self.stages for replica in stage.replicas)

    def edges_to(self, name: str) -> tuple[EdgeSpec, ...]:
        """The edges that end at a stage."""
        target = self.stage(name).name
        return tuple(edge for edge in self.edges if edge.target == target)


def _member(kind: str, name: _Name, known: Mapping[_Name, _Member]) -> _Member:
    if name not in known:
        raise UnknownMember(f"no {kind} '{name}'; the plan has {', '.join(map(str, known))}")
    return known[name]
