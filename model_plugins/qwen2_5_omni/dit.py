"""The diffusion transformer of token2wav: converts the codes of an utterance to mel frames, block by block.

Transformers solves the flow-matching equation for a whole utterance, in 36 evaluations of the transformer
(`solver.py`). In each evaluation, every layer attends to the position's own block of `block_size` mel frames; some
layers also attend to the block before (`look_backward_layers`) or after (`look_ahead_layers`). For one evaluation of a
block, the transformer therefore needs as many later blocks as it has layers that look ahead, and no more.

Here a block enters an evaluation when it has left the preceding evaluation, and waits at a layer that looks ahead until
the next block arrives there. Each block is computed once for each evaluation and layer, and the results equal those
over the whole utterance, up to the rounding of float32. A block is final when `evaluations * delay` later blocks have
arrived, or the utterance has ended.

In shapes, `blocks` is the blocks of any number of utterances that are computed together, and `rows` is 2 for the
predictions with and without conditions (codes and speaker), or 1 without guidance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniToken2WavDiTModel,
    deinterleave_head_dim,
    rotate_half,
)
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_omni_ext.engine.graphs import Recorder
from vllm_omni_ext.model_plugins.qwen2_5_omni.dit_graphs import DiTGraphs
from vllm_omni_ext.model_plugins.qwen2_5_omni.facts import FRAMES_IN_FLIGHT
from vllm_omni_ext.model_plugins.qwen2_5_omni.solver import STAGES, Solver

MOST_TIMES = 2
"""Schedules of times whose modulations are kept: 19 MiB each in the released shape with 10 times, 103 with 50."""


@dataclass(frozen=True)
class Voice:
    """The transformer's inputs that depend on the speaker.

    Attributes:
        speaker: embedding of the speaker, [width].
        reference: encoder outputs [2, width] for the speaker's reference spectrogram, and for zeros in its place (for
            the prediction without conditions).
    """

    speaker: Tensor
    reference: Tensor


@dataclass(eq=False)
class Block:
    """Consecutive mel frames of an utterance.

    Attributes:
        first: position of the first frame.
        length: number of frames; the last block of an utterance may have fewer than `block_size`.
        condition: embeddings of reference, codes and speaker, concatenated, [rows, block_size, width].
        value: solution at the beginning of the current step, [block_size, mel].
        point: input of the next evaluation, [block_size, mel].
        slopes: velocities of the current step so far.
    """

    first: int
    length: int
    condition: Tensor
    value: Tensor
    point: Tensor
    slopes: list[Tensor] = field(default_factory=list)


@dataclass(eq=False)
class _AtLayer:
    """State of one utterance at one layer of one evaluation.

    Attributes:
        waiting: blocks that wait at the layer, because the next block of the utterance has not arrived.
        hidden: hidden states of these blocks [blocks, rows, block_size, hidden]; None if no block waits.
        before: keys and values of the last block that has left the layer, [2, rows, heads, block_size, head_dim].
    """

    waiting: list[Block] = field(default_factory=list)
    hidden: Tensor | None = None
    before: Tensor | None = None


@dataclass(frozen=True)
class _Place:
    """Tensors that depend only on the positions and lengths of blocks, for all layers of an evaluation.

    Attributes:
        numbers: `Block.first` and `Block.length` of each block.
        cos, sin: rotary cosines and sines [blocks, block_size, head_dim].
        exists: bool [blocks, block_size]; False for padding after the last frame of an utterance.
    """

    numbers: tuple[tuple[int, int], ...]
    cos: Tensor
    sin: Tensor
    exists: Tensor


class DiTState:
    """State of one utterance between its parts.

    Args:
        voice: speaker of the utterance.
        solver: parameters of the equation.
        seed: seed of the noise from which the equation starts.
    """

    def __init__(self, voice: Voice, solver: Solver, seed: int) -> None:
        self.voice = voice
        self.solver = solver
        self.noise = torch.Generator().manual_seed(seed)
        self.codes = torch.zeros(0, dtype=torch.int64)
        self.frames = 0
        self.layers: dict[tuple[int, int], _AtLayer] = {}

    def move(self, device: torch.device) -> None:
        """Move the tensors of all layers, and of the blocks that wait there, to a device."""
        for layer in self.layers.values():
            layer.hidden = None if layer.hidden is None else layer.hidden.to(device)
            layer.before = None if layer.before is None else layer.before.to(device)
            for block in layer.waiting:
                block.condition, block.value = block.condition.to(device), block.value.to(device)
                block.point, block.slopes = block.point.to(device), [slope.to(device) for slope in block.slopes]

    def at(self, evaluation: int, layer: int) -> _AtLayer:
        return self.layers.setdefault((evaluation, layer), _AtLayer())


class StreamingDiT:
    """Solves the equation of several utterances block by block.

    Args:
        config: a checkpoint's `token2wav_config.dit_config`.

    Attributes:
        model: Transformers' module, which has the weights; its parameter names are those of a checkpoint.
        delay: number of later blocks that a block needs in each evaluation.
    """

    def __init__(self, config: Any) -> None:
        if config.block_size % config.repeats:
            raise ValueError(
                f"dit_config: blocks of {config.block_size} mel frames are no whole number of codes of {config.repeats}"
            )
        self.model = Qwen2_5OmniToken2WavDiTModel(config)
        self.codes = config.num_embeds + 1
        self.repeats = config.repeats
        self.block = config.block_size
        self.mel = config.mel_dim
        self.heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.ahead = frozenset(config.look_ahead_layers) & frozenset(range(config.num_hidden_layers))
        self.backward = frozenset(config.look_backward_layers)
        self.delay = len(self.ahead)
        self._runs = tuple(self._divided(config.num_hidden_layers))
        self._modulations: dict[tuple[int, float], list[tuple[Tensor, Tensor]]] = {}
        """By schedule of times; the one used last is the last one."""
        self._placed: _Place | None = None
        self._graphs: DiTGraphs | None = None

    @property
    def device(self) -> torch.device:
        return self.model.proj_out.weight.device

    def _divided(self, layers: int) -> Iterator[range]:
        """Yield runs of consecutive layer numbers: one layer that attends to other blocks, or several that do not."""
        for _, run in groupby(range(layers), lambda number: number if self._neighbours(number) else None):
            numbers = list(run)
            yield range(numbers[0], numbers[-1] + 1)

    @torch.inference_mode()
    def record(self, recorder: Recorder) -> None:
        """Record the runs of layers that attend to no other block as CUDA graphs, which `decode` then replays.

        The graphs are for evaluations with guidance only.
        """
        like = torch.zeros(1, 2, self.block, self.model.hidden_size, device=self.device)
        runs = [run for run in self._runs if not self._neighbours(run[0])]
        layers = len(self.model.transformer_blocks)
        graphs = DiTGraphs(self._through, recorder, runs=runs, like=like, head_dim=self.head_dim, layers=layers)
        graphs.record()
        self._graphs = graphs

    def voice(self, speaker: Tensor, reference: Tensor) -> Voice:
        """Return a speaker's `Voice` from its embedding [1, width] and its reference spectrogram [1, frames, mel]."""
        encoder = self.model.input_embed.spk_encoder
        both = torch.cat([reference, torch.zeros_like(reference)])
        return Voice(speaker[0], encoder(both))

    def decode(self, codes: Sequence[Tensor], states: Sequence[DiTState], lasts: Sequence[bool]) -> list[Tensor]:
        """Add codes to utterances; return for each utterance the mel frames that became final, [frames, mel].

        Args:
            codes: for each utterance its new codes, int64 [n]; n may be 0.
            states: state of each utterance, updated in place.
            lasts: for each utterance whether no codes follow.
        """
        found: list[list[Tensor]] = [[torch.zeros(0, self.mel, device=self.device)] for _ in states]
        for some in self._passes(codes, states, lasts):
            groups: dict[Solver, list[int]] = {}
            for i in some:
                groups.setdefault(states[i].solver, []).append(i)
            for solver, members in groups.items():
                ends = [some[i][1] for i in members]
                blocks = [self._blocks(some[i][0], states[i], some[i][1]) for i in members]
                solved = self._solve(solver, [states[i] for i in members], blocks, ends)
                for i, done in zip(members, solved, strict=True):
                    found[i] += [block.value[: block.length] for block in done]
        return [torch.cat(pieces) for pieces in found]

    def _passes(
        self, codes: Sequence[Tensor], states: Sequence[DiTState], lasts: Sequence[bool]
    ) -> Iterator[dict[int, tuple[Tensor, bool]]]:
        """Divide the codes of a call into passes of at most `FRAMES_IN_FLIGHT` mel frames, for which memory is planned.

        An utterance may exceed this size alone, if it ends after very many evaluations.

        Yields:
            by the index of the utterance: codes, and whether no codes follow. The utterances of the preceding pass must
            have been computed.
        """
        size, room = self.block // self.repeats, max(1, FRAMES_IN_FLIGHT // self.block)
        left = dict(enumerate(codes))
        while left:
            free, some = room, dict[int, tuple[Tensor, bool]]()
            for i, more in list(left.items()):
                waiting = self.delay * (states[i].solver.evaluations if lasts[i] else 1)
                new = -(-(len(states[i].codes) + len(more)) // size)
                blocks = new + min(waiting, states[i].frames // self.block)
                if blocks > free and some:
                    continue
                if blocks > free and new > 1:  # the utterance alone, in several passes
                    stop = max(1, min(new - 1, room - self.delay)) * size - len(states[i].codes)
                    some[i], left[i] = (more[:stop], False), more[stop:]
                    break
                some[i] = left.pop(i), lasts[i]
                free -= blocks
            yield some

    def _blocks(self, codes: Tensor, state: DiTState, last: bool) -> list[Block]:
        """Add codes to an utterance; return its new blocks, whose values are noise.

        Codes of an incomplete block are kept in `state`. If no codes follow (`last`), they are a shorter last block.
        """
        size = self.block // self.repeats
        state.codes = torch.cat([state.codes, codes.cpu()])
        count = -(-len(state.codes) // size) if last else len(state.codes) // size
        taken, state.codes = state.codes[: count * size], state.codes[count * size :]
        if not count:
            return []
        lengths = [self.repeats * len(piece) for piece in taken.split(size)]
        noise = torch.randn(sum(lengths), self.mel, generator=state.noise).to(self.device)
        padded = F.pad(taken, (0, count * size - len(taken))).to(self.device).view(count, size)
        conditions = self._conditions(padded, state)
        blocks = []
        for length, rows, condition in zip(lengths, noise.split(lengths), conditions, strict=True):
            start = F.pad(rows, (0, 0, 0, self.block - length))
            blocks.append(Block(state.frames, length, condition, start, start))
            state.frames += length
        return blocks

    def _conditions(self, codes: Tensor, state: DiTState) -> Tensor:
        """Return `Block.condition` of new blocks of an utterance, [blocks, rows, block_size, width].

        Args:
            codes: codes of each block, int64 [blocks, codes of a block].
        """
        embed, voice = self.model.text_embed.codec_embed, state.voice
        rows = 2 if state.solver.guided else 1
        spoken = [embed(codes), embed(torch.zeros_like(codes))][:rows]
        code_rows = torch.stack(spoken, dim=1).repeat_interleave(self.repeats, dim=2)
        speakers = torch.stack([voice.speaker, torch.zeros_like(voice.speaker)])[:rows]
        shape = (len(codes), rows, self.block, -1)
        wide = [each[None, :, None].expand(shape) for each in (voice.reference[:rows], speakers)]
        return torch.cat([wide[0], code_rows, wide[1]], dim=-1)

    def _solve(
        self, solver: Solver, states: Sequence[DiTState], blocks: list[list[Block]], lasts: Sequence[bool]
    ) -> list[list[Block]]:
        """Compute all evaluations that new blocks make possible; return the blocks that became final.

        The arguments, except `solver`, and the result have one entry for each utterance.
        """
        for evaluation in range(solver.evaluations):
            ending = any(lasts) and bool(self.ahead)  # blocks that wait at a layer leave it at the end
            if not (ending or any(blocks)):
                return blocks
            blocks = self._evaluate(evaluation, solver, states, blocks, lasts)
            for block in (each for some in blocks for each in some):
                block.point = solver.advance(evaluation, block.value, block.slopes)
                if len(block.slopes) == STAGES:
                    block.value, block.slopes = block.point, []
        return blocks

    def _evaluate(
        self,
        evaluation: int,
        solver: Solver,
        states: Sequence[DiTState],
        blocks: list[list[Block]],
        lasts: Sequence[bool],
    ) -> list[list[Block]]:
        """Compute one evaluation of the transformer, and append the velocity of each block that completes it.

        Args:
            blocks: for each utterance the blocks that enter the evaluation.

        Returns:
            for each utterance the blocks that have left the last layer; each has one more entry in `slopes`.
        """
        modulation, final = self._modulated(solver)[evaluation]
        new = [block for some in blocks for block in some]
        rows = 2 if solver.guided else 1
        hidden = torch.zeros(0, rows, self.block, self.model.hidden_size, device=self.device)
        if new:
            points = torch.stack([block.point for block in new])[:, None].expand(-1, rows, -1, -1)
            conditions = torch.stack([block.condition for block in new])
            hidden = self.model.input_embed.proj(torch.cat([points, conditions], dim=-1))
        for run in self._runs:
            if self._neighbours(number := run[0]):
                kept = [state.at(evaluation, number) for state in states]
                blocks, hidden = self._attending(number, modulation[number], kept, blocks, hidden, lasts)
            elif any(blocks):
                hidden = self._alone(run, modulation, blocks, hidden)
        left = [block for some in blocks for block in some]
        if left:
            velocities = self.model.proj_out(_normed(self.model.norm_out.norm, hidden, *final))
            slopes = solver.combined(velocities[:, 0], velocities[:, 1]) if rows == 2 else velocities[:, 0]
            for block, slope in zip(left, slopes, strict=True):
                block.slopes.append(slope)
        return blocks

    def _neighbours(self, number: int) -> bool:
        return number in self.ahead or number in self.backward

    def _alone(self, run: range, modulation: Tensor, blocks: list[list[Block]], hidden: Tensor) -> Tensor:
        """Apply a run of layers that attend to no other block, by a CUDA graph if possible; return hidden states."""
        every = [block for some in blocks for block in some]
        place = self._place(every)
        given = run, hidden, place.cos, place.sin
        graphs = self._graphs if hidden.shape[1] == 2 else None  # they are of guided evaluations
        if graphs is not None and (replayed := graphs.replay(*given, place.exists, modulation)) is not None:
            return replayed
        whole = all(block.length == self.block for block in every)
        return self._through(*given, None if whole else place.exists, modulation)

    def _through(
        self, run: range, hidden: Tensor, cos: Tensor, sin: Tensor, exists: Tensor | None, modulation: Tensor
    ) -> Tensor:
        """Apply a run of layers that attend to no other block; return hidden states.

        The arguments are those of `dit_graphs.Through`; `exists` is None if all frames exist.
        """
        mask = None if exists is None else exists[:, None, None, None]
        for number in run:
            layer = self.model.transformer_blocks[number]
            query, keys, values = self._projected(layer, modulation[number], hidden, cos, sin)
            attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
            hidden = _after(layer, modulation[number], hidden, attended)
        return hidden

    def _attending(
        self,
        number: int,
        modulation: Tensor,
        kept: Sequence[_AtLayer],
        blocks: list[list[Block]],
        hidden: Tensor,
        lasts: Sequence[bool],
    ) -> tuple[list[list[Block]], Tensor]:
        """Apply a layer that attends to other blocks; return the blocks that leave it, and their hidden states.

        Args:
            number: number of the layer.
            modulation: shift, scale plus 1 and gate of the attention, then of the MLP, [6, hidden].
            kept: state of each utterance at this layer, updated in place.
            blocks: for each utterance the blocks that arrive at the layer.
            hidden: hidden states of all these blocks.
            lasts: for each utterance whether no codes follow.
        """
        if number in self.ahead:
            blocks, hidden = _with_waiting(kept, blocks, hidden)
        every = [block for some in blocks for block in some]
        if not every:
            return blocks, hidden
        layer, place = self.model.transformer_blocks[number], self._place(every)
        projected = self._projected(layer, modulation, hidden, place.cos, place.sin)
        leaving, picked, attended = self._attend_over(number, kept, blocks, *projected, lasts)
        if number in self.ahead:
            _wait(kept, blocks, leaving, hidden)
            hidden = hidden[picked]
        if not any(leaving):
            return leaving, hidden
        return leaving, _after(layer, modulation, hidden, attended)

    def _projected(
        self, layer: Any, modulation: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return a layer's queries, keys and values, each [blocks, rows, heads, block_size, head_dim].

        As in Transformers, only the first head of queries and keys has rotary embeddings.
        """
        normed, attention = _normed(layer.attn_norm.norm, hidden, modulation[1], modulation[0]), layer.attn
        heads = [
            project(normed).unflatten(-1, (self.heads, self.head_dim)).transpose(2, 3)
            for project in (attention.to_q, attention.to_k, attention.to_v)
        ]
        first = deinterleave_head_dim(torch.cat([each[:, :, 0] for each in heads[:2]], dim=1))
        rotated = first * cos[:, None] + rotate_half(first) * sin[:, None]
        for whole, part in zip(heads[:2], rotated.chunk(2, dim=1), strict=True):
            whole[:, :, 0] = part
        return heads[0], heads[1], heads[2]

    def _place(self, blocks: Sequence[Block]) -> _Place:
        """Return the `_Place` of blocks. The last result is kept, since most successive layers have the same blocks."""
        numbers = tuple((block.first, block.length) for block in blocks)
        if self._placed is None or self._placed.numbers != numbers:
            firsts, lengths = async_tensor_h2d(list(numbers), self.device).T[:, :, None]
            offsets = torch.arange(self.block, device=self.device)
            cos, sin = self.model.rotary_embed(self.model.proj_out.weight, firsts + offsets)
            self._placed = _Place(numbers, cos, sin, offsets < lengths)
        return self._placed

    def _attend_over(
        self,
        number: int,
        kept: Sequence[_AtLayer],
        blocks: list[list[Block]],
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        lasts: Sequence[bool],
    ) -> tuple[list[list[Block]], Tensor, Tensor]:
        """Compute the attention of a layer that attends to neighbouring blocks.

        A block is computed (leaves the layer) when the blocks that it attends to have arrived; others wait.

        Args:
            number: index of the layer.
            kept: state of each utterance at the layer, with keys and values of its last computed block.
            blocks: for each utterance the blocks that have arrived at the layer and were not computed yet.
            query, keys, values: those of all these blocks, as `_projected` returns them.

        Returns:
            for each utterance the blocks that leave the layer; their indices among all blocks; their attention outputs
            [leaving blocks, rows, heads, block_size, head_dim].
        """
        every = [block for some in blocks for block in some]
        both = torch.stack([keys, values], dim=1)  # [blocks, 2, rows, heads, block_size, head_dim]
        exists = self._place(every).exists
        held = [each.before for each in kept if each.before is not None]
        if held:
            both = torch.cat([both, torch.stack(held)])
            exists = torch.cat([exists, exists.new_ones(len(held), self.block)])
        none, stored = len(both), len(every)  # the row of a missing block is the one after all others
        both = F.pad(both, (0, 0) * 5 + (0, 1))
        exists = F.pad(exists, (0, 0, 0, 1))
        leaving: list[list[Block]] = []
        own: list[int] = []
        around: list[list[int]] = []
        row = 0
        for state, some, last in zip(kept, blocks, lasts, strict=True):
            count = len(some) if last or number not in self.ahead else len(some) - 1
            before = none
            if state.before is not None:
                before, stored = stored, stored + 1
            for i in range(max(count, 0)):
                at = row + i
                beside = [before if i == 0 else at - 1] if number in self.backward else []
                beside.append(at)
                if number in self.ahead:
                    beside.append(at + 1 if i + 1 < len(some) else none)
                own.append(at)
                around.append(beside)
            if count > 0 and number in self.backward:
                state.before = both[row + count - 1].clone()
            leaving.append(some[: max(count, 0)])
            row += len(some)
        picked = async_tensor_h2d(own, self.device, torch.int64)
        if not own:
            return leaving, picked, query[:0]
        where = async_tensor_h2d(around, self.device)
        near = both[where].movedim(1, 4).flatten(4, 5)  # [leaving, 2, rows, heads, neighbours * block_size, head_dim]
        mask = exists[where].flatten(1)[:, None, None, None]
        return leaving, picked, F.scaled_dot_product_attention(query[picked], near[:, 0], near[:, 1], attn_mask=mask)

    def _modulated(self, solver: Solver) -> list[tuple[Tensor, Tensor]]:
        """Return the modulations of each evaluation, which depend on its time alone.

        Those of the last `MOST_TIMES` schedules of times are kept: each request may set another schedule.

        Returns:
            for each evaluation a pair: shifts, scales plus 1 and gates of attention and MLP of all layers, [layers, 6,
            hidden]; and scale plus 1 and shift of the output norm, [2, hidden].
        """
        schedule = solver.num_steps, solver.sway_coefficient
        found = self._modulations.pop(schedule, None)
        if found is None:
            times = self.model.time_embed(solver.times().to(self.device))
            by_layer = [
                layer.attn_norm.linear(layer.attn_norm.silu(times)).unflatten(1, (6, -1))
                for layer in self.model.transformer_blocks
            ]
            layers = torch.stack(by_layer, dim=1)
            layers[:, :, 1::3] += 1
            out = self.model.norm_out
            scale, shift = out.linear(out.silu(times)).chunk(2, dim=1)
            found = list(zip(layers, torch.stack([1 + scale, shift], dim=1), strict=True))
            while len(self._modulations) >= MOST_TIMES:
                del self._modulations[next(iter(self._modulations))]
        self._modulations[schedule] = found
        return found


def _normed(norm: Any, hidden: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return the normed hidden states, scaled and shifted in the same kernel."""
    return F.layer_norm(hidden, norm.normalized_shape, scale, shift, norm.eps)


def _after(layer: Any, modulation: Tensor, hidden: Tensor, attended: Tensor) -> Tensor:
    """Return a layer's output from its attention: output projection, residual paths and MLP.

    Args:
        modulation: see `StreamingDiT._attending`.
        hidden: the layer's input.
        attended: the attention's output [blocks, rows, heads, block_size, head_dim].
    """
    joined = attended.transpose(2, 3).flatten(3)
    hidden = torch.addcmul(hidden, modulation[2], layer.attn.to_out[0](joined))
    normed = _normed(layer.ff_norm, hidden, modulation[4], modulation[3])
    return torch.addcmul(hidden, modulation[5], layer.ff(normed))


def _with_waiting(
    kept: Sequence[_AtLayer], blocks: list[list[Block]], hidden: Tensor
) -> tuple[list[list[Block]], Tensor]:
    """Insert the blocks that wait at a layer before the new blocks of their utterance.

    Returns:
        for each utterance its waiting and new blocks; hidden states of all of them.
    """
    pieces, joined, row = [], [], 0
    for state, some in zip(kept, blocks, strict=True):
        if state.hidden is not None:
            pieces.append(state.hidden)
        pieces.append(hidden[row : row + len(some)])
        joined.append([*state.waiting, *some])
        row += len(some)
    return joined, torch.cat(pieces)


def _wait(kept: Sequence[_AtLayer], blocks: list[list[Block]], leaving: list[list[Block]], hidden: Tensor) -> None:
    """Store the blocks that a layer cannot compute yet, because it also attends to a block that comes later.

    Args:
        kept: state of each utterance at the layer; gets the blocks with their hidden states.
        blocks: for each utterance the blocks at the layer.
        leaving: for each utterance the first of these blocks, which the layer has computed.
        hidden: hidden states of all blocks in `blocks`.
    """
    row = 0
    for state, some, gone in zip(kept, blocks, leaving, strict=True):
        state.waiting = some[len(gone) :]
        state.hidden = hidden[row + len(gone) : row + len(some)].clone() if state.waiting else None
        row += len(some)
