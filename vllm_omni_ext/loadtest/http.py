"""Load clients for streamed answers of `/v1/chat/completions` and `/v1/audio/speech`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp

from vllm_omni_ext.loadtest.answers import BROKEN, ERROR, MALFORMED, Failure, Timeline
from vllm_omni_ext.loadtest.client import Request, base64_bytes, refuse_status, seconds

PREFIX, DONE = b"data:", b"[DONE]"


class Chat:
    """Load client of chat completions: requests streamed text and sound. Input sounds are (base64 text, format)."""

    def __init__(self, url: str, request: Request) -> None:
        self._url, self._request = f"{url}/chat/completions", request

    def body(self, number: int) -> dict[str, Any]:
        """Return the JSON body of the request with this number."""
        request = self._request
        content: list[dict[str, Any]] = []
        if (sound := request.sound(number)) is not None:
            content.append({"type": "input_audio", "input_audio": {"data": sound[0], "format": sound[1]}})
        if (prompt := request.prompt(number)) is not None:
            content.append({"type": "text", "text": prompt})
        audio = {"format": "pcm16"} | ({} if request.voice is None else {"voice": request.voice})
        limit = {} if request.max_tokens is None else {"max_completion_tokens": request.max_tokens}
        return {
            "model": request.model,
            "messages": [{"role": "user", "content": content if sound is not None else prompt}],
            "modalities": ["text", "audio"],
            "audio": audio,
            "stream": True,
            **limit,
            **request.extra,
        }

    async def send(self, session: aiohttp.ClientSession, number: int, timeline: Timeline) -> None:
        """Send one request, and record the times of its answer in `timeline`; see `client.Api.send`."""
        async with session.post(self._url, json=self.body(number)) as reply:
            await refuse_status(reply)
            async for event in events(reply.content):
                text, sound = read_chunk(event)
                if text:
                    timeline.text()
                timeline.sound(sound)


class Speech:
    """Load client of the speech API: requests the speech of texts, as streamed PCM."""

    def __init__(self, url: str, request: Request) -> None:
        self._url, self._request = f"{url}/audio/speech", request

    def body(self, number: int) -> dict[str, Any]:
        """Return the JSON body of the request with this number."""
        request = self._request
        voice = {} if request.voice is None else {"voice": request.voice}
        return {
            "model": request.model,
            "input": request.prompt(number),
            "response_format": "pcm",
            "stream_format": "audio",
            **voice,
            **request.extra,
        }

    async def send(self, session: aiohttp.ClientSession, number: int, timeline: Timeline) -> None:
        """Send one request, and record the times of its answer in `timeline`; see `client.Api.send`."""
        async with session.post(self._url, json=self.body(number)) as reply:
            await refuse_status(reply)
            if reply.content_type.startswith(("text/", "application/json")):
                raise Failure(MALFORMED, f"the sound has the type {reply.content_type}")
            async for data in reply.content.iter_any():
                timeline.sound(seconds(len(data)))


async def events(content: aiohttp.StreamReader) -> AsyncIterator[Mapping[str, Any]]:
    """Yield the JSON objects of server-sent events until `[DONE]`.

    Raises:
        Failure: an event is malformed, or the stream ends without `[DONE]`.
    """
    rest = b""
    async for data in content.iter_any():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(PREFIX):
                continue
            text = line.removeprefix(PREFIX).strip()
            if text == DONE:
                return
            yield _object(text)
    raise Failure(BROKEN, "the stream ended without [DONE]")


def _object(text: bytes) -> Mapping[str, Any]:
    try:
        event = json.loads(text)
    except ValueError as err:
        raise Failure(MALFORMED, f"an event is no JSON: {err}") from None
    if not isinstance(event, Mapping):
        raise Failure(MALFORMED, "an event is no JSON object")
    return event


def read_chunk(event: Mapping[str, Any]) -> tuple[bool, float]:
    """Return (whether a chat chunk has text, seconds of its sound, which is pcm16 at 24 kHz).

    OpenAI's format has sound in `delta.audio.data`. vllm-omni's format has sound in `delta.content` if the chunk's
    `modality` is "audio".

    Raises:
        Failure: the chunk is an error, or has neither format.
    """
    if "error" in event:
        raise Failure(ERROR, json.dumps(event["error"]))
    text, size = False, 0
    try:
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            audio, content = delta.get("audio") or {}, delta.get("content") or ""
            if event.get("modality") == "audio":
                size += base64_bytes(content)
            else:
                text |= bool(content)
            text |= bool(audio.get("transcript"))
            size += base64_bytes(audio.get("data") or "")
    except (AttributeError, TypeError) as err:
        raise Failure(MALFORMED, f"a chunk is not in the format of a chat: {err}") from None
    return text, seconds(size)
