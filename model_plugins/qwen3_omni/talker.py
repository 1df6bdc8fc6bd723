"""The talker as a vLLM model: Qwen3-MoE over codec tokens; `TalkerInputProvider` computes its input embeddings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.models.qwen3_omni_moe_thinker import Qwen3MoeLLMForCausalLM
from vllm.model_executor.models.utils import WeightsMapper, maybe_prefix
from vllm.sequence import IntermediateTensors

from vllm_omni_ext.engine.graphs import recorder_for
from vllm_omni_ext.model_plugins.qwen3_omni import eager_layers
from vllm_omni_ext.model_plugins.qwen3_omni.code_predictor import CodePredictor
from vllm_omni_ext.model_plugins.qwen3_omni.frames import FrameMaker
from vllm_omni_ext.model_plugins.qwen3_omni.talker_feed import TalkerInputProvider
from vllm_omni_ext.model_plugins.qwen_omni.streamed_talker import StreamedTalker

SPECIAL_CODES = 1024  # the last ids of the talker's vocabulary are specials; only the end may be sampled
EMBED = "thinker.model.embed_tokens.weight"
PROJECT_ROWS = 8192  # rows of the text table that are projected in one piece, to limit the extra memory of loading


class _Resize(nn.Module):
    """Two-layer projection from the thinker's width to the talker's (`...TalkerResizeMLP`)."""

    def __init__(self, source: int, middle: int, target: int) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(source, middle)
        self.linear_fc2 = nn.Linear(middle, target)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(nn.functional.silu(self.linear_fc1(x)))


class Qwen3OmniTalker(StreamedTalker):
    """Model of the talker stage: the decoder samples the first code of each frame, `frames` computes the others."""

    provider = TalkerInputProvider
    tables = (EMBED,)
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "talker.model.codec_embedding.": "language_model.model.embed_tokens.",
            "talker.codec_head.": "language_model.lm_head.",
            "talker.model.": "language_model.model.",
            "talker.": "",
            "thinker.": None,
            "code2wav.": None,
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        text = config.text_config
        if text.hidden_act != "silu":
            raise ValueError(f"talker hidden_act '{text.hidden_act}' is not supported; only silu is")
        self.config = config
        self.codes: int = text.vocab_size
        self.codec_eos: int = config.codec_eos_token_id
        # The compiled class for M-RoPE, whose positions have a second dimension of variable size.
        self.language_model = Qwen3MoeLLMForCausalLM(
            vllm_config=vllm_config.with_hf_config(text, architectures=["Qwen3MoeForCausalLM"]),
            prefix=maybe_prefix(prefix, "language_model"),
        )
        self.text_projection = _Resize(config.thinker_hidden_size, text.intermediate_size, text.hidden_size)
        self.hidden_projection = _Resize(config.thinker_hidden_size, text.intermediate_size, text.hidden_size)
        self.code_predictor = CodePredictor(config.code_predictor_config)
        self.text_table = nn.Parameter(torch.empty(config.thinker_vocab_size, text.hidden_size), requires_grad=False)
        blocked = torch.zeros(text.vocab_size, dtype=torch.bool)
        blocked[-SPECIAL_CODES:] = True
        blocked[self.codec_eos] = False
        self.register_buffer("blocked", blocked, persistent=False)
        self.make_empty_intermediate_tensors = self.language_model.make_empty_intermediate_tensors
        self._rows_at_once = vllm_config.scheduler_config.max_num_seqs
        self._no_graphs: bool = vllm_config.model_config.enforce_eager
        self._eager = eager_layers.possible(self.language_model, vllm_config)
        self._layers: eager_layers.EagerLayers | None = None
        self._frames: FrameMaker | None = None

    @property
    def frames(self) -> FrameMaker:
        """The `FrameMaker` for up to `max_num_seqs` requests, created on first use."""
        if self._frames is None:
            device = self.text_table.device
            recorder = recorder_for(device, eager=self._no_graphs)
            self._frames = FrameMaker(
                self.code_predictor, self._codec_table(), rows=self._rows_at_once, recorder=recorder
            )
        return self._frames

    def _codec_table(self) -> Tensor:
        """Return the embeddings of all codes [codes, hidden]; with tensor parallelism, they are gathered in a copy."""
        embed = self.language_model.model.embed_tokens
        if get_tensor_model_parallel_world_size() == 1:
            return embed.weight.data
        return self.codec_rows(torch.arange(self.config.text_config.vocab_size, device=embed.weight.device))

    @torch.inference_mode()
    def after_load(self) -> None:
        frames = self.frames
        if self.text_table.device.type != "cpu":
            frames.try_out()

    def warm_up(self) -> None:
        self.frames.warm_up()

    def project_hidden(self, rows: Tensor) -> Tensor:
        """Project hidden states of the thinker [n, thinker hidden] to the talker's width [n, hidden]."""
        return self.hidden_projection(rows.to(self.text_table.dtype))

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor | IntermediateTensors:
        """Return hidden states [tokens, hidden] after the final norm."""
        if not self._eager or inputs_embeds is None:
            return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)
        if self._layers is None:  # now the kernels have packed the weights
            self._layers = eager_layers.EagerLayers(self.language_model.model)
        return self._layers(positions, inputs_embeds)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load `talker.*`, project the thinker's embedding table to `text_table`; return the parameters' names."""
        loaded, tables = self.load_talker(weights)
        self._project(tables[EMBED])
        return loaded | {"text_table"}

    @torch.inference_mode()
    def _project(self, embed: Tensor) -> None:
        like = self.text_table
        for start in range(0, embed.shape[0], PROJECT_ROWS):
            rows = embed[start : start + PROJECT_ROWS].to(device=like.device, dtype=like.dtype)
            like.data[start : start + rows.shape[0]] = self.text_projection(rows)
