"""Computes attention of rows of different lengths with vLLM's FlashAttention: one kernel for all rows of a step."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from vllm_omni_ext.model_plugins.bagel.attention import Attention, Rows, sdpa

_DTYPES = (torch.bfloat16, torch.float16)


def attention_for(device: torch.device, dtype: torch.dtype, head_dim: int) -> Attention:
    """Return FlashAttention if the device, the dtype and the head size allow it, else `sdpa`."""
    if device.type != "cuda" or dtype not in _DTYPES:
        return sdpa
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version, is_flash_attn_varlen_func_available

    version = get_flash_attn_version(head_size=head_dim) if is_flash_attn_varlen_func_available() else None
    return sdpa if version is None else partial(flash_attention, version=version)


def flash_attention(query: Tensor, key: Tensor, value: Tensor, rows: Rows, *, version: int) -> Tensor:
    """Compute attention within rows with FlashAttention; an `Attention` for bfloat16 and float16 on CUDA.

    `version` is the version of FlashAttention.

    With fewer queries than keys, the kernel's causal mask aligns the last query with the last key, as `sdpa` does.
    """
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

    found: Tensor = flash_attn_varlen_func(
        q=query,
        k=key,
        v=value,
        cu_seqlens_q=rows.query_starts,
        cu_seqlens_k=rows.key_starts,
        max_seqlen_q=max(rows.queries),
        max_seqlen_k=max(rows.keys),
        causal=rows.causal,
        fa_version=version,
    )
    return found
