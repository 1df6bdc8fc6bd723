"""Runs the talker's layers on a CPU without compilation: with vLLM's weights and kernels, but fewer operators.

vLLM expects its Python layers to be compiled. Without compilation, a step of a small model spends most of its time in
these layers: norms and rotary embeddings of several operations each, positions computed again in every layer, and a
mixture of experts that passes through a dozen functions. Attention and KV cache are vLLM's own layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as kernels
from vllm.config import CompilationMode, VllmConfig
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.models.qwen3_moe import Qwen3MoeSparseMoeBlock
from vllm.platforms import current_platform

from vllm_omni_ext.model_plugins.qwen3_omni.code_loop import KERNEL_WIDTH


def possible(model: Any, vllm_config: VllmConfig) -> bool:
    """Return whether this module can run a `Qwen3MoeForCausalLM`: one CPU process, not compiled, not quantized."""
    text = vllm_config.model_config.hf_text_config
    return (
        current_platform.is_cpu()
        and not current_platform.is_zen_cpu()  # Zen CPUs have different kernels
        and vllm_config.compilation_config.mode == CompilationMode.NONE
        and vllm_config.parallel_config.world_size == 1
        and vllm_config.quant_config is None
        and vllm_config.lora_config is None
        and not text.head_dim % KERNEL_WIDTH
        and not text.hidden_size % KERNEL_WIDTH
        and all(_expected(layer) for layer in model.model.layers)
    )


def _expected(layer: Any) -> bool:
    mixture = layer.mlp
    if not isinstance(mixture, Qwen3MoeSparseMoeBlock) or mixture.shared_expert is None:
        return False
    routed, router = mixture.experts.routed_experts, mixture.experts.router
    return (
        type(router) is CPURouter
        and router.scoring_func == "softmax"
        and not router.use_grouped_topk
        and router.custom_routing_function is None
        and routed.expert_map is None
        and getattr(layer.self_attn.rotary_emb, "mrope_section", None) is not None
    )


class EagerLayers:
    """Runs the layers of a `Qwen3MoeModel` whose weights vLLM has loaded and packed."""

    def __init__(self, model: Any) -> None:
        first = model.layers[0].self_attn
        self._blocks = [_Block.of(layer) for layer in model.layers]
        self._norm, self._eps = model.norm.weight.data, model.norm.variance_epsilon
        self._rope = _Rope(first.rotary_emb)
        self._q_width, self._k_width, self._head_dim = first.q_size, first.kv_size, first.head_dim
        self._normed_heads = (first.q_size + first.kv_size) // first.head_dim

    def __call__(self, positions: Tensor, rows: Tensor) -> Tensor:
        """Return hidden states [tokens, hidden] after the final norm.

        Args:
            positions: [tokens], or [3, tokens] for M-RoPE.
            rows: input embeddings [tokens, hidden]; not modified.
        """
        stream, x, count = rows.clone(), torch.empty_like(rows), rows.shape[0]
        rope, order = self._rope.at(positions), torch.arange(count)
        for index, block in enumerate(self._blocks):
            if index == 0:
                kernels.rms_norm(x, stream, block.norm_in, self._eps)
            else:
                kernels.fused_add_rms_norm(x, stream, block.norm_in, self._eps)
            x = block.out(self._attend(block, x, rope, order))
            kernels.fused_add_rms_norm(x, stream, block.norm_out, self._eps)
            x = block.experts(x)
        kernels.fused_add_rms_norm(x, stream, self._norm, self._eps)
        return x

    def _attend(self, block: _Block, x: Tensor, rope: Tensor, order: Tensor) -> Tensor:
        by_head = block.qkv(x).view(len(x), -1, self._head_dim)
        normed = torch.empty_like(by_head)
        # The kernel only reads contiguous rows, so it normalizes the values too; their result is not used.
        kernels.rms_norm(normed, by_head, None, self._eps)
        normed[:, : self._normed_heads].mul_(block.head_scale)
        q, k, _ = normed.view(len(x), -1).split((self._q_width, self._k_width, self._k_width), dim=1)
        kernels.rotary_embedding(order, q, k, self._head_dim, rope, self._rope.neox)
        return block.attention(q, k, by_head[:, self._normed_heads :])


class _Rope:
    """Computes the cosines and sines of a step's positions, once for all layers."""

    def __init__(self, embedding: Any) -> None:
        self._cache, self.neox = embedding.cos_sin_cache, embedding.is_neox_style
        half = torch.arange(embedding.rotary_dim // 2)
        section = embedding.mrope_section
        if embedding.mrope_interleaved:  # time, height, width, time, ..., then time to the end
            rows = [(half % 3 == part) & (half < 3 * section[part]) for part in (1, 2)]
        else:
            time, height, _ = section
            rows = [(half >= time) & (half < time + height), half >= time + height]
        self._height, self._width = (row.repeat(2) for row in rows)

    def at(self, positions: Tensor) -> Tensor:
        """Return the cosines, then the sines, of rotary embeddings [tokens, head_dim] at `positions`."""
        found = self._cache[positions]
        if positions.dim() == 1:
            return found
        return torch.where(self._width, found[2], torch.where(self._height, found[1], found[0]))


@dataclass(frozen=True)
class _Experts:
    """A mixture of experts with a shared expert: x [tokens, hidden] to [tokens, hidden]."""

    gate: _Linear
    top: int
    renormalize: bool
    routed: Any
    isa: str
    shared_gate: _Linear
    gate_up: _Linear
    down: _Linear

    @classmethod
    def of(cls, block: Any) -> _Experts:
        routed, router = block.experts.routed_experts, block.experts.router
        kernel = routed.quant_method.moe_kernel.impl.fused_experts
        return cls(
            gate=_Linear(block.gate),
            top=router.top_k,
            renormalize=router.renormalize,
            routed=routed,
            isa=kernel.isa,
            shared_gate=_Linear(block.shared_expert_gate),
            gate_up=_Linear(block.shared_expert.gate_up_proj),
            down=_Linear(block.shared_expert.down_proj),
        )

    def __call__(self, x: Tensor) -> Tensor:
        chances = self.gate(x)
        if self.renormalize:
            scores, ids = chances.topk(self.top, dim=-1, sorted=False)
            weights = scores.softmax(dim=-1)
        else:
            weights, ids = chances.softmax(dim=-1).topk(self.top, dim=-1, sorted=False)
        made, routed = torch.empty_like(x), self.routed
        kernels.cpu_fused_moe(
            made, x, routed.w13_weight, routed.w2_weight, None, None, weights.float(), ids.int(), "silu", self.isa
        )
        gate_up = self.gate_up(x)
        act = gate_up.new_empty((len(x), gate_up.shape[1] // 2))
        torch.ops._C.silu_and_mul(act, gate_up)
        return made.addcmul_(self.shared_gate(x).sigmoid(), self.down(act))


class _Linear:
    """Calls the kernel of a linear layer directly, with the weight that vLLM has packed for it."""

    def __init__(self, layer: Any) -> None:
        self._call, self._weight, self._bias = layer.cpu_linear, layer.weight, layer.bias

    def __call__(self, x: Tensor) -> Tensor:
        return self._call(x, self._weight, self._bias)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Block:
    norm_in: Tensor
    norm_out: Tensor
    qkv: _Linear
    head_scale: Tensor
    attention: Any
    out: _Linear
    experts: _Experts

    @classmethod
    def of(cls, layer: Any) -> _Block:
        attention = layer.self_attn
        heads, kv_heads = attention.num_heads, attention.num_kv_heads
        scale = (attention.q_norm.weight.expand(heads, -1), attention.k_norm.weight.expand(kv_heads, -1))
        return cls(
            norm_in=layer.input_layernorm.weight.data,
            norm_out=layer.post_attention_layernorm.weight.data,
            qkv=_Linear(attention.qkv_proj),
            head_scale=torch.cat(scale).data,
            attention=attention.attn,
            out=_Linear(attention.o_proj),
            experts=_Experts.of(layer.mlp),
        )
