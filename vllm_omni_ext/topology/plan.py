"""Data classes of a plan, i.e. of the processes that a deployment starts, and their settings.

The classes are frozen, and picklable, because every process of a deployment gets the plan.
"""

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
        part_of: for a prefill or decode stage, the name of the stage that was split into both; else "".
        env: environment variables of the replica processes, on top of the inherited ones.
        replicas: the replicas that this process starts; others may join.
        params: default parameters of a request: fields of `params_type`.
        params_type: "pkg.mod:attr" of the type of the stage's parameters (see `plugins.spec.make_params`).
        accepts: the kind of input that the stage accepts (see `plugins.spec.StageSpec`).
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
        """Return the name by which a plugin's flows (`plugins.flow.Flow`) refer to the stage.

        For a prefill or decode stage, this is the name of the stage that was split.
        """
        return self.part_of or self.name

    @property
    def sampling(self) -> Mapping[str, Any]:
        """Return the default parameters as fields of `SamplingParams`; empty if `params_type` is another type."""
        return self.params if self.params_type == SAMPLING_PARAMS else {}


@dataclass(frozen=True, kw_only=True)
class Headless:
    """Settings of a headless process, which starts replicas of one stage for another process's deployment.

    A headless process has no API server. Its replicas register at the head, the process that has started the API
    servers.

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
        family: name of the model's family, which a model plugin declares (`plugins.spec.ModelFamily`).
        pipeline: name of the pipeline, one of the family's.
        frontend_stage: name of the stage that `frontend` returns.
        stages: in start order.
        edges: connections over which a stage's results become another stage's input.
        api_servers: number of API server processes.
        chunks: sizes of the successive chunks in which an edge's results are sent, or "all", by the name of the edge.
            The value of "adaptive" is whether the model plugin may change the sizes.
        connectors: fields of `connectors.base.ConnectorConfig` by the name of the edge.
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
        """Return the stage whose config, tokenizer and renderer vLLM's server uses; its decode stage if it is split."""
        return self.stage(self.frontend_stage)

    def sides(self) -> dict[str, tuple[str, ...]]:
        """Return the names of the prefill and the decode stage of each split stage, by the name of the split stage."""
        whole = dict.fromkeys(stage.part_of for stage in self.stages if stage.part_of)
        return {name: tuple(stage.name for stage in self.stages if stage.part_of == name) for name in whole}

    def source_of(self, name: str) -> str | None:
        """Return the name of the prefill stage of a decode stage; None for any other stage."""
        return next((edge.source for edge in self.edges_to(name) if edge.kind == KV), None)

    def model_stage(self, name: str) -> StagePlan:
        """Return the stage to which a plugin's flows (`plugins.flow.Flow`) refer by this name.

        For a split stage, this is the decode stage. UnknownMember lists the names of all such stages.
        """
        return _member("stage", name, {stage.model_stage: stage for stage in self.model_stages()})

    def model_stages(self) -> tuple[StagePlan, ...]:
        """Return all stages to which a plugin's flows (`plugins.flow.Flow`) refer, i.e. all but prefill stages."""
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
