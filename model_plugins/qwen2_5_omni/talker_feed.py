"""Computes the talker's input embeddings from text ids, hidden states of the thinker, and codes.

Position p of a request whose thinker prompt has n tokens is a projected sum of
    p < n:          text(prompt[p]), unless it is a token of media, and hidden(p);
    p = n:          text(the speaker's id) and code(padding);
    p = n + 1:      text(reply[0]), hidden(n) and code(begin);
    p = n + 1 + j:  code of the step before, and text(reply[j]) and hidden(n + j); after the reply text(end), then
                    text(padding).
hidden(p) is the thinker's output at its position p, after the final norm. Source: `messages.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_omni_ext.engine.input_provider import Span
from vllm_omni_ext.model_plugins.qwen2_5_omni.messages import MEDIA, TalkerChunk, TalkerPayload, TalkerPrompt
from vllm_omni_ext.model_plugins.qwen_omni.streamed_talker import positions_from, positions_of

if TYPE_CHECKING:
    from vllm_omni_ext.model_plugins.qwen2_5_omni.talker import Qwen2_5OmniTalker

MORE_ROWS = 64  # least capacity that a full store of hidden states gains; it doubles otherwise


class _Hidden:
    """Projected hidden states of a request, [count, hidden] in a tensor that grows."""

    def __init__(self, like: Tensor) -> None:
        self._store = like.new_empty(0, like.shape[1])
        self.count = 0
        self.lost = False

    def add(self, rows: Tensor) -> None:
        stop = self.count + len(rows)
        if stop > len(self._store):
            grown = self._store.new_empty(max(stop, 2 * len(self._store), MORE_ROWS), self._store.shape[1])
            grown[: self.count] = self._store[: self.count]
            self._store = grown
        self._store[self.count : stop] = rows
        self.count = stop

    def between(self, start: int, stop: int) -> Tensor:
        """Return hidden states `start` to `stop`, [stop - start, hidden]; zeros for hidden states that are lost."""
        if stop > self.count:
            assert self.lost, "the scheduler computes a position only when its hidden state is there"
            self.add(self._store.new_zeros(stop - self.count, self._store.shape[1]))
        return self._store[start:stop]


@dataclass
class _Request:
    text: list[int]
    voice: int
    reply: list[int]
    ended: bool
    positions: Tensor | None
    codes: list[int]
    hidden: _Hidden


@dataclass
class _Rows:
    """Ids whose embeddings are summed in a step's rows, i.e. its input embeddings.

    Attributes:
        at_text, text: row number and id of each text embedding.
        at_code, codes: row number and id of each code embedding.
    """

    at_text: list[int] = field(default_factory=list)
    text: list[int] = field(default_factory=list)
    at_code: list[int] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)

    def say(self, row: int, text: int) -> None:
        self.at_text.append(row)
        self.text.append(text)

    def spoken(self, row: int, code: int) -> None:
        self.at_code.append(row)
        self.codes.append(code)


class TalkerInputProvider:
    """Implements `engine.input_provider.InputProvider` for the talker."""

    payloads = TalkerPayload

    def __init__(self, model: Qwen2_5OmniTalker, *, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._requests: dict[str, _Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def open(self, req_id: str, payload: TalkerPrompt, hidden_spans: Sequence[tuple[int, int]], params: Any) -> None:
        """Start a request; do nothing if it is open (vLLM adds a preempted request again).

        Args:
            payload: the message with the request's prompt.
            hidden_spans: not used; they follow from the prompt's length.
            params: not used.
        """
        if req_id in self._requests:  # preempted and added again: keep its codes
            return
        self._requests[req_id] = _Request(
            text=payload.text,
            voice=payload.voice,
            reply=list(payload.reply),
            ended=payload.ended,
            positions=positions_from(payload.positions),
            codes=list(payload.codes),
            hidden=_Hidden(self._model.text_table),
        )

    def extend(self, req_id: str, payload: TalkerChunk) -> None:
        """Append the ids of a `TalkerChunk` to the reply of an open request."""
        request = self._requests[req_id]
        request.reply.extend(payload.reply)
        request.ended = request.ended or payload.ended

    def add_hidden_states(self, req_id: str, hidden: Tensor) -> None:
        """Append the thinker's hidden states [n, thinker hidden] of the next positions."""
        self._requests[req_id].hidden.add(self._model.project(hidden))

    def blank(self, req_id: str) -> None:
        """Use zeros for the missing hidden states of a request: they are lost, and the request ends with an error."""
        self._requests[req_id].hidden.lost = True

    def close(self, req_id: str) -> None:
        """Free the state of a request."""
        self._requests.pop(req_id, None)

    def positions(self, req_id: str, length: int) -> tuple[Tensor, int]:
        """Return the M-RoPE positions [3, length] of the first `length` tokens and the delta of later positions."""
        return positions_of(self._requests[req_id].positions, length, after_last=False)

    def rows(self, spans: Sequence[Span]) -> Tensor:
        """Return the input embeddings of all spans, [sum of counts, hidden]."""
        made = _Rows()
        hidden: list[tuple[int, Tensor]] = []
        base = 0
        for span in spans:
            self._collect(self._requests[span.req_id], span, base, made, hidden)
            base += span.count
        rows = self._model.thinker_to_talker_proj.bias.repeat(base, 1)
        if made.text:
            ids = torch.nn.functional.embedding(self._sent(made.text), self._model.text_table)
            rows.index_add_(0, self._sent(made.at_text), ids)
        if hidden:
            at = [row + i for row, some in hidden for i in range(len(some))]
            rows.index_add_(0, self._sent(at), torch.cat([some for _, some in hidden]))
        if made.codes:
            rows.index_add_(0, self._sent(made.at_code), self._model.codec_rows(self._sent(made.codes)))
        return rows

    def _sent(self, numbers: list[int]) -> Tensor:
        return async_tensor_h2d(numbers, self._device)

    def _collect(self, request: _Request, span: Span, base: int, made: _Rows, hidden: list[tuple[int, Tensor]]) -> None:
        """Collect the ids and hidden states that are summed in the rows of a span.

        Args:
            base: number of the span's first row in the step.
            made: gets the ids.
            hidden: gets pairs of a row number and the projected hidden states [n, hidden] of n rows from there.
        """
        config, size = self._model.config, len(request.text)
        stop = span.start + span.count
        for position in range(span.start, stop):
            row = base + position - span.start
            if position < size:
                if request.text[position] != MEDIA:
                    made.say(row, request.text[position])
            elif position == size:
                made.say(row, request.voice)
                made.spoken(row, config.tts_codec_pad_token_id)
            else:
                step = position - size - 1
                made.say(row, self._reply_at(request, step))
                made.spoken(row, request.codes[step - 1] if step else config.tts_codec_start_token_id)
        if span.start < size:
            hidden.append((base, request.hidden.between(span.start, min(stop, size))))
        first, last = max(span.start - size - 1, 0), min(stop - size - 1, len(request.reply))
        if first < last:
            hidden.append((base + size + 1 + first - span.start, request.hidden.between(size + first, size + last)))

    def _reply_at(self, request: _Request, step: int) -> int:
        """Return the text id of a position of the talker: an id of the reply, then the end of text, then padding.

        Args:
            step: index of the position, 0 for the first one after the speaker's id.
        """
        config, spoken = self._model.config, len(request.reply)
        if step < spoken:
            return request.reply[step]
        assert request.ended, "the scheduler computes a position only when its text is there"
        end: int = config.tts_text_end_token_id if step == spoken else config.tts_text_pad_token_id
        return end

    def sampled(self, req_ids: Sequence[str], tokens: Sequence[Sequence[int]], hidden: Tensor) -> list[Tensor | None]:
        """Store the sampled codes, from which the next input embeddings are computed.

        Returns:
            None for each request: the stage's output is its tokens alone.
        """
        for req_id, got in zip(req_ids, tokens, strict=True):
            self._requests[req_id].codes.extend(got)
        return [None] * len(req_ids)
