"""Sends the chat requests of one Realtime session to the chat handler of this process, and passes answers to `Session`.

Each response, each transcription and each `ComputeAhead` command is one chat request.
"""

from __future__ import annotations

import asyncio
import base64
import io
import math
import time
import wave
from collections import OrderedDict
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from http import HTTPStatus
from typing import Any

from pydantic import ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse
from vllm.exceptions import VLLMError
from vllm.logger import init_logger

from vllm_omni_ext.errors import PromptTooLong
from vllm_omni_ext.metrics import REALTIME_AHEAD_TOKENS, REALTIME_FIRST_SOUND, Metrics
from vllm_omni_ext.modalities.audio import frames_of
from vllm_omni_ext.modalities.base import AUDIO, TEXT
from vllm_omni_ext.modalities.chunks import AudioChunk
from vllm_omni_ext.modalities.sound import CHANNELS, PCM16, SAMPLE_BYTES, WAV, pcm16
from vllm_omni_ext.observability.request_trace import RequestTrace, as_metrics
from vllm_omni_ext.serving.chat import OmniServingChat, Parts
from vllm_omni_ext.serving.realtime.events import INVALID_REQUEST, SERVER_ERROR
from vllm_omni_ext.serving.realtime.pacing import Pacer
from vllm_omni_ext.serving.realtime.pcm import PCM, RATES, Decoder, Encoder, SoundFormat
from vllm_omni_ext.serving.realtime.response import Usage
from vllm_omni_ext.serving.realtime.session import ComputeAhead, Generate, Outs, Session, Transcribe
from vllm_omni_ext.serving.realtime.settings import Settings
from vllm_omni_ext.serving.realtime.sound import BYTES_PER_MS, Sound
from vllm_omni_ext.serving.responses import printable

logger = init_logger(__name__)

PIECE_MS = 100
"""Largest length of the sound in one event, in milliseconds."""

PACERS = 16
"""Number of spoken responses whose `Pacer` is kept: a client may still play one when later ones have begun.

More are kept only while their responses are running."""

TRANSCRIPTIONS = 4
"""Limit of the simultaneous transcriptions of one session; further ones wait."""

TRACES = 16
"""Number of responses whose `RequestTrace` is kept. A session has fewer responses in progress."""

INVALID_PROMPT = "invalid_prompt"

TOO_LONG = ("input_text", "input_tokens")
"""Parameters in vLLM's errors about a prompt that is longer than the model's context."""

TRANSCRIBE = "Transcribe the audio word for word. Reply with the transcript only."

AHEAD = "ahead"
"""Key in `Answers` of the request of a `ComputeAhead`. The keys of other requests are ids of responses and items."""

Take = Callable[[Outs], None]

Known = Callable[[Sound], bool]
"""Returns whether vLLM's media cache has a sound; a request then contains its name (`uuid`) without the data."""


class Failed(Exception):
    """A chat request of a session was refused, or has failed.

    Attributes:
        kind: type of the error in the protocol.
        code: code of the error in the protocol.
        too_long: the prompt does not fit into the model's context.
    """

    def __init__(self, message: str, *, kind: str, code: str, too_long: bool = False) -> None:
        super().__init__(printable(message))
        self.kind = kind
        self.code = code
        self.too_long = too_long

    @classmethod
    def of(cls, error: ErrorInfo | dict[str, Any]) -> Failed:
        """Return the `Failed` for an error of vLLM, e.g. the `error` of an `ErrorResponse` or of a part of a stream."""
        found = error if isinstance(error, dict) else error.model_dump()
        status, param = found.get("code") or HTTPStatus.INTERNAL_SERVER_ERROR, found.get("param")
        message = str(found.get("message", ""))
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            return cls(message, kind=SERVER_ERROR, code="server_unavailable")
        if HTTPStatus.BAD_REQUEST <= status < HTTPStatus.INTERNAL_SERVER_ERROR:
            return cls(message, kind=INVALID_REQUEST, code=INVALID_PROMPT, too_long=param in TOO_LONG)
        return cls(message, kind=SERVER_ERROR, code="engine_error")


