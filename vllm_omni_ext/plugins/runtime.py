"""A model plugin's part in an API server: it checks a request, plans it once, and decodes stage outputs."""

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
        params: parameters by stage, for stages other than the frontend: vLLM `SamplingParams`, or the stage's own type.
            A missing stage uses its configured parameters.
        chunks: sizes of successive chunks by edge, or "all", and "adaptive"; missing entries are as configured.
        fields: the request fields that the plugin declares (`ModelRuntime.fields`), by name; only those given.
    """

    modalities: tuple[str, ...]
    params: Mapping[str, Any] = field(default_factory=dict)
    chunks: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A request's prompt after vLLM's renderer.

    Attributes:
        prompt: token ids with multimodal placeholders expanded; empty if the request has no prompt for the frontend.
        features: vLLM `MultiModalFeatureSpec`s of the prompt.
        data: data from an API of the plugin for the plugin's own `plan` (e.g. the ids of a text to be read out).
        input_tokens: number of tokens of the client's input, for the answer's usage; None = all of `prompt`.
    """

    prompt: Sequence[int] = ()
    features: Sequence[Any] = ()
    data: Any = None
    input_tokens: int | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens of the client's input."""
        return len(self.prompt) if self.input_tokens is None else self.input_tokens


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A request that can start.

    Attributes:
        flow: its flow.
        budgets: largest number of tokens that a stage may generate for it, by stage.
        frontend_args: entries for the `SamplingParams.extra_args` of the forwarded request.
        skip_prefix_cache: the forwarded request must not read the prefix cache (its hidden states must be computed).
    """

    flow: Flow
    budgets: Mapping[str, int] = field(default_factory=dict)
    frontend_args: Mapping[str, Any] = field(default_factory=dict)
    skip_prefix_cache: bool = False


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The possible answers of a checkpoint.

    Attributes:
        modalities: all modalities.
        default_modalities: modalities of a request that names none.
        routes: kinds of requests and the stages that each needs, e.g. {"text": {"thinker"}}; `/health` reports each
            kind.
        card: additional entries of the model's card in `/v1/models`, e.g. names of voices.
    """

    modalities: tuple[str, ...]
    default_modalities: tuple[str, ...]
    routes: Mapping[str, frozenset[str]] = field(default_factory=dict)
    card: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RuntimeContext:
    """Arguments for the construction of a runtime.

    Attributes:
        hf_config: the checkpoint's own Hugging Face config (not a stage's, which may have been overridden).
        pipeline: name of the chosen pipeline.
        frontend: name of the frontend stage.
        chunks: configured chunk sizes by edge, and "adaptive".
        limits: longest sequence in tokens, by stage.
        defaults: resolved parameter defaults by stage.
        model_config: vLLM's `ModelConfig` of the frontend, e.g. to find the checkpoint's files; None in tests that
            need none.
    """

    hf_config: Any
    pipeline: str
    frontend: str
    chunks: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    model_config: Any = None


class ModelRuntime(Protocol):
    """One per API server. Its constructor takes a `RuntimeContext`."""

    fields: type[BaseModel]
    """The plugin's own request fields (e.g. `voice`); all optional, `extra="forbid"`. The same names are keywords of
    `LLM.generate` and fields of HTTP bodies."""

    def capabilities(self) -> Capabilities:
        """Return the possible answers of the checkpoint."""

    def validate(self, options: RequestOptions) -> None:
        """Check a request before it is rendered; RequestError names the field."""

    def plan(self, request: Rendered, options: RequestOptions) -> Planned:
        """Plan a request after it was rendered; called exactly once for each request.

        Raises:
            RequestError: the request cannot be served; names the field.
        """

    def decode(self, stage: str, tensor: Any) -> Any:
        """Decode the tensor of a stage output. Errors and messages of the core are handled before."""
