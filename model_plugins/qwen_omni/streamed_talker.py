"""Base class of the talkers of Qwen3-Omni and Qwen2.5-Omni, and functions for their M-RoPE positions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.models.interfaces import SupportsMRoPE
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper
from vllm.sequence import IntermediateTensors

from vllm_omni_ext.engine.streaming_model import StreamingInputBase


class StreamedTalker(StreamingInputBase, nn.Module, SupportsMRoPE):
    """A vLLM model over codec ids whose input embeddings come from an `engine.input_provider.InputProvider`.

    A subclass sets the attributes.

    Attributes:
        provider: class of the model's `InputProvider`.
        tables: names of the checkpoint's tensors that the model needs in addition to `talker.*`.
        codes: number of ids in the talker's vocabulary.
        language_model: vLLM's decoder over codec ids.
        text_table: input embeddings of text ids [ids, hidden].
        blocked: bool [codes], the ids that are never sampled.
    """

    hf_to_vllm_mapper: WeightsMapper
    provider: type[Any]
    tables: tuple[str, ...]
    codes: int
    language_model: Any
    text_table: Tensor
    blocked: Tensor
    _input_provider: Any = None

    @classmethod
    def is_unused_checkpoint_weight(cls, name: str) -> bool:
        """Return whether vLLM's loader may skip checkpoint files that contain only tensors of this name."""
        return name not in cls.tables and not name.startswith("talker.")

    def load_talker(self, weights: Iterable[tuple[str, Tensor]]) -> tuple[set[str], dict[str, Tensor]]:
        """Load `talker.*`; return the names of the loaded tensors, and the tensors of `tables` by name.

        Raises:
            ValueError: the checkpoint lacks one of `tables`.
        """
        found: dict[str, Tensor] = {}

        def talker_only() -> Iterable[tuple[str, Tensor]]:
            for name, tensor in weights:
                if name in self.tables:
                    found[name] = tensor
                elif not self.is_unused_checkpoint_weight(name):
                    yield name, tensor

        loaded = AutoWeightsLoader(self).load_weights(talker_only(), mapper=self.hf_to_vllm_mapper)
        for name in self.tables:
            if name not in found:
                raise ValueError(f"the checkpoint has no '{name}', which the talker's input is made from")
        return loaded, found

    @property
    def input_provider(self) -> Any:
        """The input provider of this model, created on first use: the device is set only after loading."""
        if self._input_provider is None:
            self._input_provider = self.provider(self, device=self.text_table.device)
        return self._input_provider

    def codec_rows(self, ids: Tensor) -> Tensor:
        """Return the input embeddings [n, hidden] of codes [n] of the first code group."""
        rows: Tensor = self.language_model.model.embed_tokens(ids)
        return rows

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor | IntermediateTensors:
        """Return hidden states [tokens, hidden] after the final norm."""
        hidden: Tensor = self.language_model.model(input_ids, positions, intermediate_tensors, inputs_embeds)
        return hidden

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Return logits [requests, codes], -inf for blocked ids.

        The hidden states are stored in `sampled_hidden`, which the worker passes to `InputProvider.sampled`.
        """
        self.sampled_hidden = hidden_states
        logits = self.language_model.compute_logits(hidden_states)
        return None if logits is None else logits.masked_fill(self.blocked, float("-inf"))

    def embed_input_ids(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the input embeddings [tokens, hidden] for the V1 runner.

        In a step these are the rows of the `InputProvider`. In vLLM's profiling and warm-up steps, which have no
        requests, they are the embeddings of `input_ids` as codes.
        """
        if not self.in_step:
            return self.codec_rows(input_ids.clamp(max=self.codes - 1))
        return self.input_rows(None)

    def get_mrope_input_positions(self, input_tokens: list[int], mm_features: list[Any]) -> tuple[Tensor, int]:
        """Return M-RoPE positions [3, n] and the delta of later positions for the next request of `opened`.

        vLLM's runner calls this method once for each new request of a step, in the order of `opened`, without its id.
        """
        if not self.opened:
            return torch.arange(len(input_tokens)).expand(3, -1), 0
        first, *self.opened = self.opened
        positions: tuple[Tensor, int] = self.input_provider.positions(first, len(input_tokens))
        return positions


def positions_of(prompt: Tensor | None, length: int, *, after_last: bool) -> tuple[Tensor, int]:
    """Return M-RoPE positions [3, length] of the first tokens of a request, and the delta of later positions.

    Args:
        prompt: int64 [3, n], the positions of the request's prompt; None: a text prompt, with positions 0, 1, 2, ...
        length: number of tokens.
        after_last: later positions follow the prompt's last position; False: they follow its largest position. The two
            differ only if the prompt has a video with a sound track.
    """
    if prompt is None:
        return torch.arange(length).expand(3, -1), 0
    after = int((prompt[:, -1] if after_last else prompt).max()) + 1
    delta = after - prompt.shape[1]
    tail = torch.arange(after, after + max(0, length - prompt.shape[1])).expand(3, -1)
    return torch.cat([prompt, tail], dim=1)[:, :length], delta


def positions_from(data: bytes | None) -> Tensor | None:
    """Convert M-RoPE positions of a message (int32, row-major order) to a tensor int64 [3, n]; return None for None."""
    return None if data is None else torch.frombuffer(bytearray(data), dtype=torch.int32).long().view(3, -1)