class Answers:
    """Runs the chat requests of one session, and passes their outputs to `Session`. Implements `session.Playback`.

    Args:
        chat: chat handler of the API server.
        take: `Connection._take`: sends the events and executes the commands that a method of `Session` has returned.
        clock: monotonic clock in seconds.
    """

    def __init__(
        self, chat: OmniServingChat, take: Take, metrics: Metrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.session: Session
        """The session; `Connection` sets it before the first request."""
        self._chat = chat
        self._take = take
        self._metrics = metrics
        self._clock = clock
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._pacers: OrderedDict[str, Pacer] = OrderedDict()
        self._transcribing = asyncio.Semaphore(TRANSCRIPTIONS)
        self._traces: OrderedDict[str, RequestTrace] = OrderedDict()

    def stage_metrics(self, response_id: str) -> dict[str, Any]:
        """Return the times of a response in each stage, in the format of `metrics` of chat answers.

        Empty if the request of the response has not been started.
        """
        trace = self._traces.get(response_id)
        return {} if trace is None else as_metrics(trace)

    def played_ms(self, response_id: str) -> float:
        """Return the milliseconds of a response's sound that the client has played.

        It is `math.inf` without a pacer: the response is so old that all its sound was played long ago.
        """
        pacer = self._pacers.get(response_id)
        return math.inf if pacer is None else pacer.played_ms(self._clock())

    def remaining_ms(self, response_id: str) -> float:
        """Return the milliseconds of a response's sound that were sent, and that the client has not played yet."""
        pacer = self._pacers.get(response_id)
        return 0.0 if pacer is None else pacer.remaining_ms(self._clock())

    def start(self, command: Generate) -> None:
        """Start the chat request of a response."""
        self._begin(command.response_id, self._answer(command))

    def compute_ahead(self, command: ComputeAhead) -> None:
        """Start the request of a `ComputeAhead`. A request of an earlier `ComputeAhead` is aborted."""
        self.stop(AHEAD)
        self._begin(AHEAD, self._compute_ahead(command))

    def transcribe(self, command: Transcribe) -> None:
        """Start the chat request for the transcript of an item."""
        self._begin(command.item_id, self._transcribe(command))

    def stop(self, key: str) -> None:
        """Abort a request if it is running. For a response, also record that the client stops to play its sound.

        Args:
            key: id of the response or of the transcribed item, or `AHEAD`.
        """
        if (task := self._tasks.pop(key, None)) is not None:
            task.cancel()
        if (pacer := self._pacers.get(key)) is not None:
            pacer.cancel(self._clock())

    async def close(self) -> None:
        """Abort all requests, and return when their tasks have ended."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, key: str, work: Any) -> None:
        task = self._tasks[key] = asyncio.create_task(work)
        task.add_done_callback(lambda done: self._ended(key, done))

    def _ended(self, key: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]

    # -- responses ----------------------------------------------------------------------------------------------

    async def _answer(self, command: Generate) -> None:
        response_id, session = command.response_id, self.session
        try:
            await self._stream(command)
        except Failed as error:
            if error.too_long and (outs := session.shorten(response_id)):
                self._take(outs)
            else:
                self._take(session.failed(response_id, str(error), kind=error.kind, code=error.code))
        except Exception:
            logger.exception("The response %s has failed", response_id)
            message = "the server could not answer"
            self._take(session.failed(response_id, message, kind=SERVER_ERROR, code="engine_error"))

    async def _stream(self, command: Generate) -> None:
        response_id, began, session = command.response_id, self._clock(), self.session

        def body(known: Known) -> dict[str, Any]:
            made = chat_body(command.settings, command.messages, known)
            made["request_id"] = response_id  # in logs and traces
            return made

        player = _Player(self._pacer(command), command.settings["audio"]["output"]["format"], self._clock)
        reading = _Reading()
        sending = asyncio.create_task(self._send(response_id, player, began))
        try:
            async with aclosing(await self._answered(body, started=partial(self._started, response_id))) as parts:
                async for part in parts:
                    if isinstance(part, AudioChunk):
                        ms = player.add(part)
                        session.made(response_id, ms, last=part.last)
                        reading.frames = frames_of(part)
                    elif isinstance(part, dict):
                        self._take_text(response_id, part, reading)
            self._take(session.generated(response_id, reading.finish_reason, reading.usage()))
            player.end()
            await sending
        finally:
            sending.cancel()
            await asyncio.wait([sending])
        self._take(session.drained(response_id))

    def _pacer(self, command: Generate) -> Pacer:
        """Return a new pacer. That of a spoken response is kept; the oldest of the others are removed for it."""
        pacer = Pacer()
        if AUDIO in modalities(command.settings):
            self._pacers[command.response_id] = pacer
            ended = [each for each in self._pacers if each not in self._tasks]
            for each in ended[: max(0, len(self._pacers) - PACERS)]:
                del self._pacers[each]
        return pacer

    async def _send(self, response_id: str, player: _Player, began: float) -> None:
        """Pass the sound of a response to the session in pieces, each when `player` returns it as due."""
        first = True
        while (piece := await player.next()) is not None:
            if first:
                self._metrics.of(REALTIME_FIRST_SOUND).observe(self._clock() - began)
                first = False
            self._take(self.session.sound(response_id, *piece))

    def _take_text(self, response_id: str, part: dict[str, Any], reading: _Reading) -> None:
        for delta in reading.deltas(part):
            if content := delta.get("content"):
                self._take(self.session.text(response_id, content))
            for call in delta.get("tool_calls") or ():
                function = call.get("function") or {}
                name, arguments = function.get("name"), function.get("arguments") or ""
                self._take(self.session.call(response_id, call["index"], name, arguments))

    def _started(self, response_id: str, trace: RequestTrace) -> None:
        self._traces[response_id] = trace
        while len(self._traces) > TRACES:
            self._traces.popitem(last=False)

    async def _answered(
        self,
        body: Callable[[Known], dict[str, Any]],
        *,
        ahead_of: tuple[str, ...] | None = None,
        started: Callable[[RequestTrace], None] | None = None,
    ) -> Parts:
        """Send a chat request, and return the parts of its answer (see `answers.PartStream`).

        Sounds that vLLM's media cache has are sent by name. If one of them is evicted before vLLM reads it, vLLM
        refuses the request, which is then sent again with the data of all sounds.

        Args:
            body: returns the body of the request; its argument returns whether a sound is sent by name.
            ahead_of: see `plugins.runtime.RequestOptions`.
            started: receives the trace of the request when it starts.

        Raises:
            Failed: the request is refused.
        """
        named: list[Sound] = []

        def known(sound: Sound) -> bool:
            cache = self._chat.engine_client.renderer.mm_processor_cache
            if cache is None or not cache.is_cached_item(sound.name):
                return False
            named.append(sound)
            return True

        parts = partial(self._parts, ahead_of=ahead_of, started=started)
        made = await asyncio.to_thread(body, known)
        try:
            return await parts(made)
        except (Failed, ValueError):
            if not named or all(map(known, named[:])):
                raise
        return await parts(await asyncio.to_thread(body, lambda sound: False))

    async def _parts(
        self,
        body: dict[str, Any],
        ahead_of: tuple[str, ...] | None,
        started: Callable[[RequestTrace], None] | None,
    ) -> Parts:
        """Send a chat request once, and return the parts of its answer.

        Args:
            ahead_of, started: see `_answered`.

        Raises:
            Failed: the request is refused.
        """
        in_blocks = self.session.block_ms is not None
        try:
            request = ChatCompletionRequest.model_validate(body)
            answer = await self._chat.create_parts(request, started=started, in_blocks=in_blocks, ahead_of=ahead_of)
        except ValidationError as error:
            raise Failed(str(error.errors()[0]["msg"]), kind=INVALID_REQUEST, code=INVALID_PROMPT) from error
        except PromptTooLong as error:
            raise Failed(str(error), kind=INVALID_REQUEST, code=INVALID_PROMPT, too_long=True) from error
        except VLLMError as error:
            raise Failed.of(self._chat.create_error_response(error).error) from error
        if isinstance(answer, ErrorResponse):
            raise Failed.of(answer.error)
        return answer

    async def _compute_ahead(self, command: ComputeAhead) -> None:
        """Run the request of a `ComputeAhead`. A failure is only logged; the response computes the whole prompt."""
        reading = _Reading()

        def body(known: Known) -> dict[str, Any]:
            made = chat_body(command.settings, command.messages, known)
            made.pop("audio", None)
            return made | {"modalities": [TEXT], "max_completion_tokens": 1}

        try:
            async with aclosing(await self._answered(body, ahead_of=modalities(command.settings))) as parts:
                async for part in parts:
                    if isinstance(part, dict):
                        reading.deltas(part)
        except Failed as error:
            logger.debug("The sound of a turn is not computed ahead: %s", error)
        except Exception:
            logger.exception("The sound of a turn could not be computed ahead")
        else:
            usage = reading.usage()
            self._metrics.of(REALTIME_AHEAD_TOKENS).inc(usage.prompt - usage.cached)

    # -- transcriptions -----------------------------------------------------------------------------------------

    async def _transcribe(self, command: Transcribe) -> None:
        item_id, session = command.item_id, self.session
        try:
            async with self._transcribing:
                text, usage = await self._transcript(command)
            self._take(session.transcribed(item_id, text, usage))
        except Failed as error:
            self._take(session.not_transcribed(item_id, str(error), kind=error.kind, code=error.code))
        except Exception:
            logger.exception("The transcription of %s has failed", item_id)
            message = "the server could not transcribe"
            self._take(session.not_transcribed(item_id, message, kind=SERVER_ERROR, code="engine_error"))

    async def _transcript(self, command: Transcribe) -> tuple[str, Usage]:
        reading, text = _Reading(), ""
        async with aclosing(await self._answered(partial(transcription_body, command))) as parts:
            async for part in parts:
                for delta in reading.deltas(part) if isinstance(part, dict) else ():
                    if content := delta.get("content"):
                        text += content
                        self._take(self.session.transcript(command.item_id, content))
        return text, reading.usage()


class _Reading:
    """Collects the finish reason and the token counts from the parts of one answer."""

    def __init__(self) -> None:
        self.finish_reason = "stop"
        self.frames = 0
        self._usage: dict[str, Any] = {}

    def deltas(self, part: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the `delta` of each choice in a part, and store the part's finish reason and usage.

        Raises:
            Failed: the part is an error.
        """
        if "error" in part:
            raise Failed.of(part["error"])
        self._usage = part.get("usage") or self._usage
        for choice in part.get("choices", ()):
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        return [choice["delta"] for choice in part.get("choices", ())]

    def usage(self) -> Usage:
        details = self._usage.get("prompt_tokens_details") or {}
        return Usage(
            prompt=self._usage.get("prompt_tokens", 0),
            prompt_audio=details.get("audio_tokens", 0),
            prompt_image=details.get("image_tokens", 0),
            cached=details.get("cached_tokens", 0),
            text=self._usage.get("completion_tokens", 0),
            audio=self.frames,
        )


class _Player:
    """Queue of one response's sound, encoded for the client: returns pieces of `PIECE_MS` when the pacer allows it."""

    def __init__(self, pacer: Pacer, sound_format: dict[str, Any], clock: Callable[[], float]) -> None:
        kind = sound_format["type"]
        self._pacer = pacer
        self._clock = clock
        self._format = SoundFormat(kind, RATES[kind])
        self._bytes_per_ms = BYTES_PER_MS[kind]
        self._encoder: Encoder | None = None
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue()

    def add(self, chunk: AudioChunk) -> float:
        """Encode a chunk of sound, and queue its pieces. Returns the duration of these pieces in ms."""
        if self._encoder is None:
            self._encoder = Encoder(self._format, chunk.sample_rate)
        data = self._encoder.write(chunk.samples, last=chunk.last)
        size = PIECE_MS * self._bytes_per_ms
        for at in range(0, len(data), size):
            self._pieces.put_nowait(data[at : at + size])
        return len(data) / self._bytes_per_ms

    def end(self) -> None:
        """Record that no sound follows: `next` returns None after the last queued piece."""
        self._pieces.put_nowait(None)

    async def next(self) -> tuple[bytes, float] | None:
        """Wait until the next piece is due, and return (encoded piece, its duration in ms).

        Returns:
            None after the last piece, and after the pacer was cancelled.
        """
        piece = await self._pieces.get()
        if piece is None or self._pacer.cancelled:
            return None
        ms = len(piece) / self._bytes_per_ms
        if (wait := self._pacer.due(ms, self._clock())) > 0:
            await asyncio.sleep(wait)
            if self._pacer.cancelled:
                return None
        self._pacer.sent(ms, self._clock())
        return piece, ms


def modalities(settings: Settings) -> tuple[str, ...]:
    """Return the modalities of a response's chat request: text, and sound if `output_modalities` is ["audio"]."""
    return (TEXT, AUDIO) if settings["output_modalities"] == [AUDIO] else (TEXT,)


def chat_body(settings: Settings, messages: list[dict[str, Any]], known: Known) -> dict[str, Any]:
    """Return the body of the chat request of a response; for the sounds in `messages` see `with_wav`."""
    body: dict[str, Any] = {
        "model": settings["model"],
        "messages": with_wav(messages, known),
        "modalities": list(modalities(settings)),
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if AUDIO in body["modalities"]:
        voice = settings["audio"]["output"]["voice"]
        body["audio"] = {"format": PCM16} | ({} if voice is None else {"voice": voice})
    if settings["max_output_tokens"] != "inf":
        body["max_completion_tokens"] = settings["max_output_tokens"]
    if settings["tools"]:
        body |= _tools(settings)
    return body


def _tools(settings: Settings) -> dict[str, Any]:
    choice = settings["tool_choice"]
    if isinstance(choice, dict):
        choice = {"type": "function", "function": {"name": choice["name"]}}
    functions = [{key: value for key, value in tool.items() if key != "type"} for tool in settings["tools"]]
    return {
        "tools": [{"type": "function", "function": function} for function in functions],
        "tool_choice": choice,
        "parallel_tool_calls": settings["parallel_tool_calls"],
    }


def transcription_body(command: Transcribe, known: Known) -> dict[str, Any]:
    """Return the body of a chat request for the transcript of an item's sound; for `known` see `with_wav`."""
    settings = command.settings
    words = [TRANSCRIBE]
    if settings["language"]:
        words.append(f"The language is {settings['language']}.")
    if settings["prompt"]:
        words.append(settings["prompt"])
    parts = [{"type": "input_audio", "input_audio": command.sound}, {"type": "text", "text": " ".join(words)}]
    return {
        "model": settings["model"],
        "messages": with_wav([{"role": "user", "content": parts}], known),
        "modalities": [TEXT],
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def with_wav(messages: list[dict[str, Any]], known: Known) -> list[dict[str, Any]]:
    """Replace each `Sound` in chat messages by a WAV file in base64, with the name of the sound as `uuid`.

    The WAV file has the sample rate of the client's sound. A sound for which `known` returns True has only a name.

    Returns:
        The changed copies of the messages.
    """
    return [
        {**message, "content": [_with_wav(part, known) for part in message["content"]]}
        if isinstance(message["content"], list)
        else message
        for message in messages
    ]


def _with_wav(part: dict[str, Any], known: Known) -> dict[str, Any]:
    if part["type"] != "input_audio":
        return part
    sound: Sound = part["input_audio"]
    data = "" if known(sound) else wav(sound)
    return {"type": "input_audio", "input_audio": {"data": data, "format": WAV}, "uuid": sound.name}


def wav(sound: Sound) -> str:
    """Return a sound as a WAV file in base64."""
    kind, data = sound.format["type"], sound.data
    if kind != PCM:
        data = pcm16(Decoder(SoundFormat(kind, RATES[kind]), RATES[kind]).write(data, last=True))
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((CHANNELS, SAMPLE_BYTES, RATES[kind], 0, "NONE", ""))
        writer.writeframes(data)
    return base64.b64encode(file.getbuffer()).decode("ascii")
