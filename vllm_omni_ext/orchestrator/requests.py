"""Requests as plugins and the orchestrator see them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from vllm_omni_ext.orchestrator.flow import Flow


@dataclass(frozen=True, kw_only=True)
class OmniOptions:
    """What a request asks for beyond text.

    Attributes:
        modalities: what the answer consists of, e.g. ("text", "audio").
        voice: speaker name; None takes the checkpoint's default.
        sampling: vLLM `SamplingParams` by stage name, for stages after the text stage.
        chunks: sizes of successive chunks by hand-over, or "all", and "adaptive"; what is missing is as configured.
    """

    modalities: tuple[str, ...]
    voice: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    chunks: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text_only(self) -> bool:
        """Whether the text stage alone can answer."""
        return self.modalities == ("text",)


@dataclass
class TextRequest:
    """The text stage's request, as far as a plugin may see and change it.

    Attributes:
        prompt: token ids with multimodal placeholders expanded.
        features: vLLM `MultiModalFeatureSpec`s of the prompt.
        extra_args: goes into the text stage's `SamplingParams.extra_args`.
        skip_prefix_cache: the request must not read the prefix cache (its rows have to be computed).
    """

    prompt: Sequence[int]
    features: list[Any] = field(default_factory=list)
    extra_args: dict[str, Any] = field(default_factory=dict)
    skip_prefix_cache: bool = False


class RequestPlugin(Protocol):
    """What a pipeline's `request_plugin` provides."""

    sample_rate: int
    recital_prompt: str
    """A conversation, as text, that ends where the reply begins: before a text that is only to be read out."""

    @property
    def output_modalities(self) -> tuple[str, ...]:
        """What the checkpoint can answer with."""

    @property
    def voices(self) -> tuple[str, ...]:
        """Speaker names."""

    @property
    def default_voice(self) -> str:
        """Speaker used when none is named."""

    def check(self, options: OmniOptions) -> None:
        """Raise RequestError if the options cannot be met."""

    def room(self, prompt: Sequence[int], options: OmniOptions, limits: Mapping[str, int]) -> Mapping[str, int]:
        """Most tokens each stage behind the text stage may make after this prompt.

        Args:
            limits: longest sequence in tokens, by stage.

        Raises:
            RequestError: not even one fits, or nobody speaks in this prompt.
        """

    def open(self, request: TextRequest, options: OmniOptions) -> Flow:
        """Plan a request that needs more than the text stage."""

    def decode(self, stage: str, tensor: Any) -> Any:
        """Read the tensor a stage put beside its tokens."""
