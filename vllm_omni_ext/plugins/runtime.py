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
            parameters. In `plan`, those of a frontend that takes `SamplingParams` are the client's, with the defaults
            of vLLM and the stage config, for each request that has a prompt for the frontend: the core uses them if
            the flow opens the frontend without parameters of its own.
        named: stages whose parameters are in a field of the body with the stage's name.
        chunks: sizes of successive chunks by edge, or "all", and "adaptive"; known edges and valid sizes only. Missing
            entries are as configured.
        fields: values of the request fields that the plugin declares (`ModelRuntime.fields`), by name; a field that
            the request does not set is missing.
        in_blocks: the sounds of the prompt are computed in blocks of `Capabilities.sound_block_ms`. Prompts with the
            same beginning, also within a sound, then share what is cached.
        ahead_of: the request only computes the beginning of its prompt, up to the last whole block of its last sound,
            for a later request with an answer of these modalities. None: the request is answered.
    """

    modalities: tuple[str, ...]
    params: Mapping[str, Any] = field(default_factory=dict)
    chunks: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    in_blocks: bool = False
    ahead_of: tuple[str, ...] | None = None
    named: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """The prompt of a request, after vLLM's renderer has tokenized it.

    Attributes:
        prompt: token ids with multimodal placeholders expanded; empty if the request has no prompt for the frontend.
        features: vLLM `MultiModalFeatureSpec`s of the prompt.
        data: data from an API of the plugin for the plugin's own `plan` (e.g. the ids of a text to be read out).
        scope: prefix caches share nothing between requests with different scopes (cache salt, LoRA adapter).
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
    """The plan of one request.

    Attributes:
        flow: the route of the request through the stages.
        budgets: most tokens that a stage may generate for the request, by stage.
        frontend_args: entries for the `SamplingParams.extra_args` of the forwarded request.
        skip_prefix_cache: the forwarded request must not read the prefix cache (its hidden states must be computed).
        prompt, features: replace those of the forwarded request; None: they are forwarded as rendered.
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
        sound_block_ms: length in ms of the blocks of a sound that do not depend on later sound; the runtime then plans
            requests with `RequestOptions.in_blocks` and `ahead_of`. None: it does not.
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
        chunks: configured chunk sizes by edge, and "adaptive".
        limits: longest sequence in tokens, by stage.
        defaults: default parameters by stage: the stage config's over the pipeline's.
        model_config: vLLM's `ModelConfig` of the frontend, e.g. to find the checkpoint's files; None in tests that
            need none.
        processor: vLLM's multimodal processor of the frontend; None without one.
    """

    hf_config: Any
    pipeline: str
    frontend: str
    chunks: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
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
        """Return the content of a stage output's tensor. The core decodes its own messages and errors itself."""
