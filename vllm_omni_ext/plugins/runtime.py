"""Interface of a model plugin's code in an API server: it checks requests, plans them, and decodes stage outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic import BaseModel

from vllm_omni_ext.plugins.flow import Flow


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """The options of a request in addition to its prompt.

    Attributes:
        modalities: modalities of the answer, e.g. ("text", "audio").
        params: parameters by stage: vLLM `SamplingParams`, or the stage's own type. A missing stage uses its configured
            parameters. In `plan`, a frontend that takes `SamplingParams` has an entry for each request with a prompt
            for it: the client's parameters over the defaults of the stage config and of vLLM. The core uses this entry
            if the flow opens the frontend without `Open.params`.
        named: stages whose parameters the client has set in a body field with the stage's name. The core refuses the
            request if its flow does not use such a stage.
        chunks: chunk sizes of this request; missing entries have the configured values. Name of an edge
            (`plugins.spec.EdgeSpec.name`) -> sizes of successive chunks, or "all" for one chunk. "adaptive" -> whether
            a chunk is also limited by the sound that the client has left to play. The core has checked all entries.
        fields: values of the request fields that the plugin declares (`ModelRuntime.fields`), by name; a field that
            the request does not set is missing.
        in_blocks: the encoder computes each sound of the prompt in blocks of `Capabilities.sound_block_ms`, so that a
            later prompt with the same beginning, which may end within a sound, hits the caches.
        ahead_of: None: a usual request. Otherwise the request has no answer. It only computes the beginning of its
            prompt, up to the last whole block of its last sound, so that a later request with an answer of these
            modalities hits the caches.
        streamed: the client receives the answer in pieces, while it is made.
    """

    modalities: tuple[str, ...]
    params: Mapping[str, Any] = field(default_factory=dict)
    chunks: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    in_blocks: bool = False
    ahead_of: tuple[str, ...] | None = None
    named: frozenset[str] = frozenset()
    streamed: bool = False


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """The prompt of a request, after vLLM's renderer has tokenized it.

    Attributes:
        prompt: token ids with multimodal placeholders expanded; empty if the request has no prompt for the frontend.
        features: vLLM `MultiModalFeatureSpec`s of the prompt.
        data: data from an API of the plugin for the plugin's own `plan` (e.g. the ids of a text to be read out).
        scope: text made of the request's cache salt and LoRA adapter. Requests with different scopes share no entry of
            a prefix cache.
        input_tokens: number of tokens of the client's input, for `usage` of the answer; None = all of `prompt`.
    """

    prompt: Sequence[int] = ()
    features: Sequence[Any] = ()
    data: Any = None
    scope: str = ""
    input_tokens: int | None = None

    @property
    def tokens(self) -> int:
        """Return the number of tokens of the client's input, for `usage`."""
        return len(self.prompt) if self.input_tokens is None else self.input_tokens


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The result of `ModelRuntime.plan` for one request.

    A forwarded request is the client's engine request, which the flow sends to the frontend (`plugins.flow.Forward`).

    Attributes:
        flow: decides for each output of a stage which stage gets the next input (see `plugins.flow`).
        budgets: most tokens that a stage may generate for the request, by stage.
        frontend_args: entries for the `SamplingParams.extra_args` of the forwarded request.
        skip_prefix_cache: the forwarded request must not read the prefix cache (its hidden states must be computed).
        prompt, features: replace prompt and features of the forwarded request; None: the rendered ones stay.
    """

    flow: Flow
    budgets: Mapping[str, int] = field(default_factory=dict)
    frontend_args: Mapping[str, Any] = field(default_factory=dict)
    skip_prefix_cache: bool = False
    prompt: Sequence[int] | None = None
    features: Sequence[Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The modalities and the kinds of requests that a checkpoint supports.

    Attributes:
        modalities: all modalities that an answer can have.
        default_modalities: modalities of the answer if the request sets none.
        routes: kinds of requests and the stages that each needs, e.g. {"text": {"thinker"}}; `/health` reports each
            kind.
        card: additional entries of the model's object in `/v1/models`, e.g. names of voices.
        sound_block_ms: length in ms of blocks in which the encoder can compute a sound, each without the sound after
            it. `ModelRuntime.plan` then accepts `RequestOptions.in_blocks` and `ahead_of`. None: no such blocks.
    """

    modalities: tuple[str, ...]
    default_modalities: tuple[str, ...]
    routes: Mapping[str, frozenset[str]] = field(default_factory=dict)
    card: Mapping[str, Any] = field(default_factory=dict)
    sound_block_ms: float | None = None


@dataclass(frozen=True, kw_only=True)
class RuntimeContext:
    """The argument of a `ModelRuntime`'s constructor.

    Attributes:
        hf_config: the checkpoint's own Hugging Face config (not a stage's, which may have been overridden).
        pipeline: name of the chosen pipeline.
        frontend: name of the frontend stage.
        chunks: configured chunk sizes, with the keys and values of `RequestOptions.chunks`.
        limits: longest sequence in tokens, by stage.
        max_num_seqs: vLLM's `max_num_seqs`, by stage.
        defaults: default parameters by stage: those of the stage config override those of the pipeline.
        model_config: vLLM's `ModelConfig` of the frontend, e.g. to find the checkpoint's files; None in tests that
            need none.
        processor: vLLM's multimodal processor of the frontend; None without one.
    """

    hf_config: Any
    pipeline: str
    frontend: str
    chunks: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    max_num_seqs: Mapping[str, int] = field(default_factory=dict)
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    model_config: Any = None
    processor: Any = None


class ModelRuntime(Protocol):
    """Interface of a plugin's runtime. Each API server creates one, from a `RuntimeContext`."""

    fields: type[BaseModel]
    """The plugin's own request fields (e.g. `voice`); all optional, `extra="forbid"`. The same names are keywords of
    `LLM.generate` and fields of HTTP bodies."""

    def capabilities(self) -> Capabilities:
        """Return the modalities and the kinds of requests that the checkpoint supports."""

    def validate(self, options: RequestOptions) -> None:
        """Check the options of a request before it is rendered; RequestError names the wrong field."""

    def plan(self, request: Rendered, options: RequestOptions) -> Planned:
        """Plan a request after it was rendered; called exactly once for each request.

        Raises:
            RequestError: the request cannot be served; the error names the field.
        """

    def decode(self, stage: str, tensor: Any) -> Any:
        """Convert the tensor of a stage's output to the value that the flow gets as `plugins.flow.Produced.payload`.

        Not called for tensors with a message or error of the core, which the core decodes itself.
        """
