"""The talker as a vLLM model: a Qwen2 decoder over codes; `TalkerInputProvider` computes its input embeddings.

vLLM's Qwen2 requires heads that together are as wide as the hidden states, which those of this talker are not. Its
Llama has a width of heads in the config, and biases of queries, keys and values: the same decoder.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.model_executor.models.llama import LlamaForCausalLM, LlamaModel
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix
from vllm.sequence import IntermediateTensors

from vllm_omni_ext.model_plugins.qwen2_5_omni.talker_feed import TalkerInputProvider
from vllm_omni_ext.model_plugins.qwen_omni.streamed_talker import StreamedTalker

TEXT = "thinker.model.embed_tokens.weight"
CODES = "talker.model.embed_tokens.weight"
PROJECT_ROWS = 8192  # rows of a table that are projected in one piece, to limit the extra memory of loading


@support_torch_compile(
    dynamic_arg_dims={"input_ids": 0, "positions": -1, "intermediate_tensors": 0, "inputs_embeds": 0}
)
class TalkerDecoder(LlamaModel):
    """vLLM's Llama with M-RoPE positions [3, tokens], whose second dimension has a variable size."""


class _Decoder(LlamaForCausalLM):
    def _init_model(self, vllm_config: VllmConfig, prefix: str = "", **kwargs: Any) -> nn.Module:
        return TalkerDecoder(vllm_config=vllm_config, prefix=prefix, **kwargs)


class Qwen2_5OmniTalker(StreamedTalker):
    """Talker of Qwen2.5-Omni.

    Its input is a linear projection of the sum of a text embedding, a hidden state and a code embedding, all as wide as
    the thinker. The tables are projected at load, so that the sum is computed in the talker's width.
    """

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "talker.codec_head.": "language_model.lm_head.",
            "talker.model.": "language_model.model.",
            "talker.": "",
            "thinker.": None,
            "token2wav.": None,
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.config = config
        self.codes: int = config.vocab_size
        self.ends = frozenset((config.tts_codec_pad_token_id, config.tts_codec_end_token_id))
        self.language_model = _Decoder(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "language_model"))
        self.thinker_to_talker_proj = nn.Linear(config.embedding_size, config.hidden_size)
        self.text_table = nn.Parameter(torch.empty(config.thinker_vocab_size, config.hidden_size), requires_grad=False)
        blocked = torch.zeros(config.vocab_size, dtype=torch.bool)
        blocked[config.codes :] = True
        blocked[list(self.ends)] = False
        self.register_buffer("blocked", blocked, persistent=False)
        self.make_empty_intermediate_tensors = self.language_model.make_empty_intermediate_tensors
        self._input_provider: TalkerInputProvider | None = None

    @staticmethod
    def is_unused_checkpoint_weight(name: str) -> bool:
        """Return whether vLLM's loader may skip checkpoint files that contain only tensors of this name."""
        return name != TEXT and not name.startswith("talker.")

    @property
    def input_provider(self) -> TalkerInputProvider:
        """The input provider of this model, created on first use: the device is set only after loading."""
        if self._input_provider is None:
            self._input_provider = TalkerInputProvider(self, device=self.text_table.device)
        return self._input_provider

    def after_load(self) -> None:
        """Allocate nothing: a step has no buffers of its own."""

    def codec_rows(self, ids: Tensor) -> Tensor:
        """Return the projected embeddings [n, hidden] of codes [n]."""
        rows: Tensor = self.language_model.model.embed_tokens(ids)
        return rows

    def project(self, rows: Tensor) -> Tensor:
        """Project rows [n, thinker hidden] to [n, hidden], without the bias."""
        weight = self.thinker_to_talker_proj.weight
        return nn.functional.linear(rows.to(device=weight.device, dtype=weight.dtype), weight)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor | IntermediateTensors:
        """Return hidden states [tokens, hidden] after the final norm."""
        hidden: Tensor | IntermediateTensors = self.language_model.model(
            input_ids, positions, intermediate_tensors, inputs_embeds
        )
        return hidden

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Return logits [requests, codes], -inf for ids that are neither codes of token2wav nor an end."""
        self.sampled_hidden = hidden_states
        logits = self.language_model.compute_logits(hidden_states)
        return None if logits is None else logits.masked_fill(self.blocked, float("-inf"))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load `talker.*`, and project the embedding tables of thinker and talker; return the loaded tensors' names."""
        tables: dict[str, Tensor] = {}

        def talker_only() -> Iterable[tuple[str, Tensor]]:
            for name, tensor in weights:
                if name in (TEXT, CODES):
                    tables[name] = tensor
                elif not self.is_unused_checkpoint_weight(name):
                    yield name, tensor

        loaded = AutoWeightsLoader(self).load_weights(talker_only(), mapper=self.hf_to_vllm_mapper)
        for name in (TEXT, CODES):
            if name not in tables:
                raise ValueError(f"the checkpoint has no '{name}', which the talker's input is made from")
        self.text_table.data.copy_(self._projected(tables[TEXT]))
        embed = self.language_model.model.embed_tokens.weight
        embed.weight_loader(embed, self._projected(tables[CODES]))
        return loaded | {"text_table", "language_model.model.embed_tokens.weight"}

    @torch.inference_mode()
    def _projected(self, table: Tensor) -> Tensor:
        pieces = [self.project(rows) for rows in table.split(PROJECT_ROWS)]
        return torch.cat(pieces)
