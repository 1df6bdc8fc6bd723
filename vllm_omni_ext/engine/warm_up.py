"""Compiles the Triton kernels that vLLM's own warm-up does not compile, so that the first requests do not wait."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.runner.moe_runner_interface import MoERunnerInterface
from vllm.model_executor.layers.rotary_embedding.common import ApplyRotaryEmb
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

ENCODED_ROWS = (16, 4)
"""Numbers of patches with which a media encoder's kernel is run. Triton compiles one variant for multiples of 16 and
one for other integers. Encoders merge four patches, so a number of patches is a multiple of 4."""

MOST_TUNED_TOKENS = 4096
"""Largest number of tokens for which the tuning files of vLLM's fused MoE kernel have an entry."""


@torch.inference_mode()
def build_last_kernels(runner: Any) -> None:
    """Run the kernels of sampling, of media encoders and of experts with all shapes that Triton compiles separately.

    `StageWorker` calls this function at the end of the start-up, on CUDA.

    Args:
        runner: vLLM's model runner, of either version, with its KV cache, before the graphs are captured.
    """
    if not runner.is_pooling_model:
        _sample(runner)
    elif (states := getattr(runner, "req_states", None)) is not None:  # V2, whose warm-up reads no pooling output
        from vllm.v1.worker.gpu.input_batch import post_update_num_computed_tokens

        row, starts = (torch.zeros(size, dtype=torch.int32, device=runner.device) for size in (1, 2))
        post_update_num_computed_tokens(row, states.num_computed_tokens.gpu, starts)
    modules = list(runner.get_model().modules())
    if (attention := encoder_attention(modules)) is not None:
        _rotate(attention, runner)
    if any(isinstance(each, MoERunnerInterface) for each in modules):
        graphs = runner.vllm_config.compilation_config.max_cudagraph_capture_size or 0
        for tokens in token_counts(graphs, runner.vllm_config.scheduler_config.max_num_batched_tokens):
            runner._dummy_run(tokens, skip_eplb=True)


def encoder_attention(modules: Iterable[torch.nn.Module]) -> torch.nn.Module | None:
    """Return the first attention of a media encoder that rotates queries and keys; text layers use another kernel."""
    found = (each for each in modules if isinstance(getattr(each, "apply_rotary_emb", None), ApplyRotaryEmb))
    return next((each for each in found if hasattr(each, "num_attention_heads_per_partition")), None)


def token_counts(captured: int, most: int) -> list[int]:
    """Return numbers of tokens of steps that use every variant of vLLM's fused MoE kernel, ascending.

    vLLM has tuned tile sizes for 2^n and 3 * 2^n tokens, and its default tile sizes change at some of these numbers. A
    step uses the tile sizes of the nearest number. Triton compiles one variant for multiples of 16 and one for other
    integers. The kernel's argument is tokens times experts per token. With 6 or 8 experts it is a multiple of 16 for
    multiples of 8 tokens, but not for odd numbers of tokens.

    Args:
        captured: largest number of tokens of a captured graph; smaller steps run in a graph. 0: no graphs.
        most: largest number of tokens of a step.
    """
    tuned = {factor << shift for factor in (1, 3) for shift in range(MOST_TUNED_TOKENS.bit_length())}
    both = {tokens + more for tokens in tuned if tokens <= MOST_TUNED_TOKENS for more in (0, 1)}
    ends = {captured + 1, captured + 8, most - 1, most}  # the nearest tiles may be for a size beyond them
    return sorted(tokens for tokens in both | ends if captured < tokens <= most)


def _sample(runner: Any) -> None:
    """Sample with top-k or top-p alone; vLLM's warm-up samples with both."""
    vocabulary = runner.model_config.get_vocab_size()
    for rows in (1, 2):  # Triton compiles an argument of 1 as a constant
        k = torch.full((rows,), 50, dtype=torch.int32, device=runner.device)
        p = torch.full((rows,), 0.9, dtype=torch.float32, device=runner.device)
        for chosen in ((k, None), (None, p)):
            logits = torch.zeros((rows, vocabulary), dtype=torch.float32, device=runner.device)
            apply_top_k_top_p(logits, *chosen)


def _rotate(attention: Any, runner: Any) -> None:
    """Rotate queries and keys of a media encoder's attention; vLLM's warm-up does so for one family only."""
    heads, size = attention.num_attention_heads_per_partition, attention.hidden_size_per_attention_head
    for rows in ENCODED_ROWS:
        rotated = torch.zeros((2, rows, heads, size), dtype=runner.dtype, device=runner.device)
        angles = torch.zeros((rows, size // 2), dtype=runner.dtype, device=runner.device)
        attention.apply_rotary_emb(rotated, angles, angles)
