"""Small vocoders with random weights, and Transformers' decoder of the same weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from tests.support.oracle import one_thread
from vllm_omni_ext.model_plugins.qwen3_omni.vocoder import Vocoder
from vllm_omni_ext.wire.envelope import StageError, unpack
from vllm_omni_ext.wire.stage_input import PartHeader

TOLERANCE = 1e-5


def small_config(**changes: object) -> Qwen3OmniMoeCode2WavConfig:
    """A configuration that decodes hundreds of frames in well under a second."""
    fields: dict[str, object] = {
        "codebook_size": 32,
        "num_quantizers": 4,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "sliding_window": 6,
        "upsample_rates": (4, 3),
        "upsampling_ratios": (2, 2),
        "decoder_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    return Qwen3OmniMoeCode2WavConfig(**(fields | changes))


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Weights under which every path matters: layer scales and gammas near 1, biases and snakes away from 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith((".scale", ".gamma", "norm.weight")):
            parameter.data = 0.6 + 0.2 * noise
        elif parameter.ndim == 1:
            parameter.data = 0.2 * noise
        elif name.startswith("code_embedding"):
            parameter.data = noise
        else:
            parameter.data = 0.8 * noise / math.sqrt(parameter[0].numel())


def reference(config: Qwen3OmniMoeCode2WavConfig, seed: int = 0) -> Qwen3OmniMoeCode2Wav:
    """Transformers' decoder with random weights."""
    with one_thread():
        model = Qwen3OmniMoeCode2Wav(config).eval().float()
        randomize(model, seed)
        _set_loudness(model, 0.2)
    return model


@torch.inference_mode()
def _set_loudness(model: Qwen3OmniMoeCode2Wav, deviation: float) -> None:
    """Scale the last convolution: samples before the clamp have this standard deviation."""
    last = model.decoder[-1]
    unclamped: list[Tensor] = []
    hook = last.register_forward_hook(lambda module, inputs, output: unclamped.append(output))
    model(random_codes(model.config, 30, seed=0).T[None])
    hook.remove()
    for parameter in last.parameters():
        parameter.data = parameter.data * (deviation / unclamped[0].std())


def vocoder_like(model: Qwen3OmniMoeCode2Wav, **arguments: int) -> Vocoder:
    """This package's decoder with the same weights, loaded by name."""
    vocoder = Vocoder(model.config, **arguments).eval()
    vocoder.load_state_dict(model.state_dict())
    return vocoder


def random_codes(config: Qwen3OmniMoeCode2WavConfig, frames: int, seed: int) -> Tensor:
    """`[frames, groups]` int64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.codebook_size, (frames, config.num_quantizers), generator=generator)


@torch.inference_mode()
def expected(model: Qwen3OmniMoeCode2Wav, codes: Tensor) -> Tensor:
    """Transformers' unchunked decode of `[frames, groups]`: `[samples]`."""
    return model(codes.T[None])[0, 0]


def check_equal(actual: Tensor, wanted: Tensor) -> float:
    """Assert same length and values within `TOLERANCE`; return the largest difference."""
    assert actual.dtype == torch.float32
    assert actual.shape == wanted.shape
    difference = (actual - wanted).abs().max().item() if wanted.numel() else 0.0
    assert difference <= TOLERANCE
    return difference


def header(stream: str, part: int, last: bool, empty: bool = False) -> PartHeader:
    return PartHeader(stream=stream, part=part, last=last, empty=empty)


def refusal(answer: Tensor) -> str | None:
    """The reason of a stage error; None for sound."""
    message = unpack(answer)
    return message.reason if isinstance(message, StageError) else None
