"""Results that the host needs, and that kernels of the null device do not compute."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

TOKEN = int(os.environ.get("NULLGPU_TOKEN", "7"))
"""The token that every row samples."""

LONGEST = 4096
"""Longest sequence given to FlashAttention 3 where the host would read one from the device."""

SANE = 1 << 20
"""A longest sequence beyond this is garbage of the device."""

_kept: list[Any] = []
"""torch drops the operators of a collected Library."""


def convolutions() -> None:
    """Let cuDNN's convolutions return empty memory of the right shape; their types and devices are checked."""
    library: Any = torch.library.Library("aten", "IMPL")
    count = ctypes.CDLL(None).nullgpu_matmul

    def check(x: torch.Tensor, weight: torch.Tensor) -> None:
        if x.dtype != weight.dtype or x.device != weight.device:
            raise RuntimeError(f"convolution of {x.dtype} on {x.device} with {weight.dtype} on {weight.device}")
        count()

    def forward(x: Any, weight: Any, padding: Any, stride: Any, dilation: Any, *_: Any) -> torch.Tensor:
        check(x, weight)
        spatial = range(weight.dim() - 2)
        sizes = [
            (x.shape[i + 2] + 2 * padding[i] - dilation[i] * (weight.shape[i + 2] - 1) - 1) // stride[i] + 1
            for i in spatial
        ]
        return torch.empty([x.shape[0], weight.shape[0], *sizes], dtype=x.dtype, device=x.device)

    def transposed(
        x: Any, weight: Any, padding: Any, output_padding: Any, stride: Any, dilation: Any, groups: int, *_: Any
    ) -> torch.Tensor:
        check(x, weight)
        spatial = range(weight.dim() - 2)
        sizes = [
            (x.shape[i + 2] - 1) * stride[i]
            - 2 * padding[i]
            + dilation[i] * (weight.shape[i + 2] - 1)
            + output_padding[i]
            + 1
            for i in spatial
        ]
        return torch.empty([x.shape[0], weight.shape[1] * groups, *sizes], dtype=x.dtype, device=x.device)

    def with_relu(x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> Any:
        return forward(x, weight, padding, stride, dilation)

    library.impl("cudnn_convolution", forward, "CUDA")
    library.impl("cudnn_convolution_transpose", transposed, "CUDA")
    library.impl("cudnn_convolution_relu", with_relu, "CUDA")
    _kept.append(library)


def longest_sequences() -> None:
    """Give FlashAttention 3 a longest sequence: vLLM's encoder reads it from the device."""
    import vllm.v1.attention.backends.fa_utils as used
    import vllm.vllm_flash_attn as package
    import vllm.vllm_flash_attn.flash_attn_interface as interface

    call = interface.flash_attn_varlen_func

    def varlen(*arguments: Any, **named: Any) -> Any:
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            if named.get(name) is not None:  # the sound encoder's are on the host
                named[name] = named[name].to(arguments[0].device if arguments else named["q"].device)
        for name in ("max_seqlen_q", "max_seqlen_k"):
            if named.get(name) is not None and not 0 < int(named[name]) < SANE:
                named[name] = LONGEST
        return call(*arguments, **named)

    for module in (interface, package, used):
        module.flash_attn_varlen_func = varlen


class RangesOnHost(TorchFunctionMode):
    """Makes `torch.arange` on the host, so that a mask has values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch."""
        named = dict(kwargs or {})
        if func is torch.arange:
            named["device"] = "cpu"
        return func(*args, **named)


def sound_lengths() -> None:
    """Leave the lengths of sounds on the host: vLLM's encoder computes shapes from them."""
    import vllm.model_executor.models.qwen3_omni_moe_thinker as used

    mixin = used.Qwen3OmniMoeConditionalGenerationMixin
    process, to_device = mixin._process_audio_input, used.async_tensor_h2d

    def left(data: Any, *arguments: Any, **named: Any) -> Any:
        return data if isinstance(data, torch.Tensor) else to_device(data, *arguments, **named)

    def on_host(self: Any, audio_input: Any) -> Any:
        used.async_tensor_h2d = left
        try:
            with RangesOnHost():
                return process(self, audio_input)
        finally:
            used.async_tensor_h2d = to_device

    mixin._process_audio_input = on_host


def sound_shapes() -> None:
    """Compute the shapes of Transformers' sound encoder on the host: its layers take lengths and indices from them."""
    import transformers.models.qwen2_5_omni.modeling_qwen2_5_omni as used

    def computed(function: Any, *, to_device: bool) -> Any:
        def on_host(*arguments: Any, **named: Any) -> Any:
            device = next(each.device for each in arguments if isinstance(each, torch.Tensor))
            hosted = [each.cpu() if isinstance(each, torch.Tensor) else each for each in arguments]
            with RangesOnHost():
                found = function(*hosted, **named)
            if not to_device:
                return found
            return tuple(each.to(device) for each in found) if isinstance(found, tuple) else found.to(device)

        return on_host

    for name in ("chunk_and_pad_features", "get_valid_indices", "get_pool_indices"):
        setattr(used, name, computed(getattr(used, name), to_device=True))
    # Each layer splits its input at these.
    used.get_audio_cu_seqlens = computed(used.get_audio_cu_seqlens, to_device=False)
    encoder = used.Qwen2_5OmniAudioEncoder
    lengths = encoder._get_feat_extract_output_lengths

    def output_lengths(self: Any, input_lengths: torch.Tensor) -> Any:
        return computed(lambda each: lengths(self, each), to_device=True)(input_lengths)

    encoder._get_feat_extract_output_lengths = output_lengths


def sampled_tokens() -> None:
    """Let every row that ends its prompt or decodes sample `TOKEN`."""
    from vllm.v1.worker.gpu.async_utils import AsyncOutput
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    output: Any = AsyncOutput
    runner: Any = GPUModelRunner
    get_output, sample_tokens, init = output.get_output, runner.sample_tokens, output.__init__
    samples: list[Any] = [None]

    def noted_sample(self: Any, *arguments: Any, **named: Any) -> Any:
        batch = getattr(self.execute_model_state, "input_batch", None)
        samples[0] = None
        if batch is not None:
            rows = slice(batch.num_reqs)
            ended = batch.num_computed_prefill_tokens_np[rows] + batch.num_scheduled_tokens[rows]
            samples[0] = (ended >= batch.prefill_len_np[rows]) | ~batch.is_prefilling_np[rows]
        return sample_tokens(self, *arguments, **named)

    def noted_init(self: Any, *arguments: Any, **named: Any) -> None:
        init(self, *arguments, **named)
        self.null_samples = samples[0]

    def given_output(self: Any) -> Any:
        self.copy_event.synchronize()
        self.sampled_token_ids = np.full_like(self.sampled_token_ids, TOKEN)
        counts = np.ones_like(self.num_sampled_tokens_np)
        if self.null_samples is not None:
            counts[: len(self.null_samples)] = self.null_samples[: len(counts)]
        self.num_sampled_tokens_np = counts
        return get_output(self)

    output.get_output, output.__init__, runner.sample_tokens = given_output, noted_init, noted_sample
