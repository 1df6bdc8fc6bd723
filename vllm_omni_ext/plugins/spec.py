"""The data that a model plugin declares: family, pipelines, stages. Pure data: no vLLM, no torch, no HTTP.

A plugin is a package with an entry point of the group `vllm_omni_ext.models` that names a `ModelFamily`:

    [project.entry-points."vllm_omni_ext.models"]
    bagel = "vllm_omni_bagel.family:FAMILY"
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import msgspec

from vllm_omni_ext.errors import ConfigError

API_VERSION = 2
"""Version of the interface for plugins; a family with another version is refused when it is loaded.

A plugin outside this package declares the number for which it was written (`ModelFamily(api_version=2, ...)`), not this
constant: the constant is that of the installed package. docs/writing-a-model-plugin.md has the changes of each version.
"""

ENTRY_POINTS = "vllm_omni_ext.models"
"""Entry-point group of model families."""

KV: Literal["kv"] = "kv"
"""Kind of an edge that transfers KV caches."""

SAMPLING_PARAMS = "vllm.sampling_params:SamplingParams"
"""Type of a stage's parameters unless the stage declares its own."""

LOGPROBS = ("logprobs", "prompt_logprobs")
"""Fields of `SamplingParams` that only the frontend may have: log probabilities of other stages are not returned."""

TEXT_ONLY = (
    "n",
    "stop",
    "bad_words",
    "structured_outputs",
    "output_kind",
    "detokenize",
    "stream_interval",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)
"""Fields of `SamplingParams` that have an effect in the frontend only: vLLM's API server applies them to the text."""

Accepts = Literal["requests", "chunks", "parts"]
EdgeKind = Literal["tokens", "tensors", "kv"]
ACCEPTS, EDGES = get_args(Accepts), get_args(EdgeKind)


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """Declaration of one stage of a pipeline; the planner (`topology.planner`) merges the user's settings into it.

    Attributes:
        name: e.g. "talker".
        accepts: input that the flow may send to the stage. "requests": whole requests (`Forward`, or `Open` with
            `last=True`). "chunks": a request that is opened and gets more input later (`Open`, then `Extend`).
            "parts": separate engine requests of one stream, between which the stage keeps state (`Submit`).
        engine: vLLM `EngineArgs` fields that the user cannot override (worker_cls, hf_overrides, ...). Without
            `worker_cls`, the worker is `engine.worker.StageWorker`, vLLM's with some additions.
            Values are plain data; a string of the form "pkg.mod:attr" under `hf_overrides` names a function.
        engine_defaults: `EngineArgs` fields that the user may override in this stage's settings; in the frontend also
            with a stock flag.
        cuda_defaults: `EngineArgs` fields of a replica on a CUDA machine that the user may override.
        custom_ops: vLLM's names of operators that keep vLLM's own kernels in compiled code, unless the user's
            `compilation_config` configures them.
        models: vLLM architecture -> "module:class" of model classes that this stage's engine may need. Classes of
            vLLM are not replaced: use another name, and set it with `hf_overrides`.
        params: "pkg.mod:attr" of the type of the stage's parameters: vLLM's `SamplingParams`, or a frozen
            `msgspec.Struct` of the plugin (e.g. the number of denoise steps).
        defaults: fields of `params`; a user overrides them with `stages.<name>.params`.
        splittable: a user may split the stage into prefill and decode replicas (`prefill_decode`). For the frontend
            only, which then accepts requests with vLLM's `SamplingParams`. All that an answer needs of its prompt must
            be in vLLM's KV cache and in the request itself. The replicas of both sides have the stage's engine
            arguments, model classes and sizes; a request's tokens, features and `extra_args` are sent to both.
        cpu_kv_bytes: default KV cache bytes of a replica on a CPU machine; 0 = no KV cache.
        gpu_share: a replica's share of a CUDA device's memory, relative to other replicas on the device; used when the
            sizes of the model or of the device are unknown.
        part_of: for the prefill or decode side of a split stage, the name of that stage; else "". The planner sets it.
    """

    name: str
    accepts: Accepts = "requests"
    engine: Mapping[str, Any] = field(default_factory=dict)
    engine_defaults: Mapping[str, Any] = field(default_factory=dict)
    cuda_defaults: Mapping[str, Any] = field(default_factory=dict)
    custom_ops: tuple[str, ...] = ()
    models: Mapping[str, str] = field(default_factory=dict)
    params: str = SAMPLING_PARAMS
    defaults: Mapping[str, Any] = field(default_factory=dict)
    splittable: bool = False
    cpu_kv_bytes: int = 0
    gpu_share: float = 1.0
    part_of: str = ""

    @property
    def model_stage(self) -> str:
        """Return the stage's name in flows; for a side of a split stage, the name of the split stage."""
        return self.part_of or self.name


