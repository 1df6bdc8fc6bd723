"""Streaming decoder of Qwen3-Omni from codec frames to final audio samples, without recomputation.

For any division of an utterance into chunks, the joined samples equal those of Transformers' `Qwen3OmniMoeCode2Wav`
over the whole utterance, and their number is the same. (Transformers' `chunked_decode` drops `lookahead_samples` at
every chunk border.)
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from vllm_omni_ext.engine.graphs import Recorder
from vllm_omni_ext.model_plugins.qwen3_omni.vocoder_graphs import Filled, VocoderGraphs
from vllm_omni_ext.model_plugins.qwen3_omni.vocoder_layers import (
    Carry,
    CausalConv,
    CausalUpsample,
    ConvNeXtBlock,
    DecoderBlock,
    PreparedLayer,
    SnakeBeta,
    StatefulLayer,
    WindowTransformer,
)

DEFAULT_MAX_FRAMES_PER_PASS = 256
"""Most frames in one pass, over all streams. They determine the activation memory: with the released configuration in
float32, an activation has about 0.75 MB per frame, and about 6 activations are alive at the same time."""


@dataclass
class VocoderState:
    """The state of one stream: about 5 MB in float32 with the released configuration.

    Attributes:
        flat: `[numel]`, the concatenated states of all layers, in the model's dtype and on its device.
        frames: number of frames decoded so far, which is the position of the next frame.
        samples: number of samples returned so far.
        closed: the last chunk has been decoded.
    """

    flat: Tensor
    frames: int = 0
    samples: int = 0
    closed: bool = False


class Vocoder(nn.Module):
    """Transformer over codec frames, then upsampling convolutions down to single samples.

    Parameter names are those of a checkpoint's `code2wav.*` tensors without that prefix.

    Args:
        config: a checkpoint's `code2wav_config` (`Qwen3OmniMoeCode2WavConfig`).
        max_frames_per_pass: most frames in one pass, over all streams. Longer input is divided into slices of this
            length, so that memory does not grow with the length of the utterance or the number of streams.

    Attributes:
        groups: codes per frame.
        codebook_size: every code is in `0 .. codebook_size - 1`.
        total_upsample: samples per frame (1920 as released).
        lookahead_samples: number of samples of the last frames that are final only after more frames. Like
            Transformers, `decode` does not return them at the end of an utterance (555 as released).
    """

    def __init__(self, config: PretrainedConfig, *, max_frames_per_pass: int = DEFAULT_MAX_FRAMES_PER_PASS):
        super().__init__()
        if max_frames_per_pass < 1:
            raise ValueError(f"max_frames_per_pass: {max_frames_per_pass} must be at least 1")
        self.max_frames_per_pass = max_frames_per_pass
        self.groups = config.num_quantizers
        self.codebook_size = config.codebook_size
        dim = config.hidden_size
        channels = [config.decoder_dim // 2**i for i in range(len(config.upsample_rates) + 1)]

        self.pre_transformer = WindowTransformer(config)
        self.code_embedding = nn.Embedding(config.codebook_size * config.num_quantizers, dim)
        self.upsample = nn.ModuleList(
            nn.ModuleList([CausalUpsample(dim, dim, factor, factor), ConvNeXtBlock(dim)])
            for factor in config.upsampling_ratios
        )
        blocks = [DecoderBlock(channels[i], channels[i + 1], rate) for i, rate in enumerate(config.upsample_rates)]
        tail = [SnakeBeta(channels[-1]), CausalConv(channels[-1], 1, 7)]
        self.decoder = nn.ModuleList([CausalConv(dim, channels[0], 7), *blocks, *tail])

        self._prepared = False
        self._graphs: VocoderGraphs | None = None
        self._upsamplers = [layer for layer in self.modules() if isinstance(layer, CausalUpsample)]
        self._state_numel = self._lay_out_states()
        self.total_upsample = math.prod((*config.upsampling_ratios, *config.upsample_rates))
        steady = 1 + sum(layer.overlap for layer in self._upsamplers)
        self.lookahead_samples = steady * self.total_upsample - self.samples_after(steady)

    def prepare(self) -> None:
        """Precompute tensors from the weights; called once, when the weights are loaded and on their device."""
        if not self._prepared:
            for layer in self.modules():
                if isinstance(layer, PreparedLayer):
                    layer.prepare()
            self._prepared = True

    def new_state(self) -> VocoderState:
        """Return the state of a new stream, which is all zeros: they are the padding before the first input."""
        weight = self.code_embedding.weight
        return VocoderState(flat=torch.zeros(self._state_numel, dtype=weight.dtype, device=weight.device))

    def samples_after(self, frames: int) -> int:
        """Return the number of final samples after `frames` frames; also the length of a whole utterance."""
        count = frames
        for layer in self._upsamplers:
            count = layer.outputs_after(count)
        return count

    @torch.inference_mode()
    def decode(self, chunks: Sequence[Tensor], states: Sequence[VocoderState], last: Sequence[bool]) -> list[Tensor]:
        """Decode the next frames of several streams; streams with equal progress run as one batch.

        Args:
            chunks: for each stream `[frames, groups]` int64 codes, on any device; `frames` may differ and may be 0.
            states: the streams' states, updated in place; all different objects.
            last: whether the chunk ends its stream. The end adds no further samples (see `lookahead_samples`).

        Returns:
            for each stream `[samples]` float32 in [-1, 1] on the model's device: all samples that became final.

        Raises:
            ValueError: a chunk has the wrong shape, or a stream has already ended. No state was changed then.
        """
        self._check(chunks, states, last)
        self.prepare()
        device = self.code_embedding.weight.device
        home = device if self._graphs is None else "cpu"
        codes = [chunk.to(home, non_blocking=True) for chunk in chunks]
        done = [0] * len(chunks)
        pieces: list[list[Tensor]] = [[] for _ in chunks]
        while batches := self._batches([len(c) - d for c, d in zip(codes, done, strict=True)], states):
            for frames, members in batches:
                batch = torch.stack([codes[i][done[i] : done[i] + frames] for i in members])
                for i, wave in zip(members, self._advance(batch, [states[i] for i in members]), strict=True):
                    pieces[i].append(wave)
                    done[i] += frames
        for state, ends in zip(states, last, strict=True):
            state.closed = ends
        nothing = torch.empty(0, dtype=torch.float32, device=device)
        return [waves[0] if len(waves) == 1 else torch.cat([nothing, *waves]) for waves in pieces]

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Decode the first frames of a dummy stream, which compiles the kernels."""
        state, code = self.new_state(), torch.zeros(1, self.groups, dtype=torch.int64)
        for frames in (1, 2):
            self.decode([code.expand(frames, -1)], [state], [False])

    @torch.inference_mode()
    def record(self, recorder: Recorder, *, streams: int) -> None:
        """Record the passes of up to `streams` streams; from then on these passes run as graphs."""
        self.prepare()
        like, long = self.code_embedding.weight, 1 + sum(layer.overlap for layer in self._upsamplers)
        graphs = VocoderGraphs(
            self._pass, recorder, like=like, numel=self._state_numel, groups=self.groups, streams=streams
        )
        graphs.record(self._filled(0), self._filled(long))
        self._graphs = graphs

    def _lay_out_states(self) -> int:
        offset = 0
        for layer in self.modules():
            if isinstance(layer, StatefulLayer):
                layer.state_offset = offset
                offset += layer.state_numel
        return offset

    def _check(self, chunks: Sequence[Tensor], states: Sequence[VocoderState], last: Sequence[bool]) -> None:
        if not len(chunks) == len(states) == len(last):
            raise ValueError(f"{len(chunks)} chunks, {len(states)} states and {len(last)} end marks do not match")
        if len({id(state) for state in states}) != len(states):
            raise ValueError("the same stream is given twice in one call")
        for chunk, state in zip(chunks, states, strict=True):
            if chunk.ndim != 2 or chunk.shape[1] != self.groups:
                raise ValueError(f"codes of shape {tuple(chunk.shape)}; expected [frames, {self.groups}]")
            if state.closed:
                raise ValueError("the stream has ended; start a new one with new_state()")

    def _filled(self, frames: int) -> Filled:
        """Return, for each upsampling layer, how many of its kept inputs are real (not zeros) after `frames` frames."""
        filled = []
        for layer in self._upsamplers:
            filled.append(min(frames, layer.overlap))
            frames = layer.outputs_after(frames)
        return tuple(filled)

    def _batches(self, remaining: list[int], states: Sequence[VocoderState]) -> list[tuple[int, list[int]]]:
        """Return batches `(frames of each stream, stream indices)` for the next pass of the streams with frames left.

        Without CUDA graphs, the streams of a batch have at most `max_frames_per_pass` frames in all.

        Args:
            remaining: number of frames left of each stream.
        """
        alike: dict[tuple[int, Filled], list[int]] = defaultdict(list)
        for i, left in enumerate(remaining):
            if left > 0:
                filled = self._filled(states[i].frames)
                alike[self._frames_now(left, filled), filled].append(i)
        batches = []
        for (frames, filled), members in alike.items():
            width = max(1, self.max_frames_per_pass // frames)
            if self._graphs is not None:
                width = self._graphs.most_streams(frames, filled) or width
            batches += [(frames, members[i : i + width]) for i in range(0, len(members), width)]
        return batches

    def _frames_now(self, left: int, filled: Filled) -> int:
        """Return the number of frames in the next pass of a stream that has `left` frames to decode.

        It is the largest number with a CUDA graph. Without a graph, it is `left`, but at most `max_frames_per_pass`.
        """
        recorded = None if self._graphs is None else self._graphs.frames(left, filled)
        return recorded or min(left, self.max_frames_per_pass)

    def _advance(self, codes: Tensor, states: list[VocoderState]) -> list[Tensor]:
        """Decode the next codes `[B, T, groups]` of B streams, and update their states.

        Streams in one call have equal numbers of real inputs in the layers (`vocoder_graphs.Filled`).
        """
        filled = self._filled(states[0].frames)
        positions, flats = [s.frames for s in states], [s.flat for s in states]
        waves = None if self._graphs is None else self._graphs.run(codes, flats, positions, filled)
        if waves is None:
            flat = torch.stack(flats) if len(flats) > 1 else flats[0][None]
            codes = codes.to(flat.device)
            waves = self._pass(codes, flat, torch.tensor(positions, device=flat.device), filled)
            if len(flats) > 1:
                torch._foreach_copy_(flats, list(flat.unbind()))
        for state in states:
            state.frames += codes.shape[1]
            state.samples += waves.shape[1]
        return list(waves.unbind(0))

    def _pass(self, codes: Tensor, flat: Tensor, positions: Tensor, filled: Filled) -> Tensor:
        """Run one pass (`vocoder_graphs.Pass`): codes `[B, T, groups]` -> samples `[B, samples]` float32."""
        carry = Carry(flat, positions, dict(zip(self._upsamplers, filled, strict=True)))
        offsets = torch.arange(self.groups, device=codes.device) * self.codebook_size
        x = self.code_embedding(codes + offsets).mean(2)
        x = self.pre_transformer(x, carry).transpose(1, 2)
        for upsample, block in self.upsample:
            x = block(upsample(x, carry), carry)
        first, *blocks, activation, last = self.decoder
        x = first(x, carry)
        for block in blocks:
            x = block(x, carry)
        x = last(activation(x), carry)
        return x[:, 0].clamp(-1, 1).float()
