"""What a model plugin declares. Pure data: no vLLM, no torch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from vllm_omni_ext.errors import ConfigError

KV: Literal["kv"] = "kv"
"""Kind of an edge over which KV caches go."""


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """One stage of a pipeline, before any user setting.

    Attributes:
        name: e.g. "talker".
        text_stage: True for the one stage that answers text; stock `vllm serve` flags apply to it, and to what
            computes its prompts.
        engine: vLLM `EngineArgs` fields this stage needs whatever the user says (worker_cls, hf_overrides, ...).
            Values are plain data; a string of the form "pkg.mod:attr" under `hf_overrides` names a function.
        engine_defaults: `EngineArgs` fields the user may override, for this stage by name.
        cuda_defaults: `EngineArgs` fields of a replica on a CUDA machine that the user may override.
        custom_ops: vLLM's names of operators that run as its own kernels in compiled code too, unless the user's
            `compilation_config` says otherwise of them.
        cpu_kv_bytes: KV cache bytes given to a replica on a CPU machine when nothing else is said; 0 = no KV cache.
        sampling: default sampling parameters of the stage (fields of vLLM `SamplingParams`).
        gpu_share: how much of a CUDA device's memory a replica gets, relative to others, when several share one and the
            sizes of the model or of the device are not known.
        part_of: the stage of the model it is a side of; "" if it is a whole one.
    """

    name: str
    text_stage: bool = False
    engine: Mapping[str, Any] = field(default_factory=dict)
    engine_defaults: Mapping[str, Any] = field(default_factory=dict)
    cuda_defaults: Mapping[str, Any] = field(default_factory=dict)
    custom_ops: tuple[str, ...] = ()
    cpu_kv_bytes: int = 0
    sampling: Mapping[str, Any] = field(default_factory=dict)
    gpu_share: float = 1.0
    part_of: str = ""

    @property
    def stock_flags(self) -> bool:
        """Whether stock flags apply to it; only the stage that answers text has sides."""
        return self.text_stage or bool(self.part_of)

    @property
    def model_stage(self) -> str:
        """The stage as the model's flow and its facts call it."""
        return self.part_of or self.name


@dataclass(frozen=True, kw_only=True)
class WeightPart:
    """Weights of a stage that are treated alike.

    Attributes:
        elements: how many numbers the engine holds in its own dtype, whatever dtype the checkpoint has.
        stored_bytes: size of what keeps the type in which the checkpoint stores it, as quantized weights do.
        split: tensor parallelism divides these weights; otherwise every device of a replica holds all of them.
        quantizable: the engine argument `quantization` makes them smaller.
    """

    name: str
    elements: int
    stored_bytes: int = 0
    split: bool = True
    quantizable: bool = False


@dataclass(frozen=True, kw_only=True)
class EncoderMemory:
    """What vLLM's profile run with the largest picture or video takes.

    Attributes:
        image_tokens: tokens of the largest picture.
        most_images: the largest video has as many tokens as so many pictures, if a sequence may be that long.
        token_bytes: activations for each of these tokens that every device of a replica holds.
        split_token_bytes: activations for each token that tensor parallelism divides.
        output_elements: numbers in the rows that come out for one token.
    """

    image_tokens: int
    most_images: int
    token_bytes: int
    split_token_bytes: int
    output_elements: int


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """What one replica of a stage needs of a CUDA device, as sizes that do not depend on engine arguments.

    Attributes:
        kv_layers, kv_heads, kv_head_dim: shape of the KV cache of one token; 0 layers = no KV cache.
        step_elements: activations for each token of a step that every device of a replica holds.
        split_step_elements: activations for each token of a step that tensor parallelism divides.
        pass_elements: activations of a step whatever the number of its tokens.
        vocabulary: columns of the logits; 0 = no logits.
        sequence_elements: buffers for each of `max_num_seqs` sequences.
        graph_layers: layers that vLLM captures in CUDA graphs.
        recorded_bytes: CUDA graphs that the model records itself.
    """

    weights: tuple[WeightPart, ...]
    kv_layers: int = 0
    kv_heads: int = 0
    kv_head_dim: int = 0
    step_elements: int = 0
    split_step_elements: int = 0
    pass_elements: int = 0
    vocabulary: int = 0
    sequence_elements: int = 0
    graph_layers: int = 0
    recorded_bytes: int = 0
    encoder: EncoderMemory | None = None


