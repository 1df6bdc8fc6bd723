"""What the kernel for CUDA is called with; the kernel itself is not run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_omni_ext.model_plugins.bagel.attention import Rows, sdpa
from vllm_omni_ext.model_plugins.bagel.stages.cuda_attention import attention_for, flash_attention

CPU = torch.device("cpu")


def kernel(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **given: Any) -> Tensor:
    """The kernel's documented result, computed row by row from the same arguments."""
    assert given["fa_version"] == 3
    queries, keys = (tuple(starts.diff().tolist()) for starts in (cu_seqlens_q, cu_seqlens_k))
    assert (given["max_seqlen_q"], given["max_seqlen_k"]) == (max(queries), max(keys))
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    return sdpa(q, k, v, Rows(queries, keys, given["causal"], CPU))


@pytest.mark.parametrize("causal", [False, True])
def test_arguments_of_the_kernel(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends import fa_utils

    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", kernel, raising=False)
    rows = Rows((3, 1, 5), (7, 1, 6), causal, CPU)
    query, key, value = torch.randn(9, 4, 8), torch.randn(14, 2, 8), torch.randn(14, 2, 8)
    assert torch.equal(flash_attention(query, key, value, rows, version=3), sdpa(query, key, value, rows))


def test_other_devices_and_dtypes_have_pytorchs_attention() -> None:
    assert attention_for(CPU, torch.bfloat16, 128) is sdpa
    assert attention_for(torch.device("cuda"), torch.float32, 128) is sdpa
