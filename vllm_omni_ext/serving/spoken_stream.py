"""A streamed answer with sound: vLLM's text events and our sound events in one stream, in OpenAI's shape.

    role, content + audio.transcript ..., audio.data ..., audio.expires_at, finish_reason, [usage], [DONE]

Every chunk says in `modality` what it carries, as vllm-omni's do, and one with sound has `audio_metadata`.

vLLM's own generator makes the text events. It reads from `text_of`, which sends sound past it, so its end - the usage
chunk and `[DONE]` - comes after the last sound, and an error of any stage becomes its error event. Only the finish
reason is moved: many clients stop reading there.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from vllm_omni_ext.outputs import AudioOutput
from vllm_omni_ext.serving.encoding import WAV, encode
from vllm_omni_ext.serving.options import Asked
from vllm_omni_ext.serving.spoken_reply import expiry, metadata, new_audio_id
from vllm_omni_ext.serving.wav import Base64Pieces, pcm16, wav_stream_header

PREFIX, END = "data: ", "\n\n"
DONE = f"{PREFIX}[DONE]{END}"
CHOICES_HEAD = PREFIX + '{"id":'
"""How vLLM's events begin, other than errors and the end."""


class SpokenStream:
    """The events of one request.

    Args:
        prompt_audio: tokens of the prompt that are sound.
    """

    def __init__(self, asked: Asked, sample_rate: int, *, request_id: str, model: str, prompt_audio: int = 0) -> None:
        self._asked = asked
        self._prompt_audio = prompt_audio
        self._rate = sample_rate
        self._head = {"id": request_id, "object": "chat.completion.chunk", "created": int(time.time()), "model": model}
        self._audio_id: str | None = new_audio_id()
        self._pieces = Base64Pieces()
        self._header_due = asked.format == WAV
        self._frames = 0
        self._samples = 0
        self._note: str | None = None
        self._finish: dict[str, Any] | None = None
        self._out: asyncio.Queue[str | None] = asyncio.Queue()

    async def events(
        self, stock: AsyncGenerator[str, None], text: AsyncGenerator[Any, None]
    ) -> AsyncGenerator[str, None]:
        """All events; `stock` is vLLM's generator and `text` what it reads from. Closes both."""
        task = asyncio.create_task(self._run(stock, text))
        try:
            while (event := await self._out.get()) is not None:
                yield event
            await task
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def text_of(self, source: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        """The text outputs of `source`; sound goes into the stream at once. Closes `source`."""
        async with aclosing(source):
            async for item in source:
                if isinstance(item, AudioOutput):
                    self._hear(item)
                else:
                    yield item
        self._close()

    async def _run(self, stock: AsyncGenerator[str, None], text: AsyncGenerator[Any, None]) -> None:
        try:
            async with aclosing(text), aclosing(stock):
                async for event in stock:
                    self._out.put_nowait(self._rewritten(event))
        finally:
            self._out.put_nowait(None)

    # -- sound --------------------------------------------------------------------------------------------------

    def _hear(self, piece: AudioOutput) -> None:
        self._frames, self._note = len(piece.frames), piece.note
        self._samples += len(piece.samples)
        data = pcm16(piece.samples)
        if self._header_due and data:
            data, self._header_due = wav_stream_header(self._rate) + data, False
        data_text = self._pieces.write(data, last=piece.finished)
        delta: dict[str, Any] = {"audio": self._audio(data=data_text)} if data_text else {}
        if self._asked.audio_in_content and len(piece.samples):
            delta = {"role": "assistant", "content": self._complete(piece), **delta}
        if delta:
            self._send(delta, samples=len(piece.samples))

    def _complete(self, piece: AudioOutput) -> str:
        """A piece as it is in vllm-omni's content: with a header of its own, if the format has one."""
        return base64.b64encode(encode(piece.samples, self._rate, self._asked.encoding)).decode("ascii")

    def _close(self) -> None:
        """After the last output: nothing more is heard, then the reason why the text ended."""
        self._send({"audio": {"expires_at": expiry()}}, samples=self._samples)
        if self._finish is not None:
            self._put(self._finish)

    def _audio(self, **fields: str) -> dict[str, str]:
        """A delta of the sound. The first one has the id; clients that add deltas up would repeat it otherwise."""
        named = {} if self._audio_id is None else {"id": self._audio_id}
        self._audio_id = None
        return named | fields

    def _send(self, delta: dict[str, Any], *, samples: int) -> None:
        facts = metadata(self._asked.format, self._rate, samples, self._note)
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, "audio_metadata": facts}
        self._put({**self._head, "choices": [choice], "modality": "audio"})

    def _put(self, chunk: dict[str, Any]) -> None:
        self._out.put_nowait(_event(chunk))

    # -- text ---------------------------------------------------------------------------------------------------

    def _rewritten(self, event: str) -> str:
        """A text event of vLLM as it goes out."""
        if event == DONE:
            return event
        chunk = json.loads(event.removeprefix(PREFIX))
        if "error" in chunk:
            return event
        chunk["created"] = self._head["created"]
        if chunk["choices"]:
            chunk["modality"] = "text"
            self._rewrite_choice(chunk, chunk["choices"][0])
        else:
            details = chunk["usage"].setdefault("completion_tokens_details", {"reasoning_tokens": 0})
            details["audio_tokens"] = self._frames
            add_prompt_audio(chunk["usage"], self._prompt_audio)
        return _event(chunk)

    def _rewrite_choice(self, chunk: dict[str, Any], choice: dict[str, Any]) -> None:
        delta = choice["delta"]
        if content := delta.get("content"):
            delta["audio"] = self._audio(transcript=content)
        if not self._asked.text:
            delta.pop("content", None)
        if choice.get("finish_reason") is not None:
            end = {"index": choice["index"], "delta": {}, "logprobs": None}
            end["finish_reason"], choice["finish_reason"] = choice["finish_reason"], None
            end["stop_reason"] = choice.pop("stop_reason", None)
            self._finish = {**chunk, "choices": [end]}


async def with_text_events(stock: AsyncGenerator[str, None], prompt_audio: int) -> AsyncGenerator[str, None]:
    """vLLM's events of an answer without sound, with what every stream of ours has. Closes `stock`."""
    async with aclosing(stock):
        async for event in stock:
            if event.startswith(CHOICES_HEAD):
                event = f'{CHOICES_HEAD[:-5]}"modality":"text","id":{event[len(CHOICES_HEAD) :]}'
            if prompt_audio and '"choices":[]' in event:
                chunk = json.loads(event.removeprefix(PREFIX))
                add_prompt_audio(chunk["usage"], prompt_audio)
                event = _event(chunk)
            yield event


def add_prompt_audio(usage: dict[str, Any], tokens: int) -> None:
    """Say in a usage object how many tokens of the prompt are sound, in place; nothing if none is."""
    if tokens:
        usage["prompt_tokens_details"] = {**(usage.get("prompt_tokens_details") or {}), "audio_tokens": tokens}


def _event(chunk: dict[str, Any]) -> str:
    return f"{PREFIX}{json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}{END}"
