"""Layers of the streaming vocoder: each layer processes the next inputs of a stream, and keeps state for later inputs.

Every layer computes over all calls what its counterpart in Transformers' `modeling_qwen3_omni_moe.py` computes over a
whole utterance. Parameter names are the same. In shapes, B is streams, C channels, and T new positions of this call.

All state of a stream is one flat vector (`Vocoder.new_state`); a stateful layer owns a slice of it. A batch of streams
is therefore one `[B, numel]` tensor, for any number of layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.activations import ACT2FN

from vllm_omni_ext.model_plugins.qwen3_omni.code_predictor import merge


class PreparedLayer(nn.Module):
    """A layer that precomputes tensors from its weights."""

    def prepare(self) -> None:
        """Precompute tensors; `Vocoder.prepare` calls this once, after the weights are loaded on their device."""
        raise NotImplementedError


class StatefulLayer(nn.Module):
    """A layer with a state of shape `state_shape` for each stream; `Vocoder` sets its offset in the flat state."""

    state_shape: tuple[int, ...]
    state_offset: int = 0

    @property
    def state_numel(self) -> int:
        """Number of elements of a stream's state."""
        return math.prod(self.state_shape)


@dataclass
class Carry:
    """The states of the streams of one batch, read and updated in place while the layers run.

    Attributes:
        flat: `[B, numel]`, the streams' states in the model's dtype.
        positions: `[B]` int64, number of frames of each stream that were decoded before this call.
        filled: for each upsampling layer with overlap, the number of kept inputs that are not zeros before the start of
            the stream (the same for all B).
    """

    flat: Tensor
    positions: Tensor
    filled: dict[nn.Module, int] = field(default_factory=dict)

    def read(self, layer: StatefulLayer) -> Tensor:
        """Return the state of `layer` as a view `[B, *state_shape]`; `write` changes it."""
        piece = self.flat[:, layer.state_offset : layer.state_offset + layer.state_numel]
        return piece.unflatten(1, layer.state_shape)

    def write(self, layer: StatefulLayer, value: Tensor) -> None:
        """Replace the state of `layer` by `value` `[B, *state_shape]`, which must not be a view of the old state."""
        self.read(layer).copy_(value)


class CausalConv(StatefulLayer):
    """Convolution over an input and the `(kernel - 1) * dilation` inputs before it; zeros precede a stream's start."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, *, dilation: int = 1, groups: int = 1):
        super().__init__()
        self.conv = nn.Conv1d(in_channels, out_channels, kernel, dilation=dilation, groups=groups)
        self.history = (kernel - 1) * dilation
        self.state_shape = (in_channels, self.history)

    def forward(self, x: Tensor, carry: Carry) -> Tensor:
        """Compute `[B, in, T]` -> `[B, out, T]`."""
        if x.shape[-1] == 0:
            return x.new_empty(x.shape[0], self.conv.out_channels, 0)
        if self.history:
            x = torch.cat((carry.read(self), x), dim=-1)
            carry.write(self, x[..., x.shape[-1] - self.history :])
        return self.conv(x)


class CausalUpsample(StatefulLayer):
    """Transposed convolution that returns only final outputs, which later inputs do not change.

    A block of `stride` outputs depends on one input and the `overlap` inputs before it. Transformers trims
    `kernel - stride` outputs on both sides of the utterance, so the first `overlap` inputs give no block of their own.
    L inputs in total give `(L - overlap) * stride` outputs; no outputs remain at the end.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int):
        super().__init__()
        if kernel % stride:
            raise ValueError(f"a transposed convolution of kernel {kernel} and stride {stride} cannot be streamed")
        self.conv = nn.ConvTranspose1d(in_channels, out_channels, kernel, stride=stride)
        self.stride = stride
        self.overlap = kernel // stride - 1
        self.state_shape = (in_channels, self.overlap)

    def outputs_after(self, inputs: int) -> int:
        """Return the number of outputs after `inputs` inputs in total."""
        return max(0, inputs - self.overlap) * self.stride

    def forward(self, x: Tensor, carry: Carry) -> Tensor:
        """Compute `[B, in, T]` -> `[B, out, T * stride]`, with fewer outputs at the start of a stream."""
        if self.overlap:
            kept = torch.cat((carry.read(self), x), dim=-1)
            carry.write(self, kept[..., kept.shape[-1] - self.overlap :])
            x = kept[..., self.overlap - carry.filled[self] :]
        inputs = x.shape[-1]
        if inputs <= self.overlap:
            return x.new_empty(x.shape[0], self.conv.out_channels, 0)
        return self.conv(x)[..., self.overlap * self.stride : inputs * self.stride]


