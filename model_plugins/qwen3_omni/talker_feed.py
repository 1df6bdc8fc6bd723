"""Computes the talker's input embeddings from text ids, codec frames and projected multimodal hidden states.

Position p of a request is
    p < prompt length:  text(id_p) [+ codec(c_p)], or the projected hidden state of a multimodal position;
    p = prompt + t:     sum of the codec embeddings of frame t + text(track[t]),
with text(id) = text_projection(thinker embedding of id), a row of a table that is computed at load. `track` has the
text ids of the reply after its first token (`prompt.TalkerPrompt`); after its last id, the text id is `fill` (tts_pad).
Source: Transformers' `_get_talker_user_parts`,
`_get_talker_assistant_parts` and `prepare_inputs_for_generation` of Qwen3-Omni, where the same embeddings are computed
from the hidden states of every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_omni_ext.engine.input_provider import Span
from vllm_omni_ext.model_plugins.qwen3_omni.code_predictor import Draw
from vllm_omni_ext.model_plugins.qwen3_omni.prompt import NO_CODEC, TalkerChunk, TalkerPayload, TalkerPrompt
from vllm_omni_ext.model_plugins.qwen_omni.streamed_talker import positions_from, positions_of

if TYPE_CHECKING:
    from vllm_omni_ext.model_plugins.qwen3_omni.talker import Qwen3OmniTalker

FIRST_FRAMES = 64  # initial capacity of a request in frames; the capacity doubles when it is full


@dataclass
class _Request:
    text: list[int]  # shorter than `codec` until the last id of the prompt has arrived
    codec: list[int]
    fill: int
    track: list[int]
    draw: Draw
    history: np.ndarray  # frames int32 [capacity, groups], of which the first `frames` are valid
    positions: Tensor | None
    rows: Tensor | None = None
    row_of: dict[int, int] = field(default_factory=dict)
    frames: int = 0

    def text_at(self, step: int) -> int:
        return self.track[step] if step < len(self.track) else self.fill

    def keep(self, frames: np.ndarray) -> None:
        """Append frames int32 [n, groups]."""
        stop = self.frames + len(frames)
        if stop > len(self.history):
            grown = np.zeros((max(stop, 2 * len(self.history)), self.history.shape[1]), np.int32)
            grown[: self.frames] = self.history[: self.frames]
            self.history = grown
        self.history[self.frames : stop] = frames
        self.frames = stop


class TalkerInputProvider:
    """Implements `engine.input_provider.InputProvider` for the talker.

    The frames of a step are copied to the host, since they are the step's output. The provider stores all frames of a
    request there. For the next step it copies the frames that are the step's input to the device, with their text ids.
    """

    payloads = TalkerPayload

    def __init__(self, model: Qwen3OmniTalker, *, device: torch.device) -> None:
        self._model = model
        self._groups = model.code_predictor.groups
        self._device = device
        self._requests: dict[str, _Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def open(self, req_id: str, payload: TalkerPrompt, hidden_spans: Sequence[tuple[int, int]], params: Any) -> None:
        """Start a request; do nothing if it is open (vLLM adds a preempted request again).

        Args:
            payload: the message with the request's prompt.
            hidden_spans: ranges [start, stop) of prompt positions whose input is hidden states of the thinker.
            params: the request's `SamplingParams`. For the codes of a frame after the first, only `seed` and whether
                `temperature` is 0 (greedy) apply; `code_predictor.py` has fixed values of the other parameters.
        """
        if req_id in self._requests:  # preempted and added again: keep its history
            return
        seed = params.seed
        generator = None if seed is None else torch.Generator(self._device).manual_seed(seed)
        request = self._requests[req_id] = _Request(
            text=list(payload.text),
            codec=payload.codec,
            fill=payload.fill,
            track=list(payload.track),
            draw=Draw(greedy=params.temperature < 1e-5, generator=generator),
            history=np.zeros((FIRST_FRAMES, self._groups), np.int32),
            positions=positions_from(payload.positions),
            row_of={p: i for i, p in enumerate(chain.from_iterable(range(*span) for span in hidden_spans))},
        )
        if payload.frames:
            request.keep(np.array(payload.frames, np.int32))
            request.draw.skip(len(payload.frames), self._groups - 1)

    def extend(self, req_id: str, payload: TalkerChunk) -> None:
        """Append the ids of a `TalkerChunk` to the prompt and the track of an open request."""
        request = self._requests[req_id]
        request.text.extend(payload.text)
        request.track.extend(payload.track)

    def add_hidden_states(self, req_id: str, hidden: Tensor) -> None:
        """Append hidden states [n, thinker hidden] of multimodal positions."""
        request = self._requests[req_id]
        new = self._model.project_hidden(hidden.to(self._device))
        request.rows = new if request.rows is None else torch.cat([request.rows, new])

    def blank(self, req_id: str) -> None:
        """Use zeros for the hidden states of a request, because they are lost and the request ends with an error."""
        request = self._requests[req_id]
        request.rows = self._model.text_table.new_zeros((len(request.row_of), self._model.text_table.shape[1]))

    def close(self, req_id: str) -> None:
        """Free the state of a request."""
        self._requests.pop(req_id, None)

    def positions(self, req_id: str, length: int) -> tuple[Tensor, int]:
        """Return the M-RoPE positions [3, length] of the first `length` tokens and the delta of later positions."""
        return positions_of(self._requests[req_id].positions, length, after_last=True)

    def rows(self, spans: Sequence[Span]) -> Tensor:
        """Return the input embeddings of all spans, [sum of counts, hidden]."""
        prompts: list[tuple[_Request, int, int, int]] = []  # request, first position, row, count
        decode: list[tuple[int, int, np.ndarray]] = []  # row, text id, frame
        base = 0
        for span in spans:
            request = self._requests[span.req_id]
            prompt = len(request.codec)
            cut = max(0, min(prompt - span.start, span.count))
            if cut:
                prompts.append((request, span.start, base, cut))
            for i in range(cut, span.count):
                step = span.start + i - prompt
                decode.append((base + i, request.text_at(step), request.history[step]))
            base += span.count
        if not prompts:
            return self._step_rows(decode)
        table = self._model.text_table
        rows = table.new_empty((base, table.shape[1]))
        for request, start, row, count in prompts:
            self._prompt_rows(request, start, rows[row : row + count])
        if decode:
            rows[async_tensor_h2d([row for row, *_ in decode], self._device)] = self._step_rows(decode)
        return rows

    def _step_rows(self, decode: list[tuple[int, int, np.ndarray]]) -> Tensor:
        """Return the input embeddings [n, hidden] of n positions after the prompts.

        Args:
            decode: for each position its row in the step (not used here), its text id, and its frame int32 [groups].
        """
        numbers = np.empty((len(decode), 1 + self._groups), np.int64)
        for line, (_, text_id, frame) in zip(numbers, decode, strict=True):
            line[0] = text_id
            line[1:] = frame
        sent = async_tensor_h2d(numbers, self._device)
        text, codes = sent[:, 0], sent[:, 1:]
        spoken = self._model.codec_rows(codes[:, 0]) + self._model.code_predictor.frame_rows(codes[:, 1:])
        return spoken + torch.nn.functional.embedding(text, self._model.text_table)

    def _prompt_rows(self, request: _Request, start: int, out: Tensor) -> None:
        stop = start + out.shape[0]
        ids = async_tensor_h2d(request.text[start:stop], self._device)
        out.copy_(self._model.text_table[ids.clamp(min=0)])
        mixed = [p for p in range(start, stop) if p in request.row_of]
        if mixed:
            assert request.rows is not None, "the scheduler starts a prompt only when its rows are there"
            at = async_tensor_h2d([p - start for p in mixed], self._device)
            source = async_tensor_h2d([request.row_of[p] for p in mixed], self._device)
            out[at] = request.rows[source].to(out.dtype)
        spoken = [p for p in range(start, stop) if request.codec[p] != NO_CODEC]
        if spoken:
            at = async_tensor_h2d([p - start for p in spoken], self._device)
            codes = async_tensor_h2d([request.codec[p] for p in spoken], self._device)
            out[at] += self._model.codec_rows(codes)

    def sampled(self, req_ids: Sequence[str], tokens: Sequence[Sequence[int]], hidden: Tensor) -> list[Tensor | None]:
        """Compute the other codes of each frame whose first code was sampled in this step.

        Returns:
            for each request its frame, int32 [1, groups]; None if no code or the end of speech was sampled.
        """
        made: list[Tensor | None] = [None] * len(req_ids)
        live = [i for i, got in enumerate(tokens) if got and got[0] != self._model.codec_eos]
        if not live:
            return made
        requests = [self._requests[req_ids[i]] for i in live]
        frames = self._model.frames.make(
            hidden, live, [tokens[i][0] for i in live], [request.draw for request in requests]
        )
        kept = frames.numpy()
        for row, (i, request) in enumerate(zip(live, requests, strict=True)):
            request.keep(kept[row : row + 1])
            made[i] = frames[row : row + 1]
        return made