StoredTensors = Mapping[str, tuple[str, int, int]]
"""Tensors of a checkpoint by name: dtype as safetensors writes it, number of elements, bytes."""


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What a checkpoint's config says about each stage, by stage name. A stage that is missing is not known.

    Attributes:
        max_model_len: longest sequence in tokens. For a stage with the pooling runner, which takes a sequence in one
            step, it also becomes the engine's `max_model_len` and `max_num_batched_tokens`.
        kv_bytes_per_token: KV cache of one token in float32.
        memory: what a replica needs of a CUDA device.
    """

    max_model_len: Mapping[str, int] = field(default_factory=dict)
    kv_bytes_per_token: Mapping[str, int] = field(default_factory=dict)
    memory: Mapping[str, StageMemory] = field(default_factory=dict)


@dataclass(frozen=True)
class EdgeSpec:
    """A hand-over between two stages: `tokens` travel in request messages, `tensors` beside them.

    `kv`: the source computes a request's prompt, the target takes its KV cache over and goes on.

    Attributes:
        name: key of its chunk sizes, or of its connector, in a configuration; "" if it has neither.
        chunks: sizes of successive chunks when nothing else is said; the last one repeats.
    """

    source: str
    target: str
    kind: Literal["tokens", "tensors", "kv"]
    name: str = ""
    chunks: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PipelineSpec:
    """A model family: which architectures it serves, with which stages and edges.

    Attributes:
        name: e.g. "qwen3_omni"; also the name of its default stage config.
        architectures: `architectures[0]` of the Hugging Face config, as vLLM sees it.
        stages: in start order; names are unique.
        edges: hand-overs, by stage name.
        output_modalities: what the model can answer with, e.g. ("text", "audio").
        request_plugin: "pkg.mod:attr" of the class that plans requests (imported only where requests are served).
        facts: "pkg.mod:attr" of `(hf_config, sampling by stage) -> ModelFacts`; "" if there is none.
        memory: "pkg.mod:attr" of `(hf_config, StoredTensors or None) -> StageMemory by stage`; "" if there is none.
    """

    name: str
    architectures: tuple[str, ...]
    stages: tuple[StageSpec, ...]
    edges: tuple[EdgeSpec, ...]
    output_modalities: tuple[str, ...]
    request_plugin: str
    facts: str = ""
    memory: str = ""

    def chunks(self) -> dict[str, tuple[int, ...]]:
        """Default chunk sizes by the name of the hand-over."""
        return {edge.name: edge.chunks for edge in self.edges if edge.chunks}

    def stage(self, name: str) -> StageSpec:
        """Return the stage of that name; ConfigError names the known ones."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        known = ", ".join(s.name for s in self.stages)
        raise ConfigError(f"stages.{name}: pipeline '{self.name}' has no such stage; use one of {known}")


def pipelines() -> tuple[PipelineSpec, ...]:
    """All known pipelines, in a fixed order."""
    from vllm_omni_ext.model_plugins.qwen3_omni.pipeline import QWEN3_OMNI

    return (QWEN3_OMNI,)


def pipeline_for(architecture: str) -> PipelineSpec:
    """Return the pipeline that serves `architecture`; ConfigError lists what is supported."""
    for pipeline in pipelines():
        if architecture in pipeline.architectures:
            return pipeline
    known = ", ".join(a for p in pipelines() for a in p.architectures)
    raise ConfigError(f"model: architecture '{architecture}' has no omni pipeline; supported: {known}")


def resolve(name: str) -> Any:
    """Import the object that "pkg.mod:attr" names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