class ConvNeXtBlock(nn.Module):
    """Depthwise causal convolution and a pointwise MLP, added to the input with a learnt weight per channel."""

    def __init__(self, dim: int):
        super().__init__()
        self.dwconv = CausalConv(dim, dim, 7, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1 = nn.Linear(dim, 4 * dim)
        self.pwconv2 = nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor, carry: Carry) -> Tensor:
        """Compute `[B, dim, T]` -> `[B, dim, T]`."""
        y = self.norm(self.dwconv(x, carry).transpose(1, 2))
        y = self.pwconv2(F.gelu(self.pwconv1(y)))
        return torch.addcmul(x, self.gamma[:, None], y.transpose(1, 2))


class SnakeBeta(PreparedLayer):
    """Activation `x + sin(x * e^alpha)^2 / e^beta`, per channel (https://huggingface.co/papers/2006.08195)."""

    EPSILON = 1e-9

    def __init__(self, channels: int):
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(channels))
        self.beta = nn.Parameter(torch.zeros(channels))

    def prepare(self) -> None:
        """Precompute frequencies and weights `[channels, 1]`."""
        self._frequency = self.alpha.detach().exp()[:, None]
        self._weight = (1.0 / (self.beta.detach().exp() + self.EPSILON))[:, None]

    def forward(self, x: Tensor) -> Tensor:
        """Compute `[B, channels, T]` -> `[B, channels, T]`."""
        return torch.addcmul(x, self._weight, (x * self._frequency).sin_().square_())


class ResidualUnit(nn.Module):
    """Dilated causal convolution with a residual path."""

    def __init__(self, dim: int, dilation: int):
        super().__init__()
        self.act1 = SnakeBeta(dim)
        self.conv1 = CausalConv(dim, dim, 7, dilation=dilation)
        self.act2 = SnakeBeta(dim)
        self.conv2 = CausalConv(dim, dim, 1)

    def forward(self, x: Tensor, carry: Carry) -> Tensor:
        """Return `x` plus its two convolutions, `[B, dim, T]`; `carry` has the inputs before `x`, and is updated."""
        return x + self.conv2(self.act2(self.conv1(self.act1(x), carry)), carry)


class DecoderBlock(nn.Module):
    """Upsampling by `rate` to half the channels, followed by three residual units with dilations 1, 3 and 9."""

    DILATIONS = (1, 3, 9)

    def __init__(self, in_channels: int, out_channels: int, rate: int):
        super().__init__()
        units = [ResidualUnit(out_channels, dilation) for dilation in self.DILATIONS]
        upsample = CausalUpsample(in_channels, out_channels, 2 * rate, rate)
        self.block = nn.ModuleList([SnakeBeta(in_channels), upsample, *units])

    def forward(self, x: Tensor, carry: Carry) -> Tensor:
        """Compute `[B, in, T]` -> `[B, out, T * rate]`, with fewer outputs at the start of a stream."""
        activation, *stateful = self.block
        x = activation(x)
        for layer in stateful:
            x = layer(x, carry)
        return x


class LayerScale(nn.Module):
    """Scales a residual branch by a learnt weight per channel."""

    def __init__(self, dim: int):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor, branch: Tensor) -> Tensor:
        """Return `x` plus the scaled branch, `[..., dim]` each."""
        return torch.addcmul(x, self.scale, branch)