@dataclass(frozen=True)
class EdgeSpec:
    """A connection over which one stage's results become another stage's input.

    Attributes:
        kind: "tokens": results are sent in requests. "tensors": results are sent through a connector. "kv": the source
            computes a request's prompt, and the target fetches the KV cache and continues; only the planner makes such
            an edge, for a split frontend (`StageSpec.splittable`).
        name: key of its chunk sizes, or of its connector, in a configuration; "" if it has neither.
        chunks: default sizes of successive chunks, e.g. in tokens or codec frames; the last size repeats, and 0
            is one chunk with everything.
    """

    source: str
    target: str
    kind: EdgeKind
    name: str = ""
    chunks: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PipelineSpec:
    """One way to run the models of a family: its stages, and the edges between them.

    Attributes:
        name: e.g. "qwen3_omni". `pipeline:` of a stage config selects it. Its default stage config has the same name.
        stages: in start order; names are unique.
        frontend: the stage whose config, tokenizer and renderer vLLM's server gets; stock `vllm serve` flags apply to
            it. A request need not use it.
        modalities: modalities of this pipeline's answers, e.g. ("text", "audio").
        inputs: modalities of the pipeline's prompts; only the documentation uses them.
        edges: connections, by stage name.
    """

    name: str
    stages: tuple[StageSpec, ...]
    frontend: str
    modalities: tuple[str, ...]
    inputs: tuple[str, ...] = ("text",)
    edges: tuple[EdgeSpec, ...] = ()

    def chunks(self) -> dict[str, tuple[int, ...]]:
        """Return the default chunk sizes of the edges that have some: `EdgeSpec.name` -> `EdgeSpec.chunks`."""
        return {edge.name: edge.chunks for edge in self.edges if edge.chunks}

    def takes_stock_flags(self, stage: StageSpec) -> bool:
        """Return whether flags of `vllm serve` apply to a stage.

        They apply to the frontend, the stage that answers the client's text. If it is divided into a prefill and a
        decode stage, they apply to both.
        """
        return stage.model_stage == self.stage(self.frontend).model_stage

    def stage(self, name: str) -> StageSpec:
        """Return the stage of that name; ConfigError lists the stages of the pipeline."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        known = ", ".join(s.name for s in self.stages)
        raise ConfigError(f"stages.{name}: pipeline '{self.name}' has no such stage; use one of {known}")


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """The object that an entry point names. All strings of the form "pkg.mod:attr" are imported only where they are
    needed.

    Attributes:
        name: unique among all installed families.
        api_version: the `API_VERSION` for which the family was written.
        architectures: `architectures[0]` of the Hugging Face configs that the family serves.
        pipelines: the first one is the default; `pipeline:` of a stage config chooses another. A family without
            pipelines serves nothing and only writes a `tiny` checkpoint.
        facts: "pkg.mod:attr" of `(hf_config, params by stage, StoredTensors or None) -> ModelFacts`, which returns the
            sizes of a checkpoint's stages (see `plugins.memory`); "" if there is no such function.
        runtime: "pkg.mod:attr" of the `plugins.runtime.ModelRuntime` class; imported in API servers only.
        http: "pkg.mod:attr" of the `plugins.http.HttpSurface` class; "" = chat only. Imported in API servers only.
        stage_configs: package with stage configs (`*.yaml`) of the plugin; "" if there are none.
        chat_template: "pkg:file" of a Jinja template in a package, which is used unless the user names one; "" = the
            checkpoint's own. For checkpoints whose template is missing or wrong.
        modalities: "pkg.mod:attr" of `modalities.base.Modality` objects of the family.
        seams: package with `seams.toml`, the vLLM symbols that the plugin's classes replace or rely on, and
            `fingerprints/*.json`, which `doctor --write-fingerprints PACKAGE` writes; "" if there are none.
        tiny: "pkg.mod:attr" of `(directory, *, ...) -> Path` that writes a tiny random checkpoint; its keyword
            arguments (int, or bool that is False) become options of `vllm-omni-ext tiny`. "" if there is none.
    """

    name: str
    api_version: int
    architectures: tuple[str, ...]
    pipelines: tuple[PipelineSpec, ...]
    runtime: str
    facts: str = ""
    http: str = ""
    stage_configs: str = ""
    chat_template: str = ""
    modalities: tuple[str, ...] = ()
    seams: str = ""
    tiny: str = ""

    def pipeline(self, name: str = "") -> PipelineSpec:
        """Return the pipeline of that name, or the default one; ConfigError lists the pipelines of the family."""
        if not self.pipelines:
            raise ConfigError(f"pipeline: model family '{self.name}' has no pipeline yet")
        if not name:
            return self.pipelines[0]
        for pipeline in self.pipelines:
            if pipeline.name == name:
                return pipeline
        known = ", ".join(each.name for each in self.pipelines)
        raise ConfigError(f"pipeline: model family '{self.name}' has no pipeline '{name}'; use one of {known}")


def resolve(name: str) -> Any:
    """Import a module, and return the attribute of it that "pkg.mod:attr" names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def param_names(type_name: str) -> tuple[str, ...]:
    """Return the field names of a stage's parameter type "pkg.mod:attr", in order."""
    return tuple(name for name in resolve(type_name).__struct_fields__ if not name.startswith("_"))


def make_params(type_name: str, values: Mapping[str, Any]) -> Any:
    """Create a stage's parameters.

    Args:
        type_name: "pkg.mod:attr" of the parameters' type.
        values: fields by name; missing fields have the type's default.

    Raises:
        ValueError: a field is unknown, missing or has a wrong value; the message names the field if the type's own
            error does.
    """
    kind = resolve(type_name)
    try:
        if type_name == SAMPLING_PARAMS:  # its constructor checks the values, and accepts more than its annotations do
            return kind(**values)
        return msgspec.convert(dict(values), kind)
    except Exception as err:  # each type raises its own errors
        raise ValueError(" ".join(str(err).split())) from err
