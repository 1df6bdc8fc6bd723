"""The talker as a vLLM model: a Qwen2 decoder over codes; `TalkerInputProvider` computes its input embeddings.

vLLM's Qwen2 requires that the number of heads times the head size equals the hidden size, which is not so here. vLLM's
Llama reads the head size from the config, and can have biases of queries, keys and values: it is the same decoder.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.model_executor.models.llama import LlamaForCausalLM, LlamaModel
from vllm.model_executor.models.utils import WeightsMapper, maybe_prefix

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
    """Model of the talker stage.

    Its input embedding is a linear projection of the sum of a text embedding, a hidden state and a code embedding, all
    of the thinker's hidden size. Both embedding tables are projected at load, so that the sum is computed in the
    talker's hidden size.
    """

    provider = TalkerInputProvider
    tables = (TEXT, CODES)
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

    def project(self, rows: Tensor) -> Tensor:
        """Project embeddings or hidden states [n, thinker hidden] to [n, hidden], without the projection's bias.

        `TalkerInputProvider.rows` adds the bias once to each sum.
        """
        weight = self.thinker_to_talker_proj.weight
        return nn.functional.linear(rows.to(device=weight.device, dtype=weight.dtype), weight)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load `talker.*`, project the embedding tables of thinker and talker; return the names of the parameters."""
        loaded, tables = self.load_talker(weights)
        self.text_table.data.copy_(self._projected(tables[TEXT]))
        embed = self.language_model.model.embed_tokens.weight
        embed.weight_loader(embed, self._projected(tables[CODES]))
        return loaded | {"text_table", "language_model.model.embed_tokens.weight"}

    @torch.inference_mode()
    def _projected(self, table: Tensor) -> Tensor:
        pieces = [self.project(rows) for rows in table.split(PROJECT_ROWS)]
        return torch.cat(pieces)