def rotary(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the rotary embedding, `[B, 1, T, head_dim]` each, for `positions` `[B, T]`.

    The first half of the sines is negated, as `rotate` needs it.
    """
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device)
    angles = (positions[..., None].float() * (1.0 / (theta ** (steps / head_dim))))[:, None]
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply a rotary embedding to `[B, heads, T, head_dim]`."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def window_mask(positions: Tensor, new: int, window: int) -> Tensor:
    """Return the attention mask, bool `[B, 1, new, window - 1 + new]`: True where a query attends to a key.

    The keys are the `window - 1` kept positions, followed by the `new` positions. A query attends to itself and the
    `window - 1` positions before it (Transformers: `kv > query - window`). Positions before a stream's start are
    masked: `positions` `[B]` frames of each stream were decoded before this call.
    """
    device = positions.device
    query = torch.arange(new, device=device)[:, None]
    key = torch.arange(window - 1 + new, device=device)[None]
    band = (key >= query) & (key <= query + window - 1)
    exists = key >= (window - 1 - positions)[:, None]
    return (band[None] & exists[:, None])[:, None]


class WindowAttention(StatefulLayer, PreparedLayer):
    """Causal sliding-window attention; keeps the rotated keys and the values of the last `window - 1` positions."""

    def __init__(self, config: PretrainedConfig):
        super().__init__()
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head_dim = attention_head_dim(config)
        self.kept = config.sliding_window - 1
        dim, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(dim, self.heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(dim, self.kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(dim, self.kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, dim, bias=bias)
        self.state_shape = (2, self.kv_heads, self.kept, self.head_dim)

    def prepare(self) -> None:
        parts = (self.q_proj, self.k_proj, self.v_proj)
        self._qkv = merge([part.weight for part in parts])
        self._qkv_bias = None if self.q_proj.bias is None else merge([part.bias for part in parts])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, carry: Carry) -> Tensor:
        """Compute `[B, T, dim]` -> `[B, T, dim]`."""
        merged = F.linear(x, self._qkv, self._qkv_bias).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        query, key, value = merged.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        both = torch.cat((carry.read(self), torch.stack((key, value), dim=1)), dim=3)
        if self.kept:
            carry.write(self, both[..., both.shape[3] - self.kept :, :])
        groups = self.heads // self.kv_heads
        if groups > 1:
            both = both.repeat_interleave(groups, dim=2)
        out = F.scaled_dot_product_attention(query, both[:, 0], both[:, 1], attn_mask=mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class GatedMlp(PreparedLayer):
    """Gated MLP: `down(act(gate(x)) * up(x))`."""

    def __init__(self, config: PretrainedConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act = ACT2FN[config.hidden_act]

    def prepare(self) -> None:
        self._gate_up = merge([self.gate_proj.weight, self.up_proj.weight])

    def forward(self, x: Tensor) -> Tensor:
        """Compute `[..., dim]` -> `[..., dim]`."""
        gate, up = F.linear(x, self._gate_up).chunk(2, dim=-1)
        return self.down_proj(self.act(gate) * up)


class TransformerLayer(nn.Module):
    """Pre-norm attention and MLP, both residual branches with a layer scale."""

    def __init__(self, config: PretrainedConfig):
        super().__init__()
        self.self_attn = WindowAttention(config)
        self.mlp = GatedMlp(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn_layer_scale = LayerScale(config.hidden_size)
        self.mlp_layer_scale = LayerScale(config.hidden_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, carry: Carry) -> Tensor:
        """Compute `[B, T, dim]` -> `[B, T, dim]`."""
        x = self.self_attn_layer_scale(x, self.self_attn(self.input_layernorm(x), cos, sin, mask, carry))
        return self.mlp_layer_scale(x, self.mlp(self.post_attention_layernorm(x)))


class WindowTransformer(nn.Module):
    """The sliding-window transformer whose output is upsampled."""

    def __init__(self, config: PretrainedConfig):
        super().__init__()
        self.layers = nn.ModuleList([TransformerLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.window = config.sliding_window
        self.head_dim = attention_head_dim(config)
        self.theta = rope_theta(config)

    def forward(self, x: Tensor, carry: Carry) -> Tensor:
        """Compute `[B, T, dim]` -> `[B, T, dim]`."""
        new = x.shape[1]
        positions = carry.positions[:, None] + torch.arange(new, device=x.device)
        cos, sin = rotary(positions, self.head_dim, self.theta, x.dtype)
        mask = window_mask(carry.positions, new, self.window)
        for layer in self.layers:
            x = layer(x, cos, sin, mask, carry)
        return self.norm(x)


def attention_head_dim(config: PretrainedConfig) -> int:
    """Return the head size: the config's own field if it has one, else hidden size over heads."""
    explicit = config.to_dict().get("head_dim")
    return explicit or config.hidden_size // config.num_attention_heads


def rope_theta(config: PretrainedConfig) -> float:
    """Return the base of the rotary embedding; ValueError for scaled kinds of RoPE."""
    rope = config.rope_parameters
    if rope["rope_type"] != "default":
        raise ValueError(f"code2wav_config.rope_parameters.rope_type: {rope['rope_type']!r} is not supported")
    return float(rope["rope_theta"])
