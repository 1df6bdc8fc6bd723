"""Connects the WebSocket of one client with a `Session`, the turn detection and the model."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import WebSocket
from starlette.websockets import WebSocketDisconnect, WebSocketState
from vllm.logger import init_logger

from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.metrics import ERRORS, REALTIME_INTERRUPTIONS, REALTIME_RESPONSES, REALTIME_TURNS, Metrics
from vllm_omni_ext.serving.chat import OmniServingChat
from vllm_omni_ext.serving.realtime.answering import AHEAD, Answers
from vllm_omni_ext.serving.realtime.detecting import SpeechFrames
from vllm_omni_ext.serving.realtime.events import (
    INVALID_REQUEST,
    SERVER_ERROR,
    WRONG_TYPE,
    ClientError,
    Event,
    SessionFields,
)
from vllm_omni_ext.serving.realtime.limits import Limits, Rate, weight
from vllm_omni_ext.serving.realtime.response import CANCELLED
from vllm_omni_ext.serving.realtime.session import (
    Abort,
    ComputeAhead,
    Detect,
    Detection,
    Generate,
    Outs,
    Session,
    StopAhead,
    StopTranscribing,
    Transcribe,
    shutting_down,
)
from vllm_omni_ext.serving.realtime.settings import Offer

logger = init_logger(__name__)

NORMAL, GOING_AWAY, POLICY, INTERNAL = 1000, 1001, 1008, 1011
"""Codes that close a WebSocket."""

EXPIRED, IDLE, TOO_SLOW = "session_expired", "session_idle", "client_too_slow"
"""Codes of errors that end a session by its limits of time or memory, and refuse no event of the client."""

CLOSE_S = 5.0
"""Seconds that the server waits, before it closes a connection, until its queued events are sent."""

DETECT_BYTES = 64 << 10
"""Largest size of the pieces, of whole samples, in which sound passes turn detection: 1.4 s of PCM, 8 s of G.711.

They limit the time and the memory of each step, so that large events do not delay the turns of other sessions."""


class Closing(Exception):
    """Ends a connection.

    Args:
        code: close code of the WebSocket.
        error: sent to the client before the close; `error.code` is the close reason of the WebSocket.
    """

    def __init__(self, code: int, error: ClientError) -> None:
        super().__init__(str(error))
        self.code = code
        self.error = error


@dataclass
class _Unsent:
    """An event that waits to be sent.

    Attributes:
        text: the event as JSON; "": the event was dropped.
        sound_of: id of the response whose sound the event contains; "": the event contains no sound.
    """

    text: str
    sound_of: str = ""


class Connection:
    """Serves one client: passes its events to a `Session`, sends the session's events, and executes its commands.

    Args:
        offer: properties of the served model.
        chat: chat handler of the API server.
        speech: computes the probabilities of speech for turn detection.
        config: fields of `session` that the client's secret contains; None: there is no secret.
        stage_metrics: add `metrics`, the times of the response in each stage, to `response.done`.
        clock: monotonic clock in seconds.

    Raises:
        ClientError: `config` has a field that this server does not support.
    """

    def __init__(
        self,
        websocket: WebSocket,
        offer: Offer,
        limits: Limits,
        chat: OmniServingChat,
        metrics: Metrics,
        *,
        speech: SpeechFrames,
        config: SessionFields | None = None,
        stage_metrics: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._websocket = websocket
        self._limits = limits
        self._metrics = metrics
        self._stage_metrics = stage_metrics
        self._clock = clock
        self._speech = speech
        self._answers = Answers(chat, self._take_answer, metrics, clock)
        self._session = self._answers.session = Session(
            offer,
            limits,
            self._answers,
            new_id=new_id,
            expires_at=int(time.time() + limits.session_s),
            config=config,
            completeness=self._speech.completeness,
        )
        self._out: asyncio.Queue[_Unsent | Closing] = asyncio.Queue()
        self._sounds: dict[str, deque[_Unsent]] = {}
        """Events in `_out` that contain sound, by response id."""
        self._unsent = 0
        self._room = asyncio.Event()
        """Set while the events in `_out` have at most half of `unsent_bytes`: the client's next event may be read."""
        self._room.set()
        self._draining = False
        self._closed = False
        self._writer: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Serve the client until the client or the server closes the connection. The WebSocket is accepted already."""
        writer = self._writer = asyncio.create_task(self._write())
        reader = asyncio.create_task(self._read_to_the_end())
        try:
            await asyncio.wait([writer, reader], return_when=asyncio.FIRST_COMPLETED)
            if not writer.done() and self._closed:
                await asyncio.wait([writer])  # sends the queued events before the close
        finally:
            writer.cancel()
            reader.cancel()
            await self._answers.close()
            for task in (writer, reader):
                (end,) = await asyncio.gather(task, return_exceptions=True)
                if isinstance(end, Exception) and not isinstance(end, WebSocketDisconnect):
                    logger.error("A connection has failed", exc_info=end)

    def drain(self) -> None:
        """Send the client an error, as the server shuts down; close the connection after its running responses."""
        self._draining = True
        self._take(self._session.drain())

    # -- from the client ----------------------------------------------------------------------------------------

    async def _read_to_the_end(self) -> None:
        try:
            async with asyncio.timeout(self._limits.session_s):
                await self._read()
        except TimeoutError:
            message = f"the session has lasted {self._limits.session_s:g} s"
            self._close(Closing(NORMAL, ClientError(message, code=EXPIRED)))
        except Closing as closing:
            self._close(closing)
        except Exception:
            logger.exception("A realtime session has failed")
            error = ClientError("the server has failed", code="internal_error", kind=SERVER_ERROR)
            self._close(Closing(INTERNAL, error))

    async def _read(self) -> None:
        rate = Rate(self._limits, self._clock())
        await self._carry_out(self._session.begin())
        while True:
            message = await self._receive()
            if message["type"] == "websocket.disconnect":
                return
            text = message.get("text")
            if not rate.count(self._clock(), 1.0 if text is None else weight(text)):
                error = ClientError(
                    f"at most {self._limits.events_per_s:g} events a second", code="rate_limit_exceeded"
                )
                raise Closing(POLICY, error)
            if text is None:
                error = ClientError("an event must be text, not bytes", code=WRONG_TYPE)
                self._take(self._session.error(error))
            else:
                await self._carry_out(self._session.receive(text))
            await asyncio.sleep(0)  # `receive` does not yield while events are queued

    async def _receive(self) -> Any:
        """Return the next message of the client, after the client has read the events that earlier ones have caused."""
        try:
            async with asyncio.timeout(self._limits.idle_s):
                await self._room.wait()
                return await self._websocket.receive()
        except TimeoutError as error:
            idle = ClientError(f"no event for {self._limits.idle_s:g} s", code=IDLE)
            raise Closing(POLICY, idle if self._room.is_set() else too_slow()) from error

    async def _carry_out(self, outs: Outs) -> None:
        """Send events and execute commands. The next event of the client is read after all `Detect`s are executed."""
        self._take([out for out in outs if not isinstance(out, Detect)])
        for out in outs:
            if isinstance(out, Detect):
                await self._detect(out.data)

    async def _detect(self, data: bytes) -> None:
        """Pass sound through turn detection; turns that a piece starts or ends change the detector for the next one."""
        for at in range(0, len(data), DETECT_BYTES):
            if (detector := self._session.detector) is not None:
                frames = await self._speech.push(data[at : at + DETECT_BYTES], detector)
                self._take(self._session.frames(frames))

    # -- to the client ------------------------------------------------------------------------------------------

    def _take_answer(self, outs: Outs) -> None:
        """Like `_take`, for a running request. It does not wait for a client that does not read, as `_receive` does."""
        if self._unsent > self._limits.unsent_bytes:
            self._close(Closing(POLICY, too_slow()), sent=True)
        self._take(outs)

    def _take(self, outs: Outs) -> None:
        for out in outs:
            match out:
                case Generate():
                    self._answers.start(out)
                case Abort():
                    self._answers.stop(out.response_id)
                    self._drop_sound(out.response_id)
                case ComputeAhead():
                    self._answers.compute_ahead(out)
                case StopAhead():
                    self._answers.stop(AHEAD)
                case Transcribe():
                    self._answers.transcribe(out)
                case StopTranscribing():
                    self._answers.stop(out.item_id)
                case Detection():
                    self._speech.begin(out.format, out.from_ms)
                case dict():
                    self._send(out)
        if self._draining and not self._session.busy:
            self._close(Closing(GOING_AWAY, shutting_down()), sent=True)

    def _send(self, event: Event) -> None:
        if self._closed:
            return
        self._count(event)
        if self._stage_metrics and event["type"] == "response.done":
            event["response"]["metrics"] = self._answers.stage_metrics(event["response"]["id"])
        text = json.dumps(event, separators=(",", ":"))
        self._add_unsent(len(text))
        unsent = _Unsent(text)
        if event["type"] == "response.output_audio.delta":
            unsent.sound_of = event["response_id"]
            self._sounds.setdefault(unsent.sound_of, deque()).append(unsent)
        self._out.put_nowait(unsent)

    def _drop_sound(self, response_id: str) -> None:
        """Drop the queued events with sound of a response. Events are queued while the client does not read."""
        for unsent in self._sounds.pop(response_id, ()):
            self._add_unsent(-len(unsent.text))
            unsent.text = ""

    def _add_unsent(self, size: int) -> None:
        self._unsent += size
        if self._unsent > self._limits.unsent_bytes // 2:
            self._room.clear()
        else:
            self._room.set()

    def _count(self, event: Event) -> None:
        if event["type"] == "response.done":
            response = event["response"]
            self._metrics.of(REALTIME_RESPONSES, response["status"]).inc()
            details = response["status_details"] or {}
            if response["status"] == CANCELLED and details.get("reason") == "turn_detected":
                self._metrics.of(REALTIME_INTERRUPTIONS).inc()
        elif event["type"] == "input_audio_buffer.committed":
            self._metrics.of(REALTIME_TURNS).inc()
        elif event["type"] == "error":
            error = event["error"]
            if error["type"] == INVALID_REQUEST and error["code"] not in (EXPIRED, IDLE, TOO_SLOW):
                self._metrics.of(ERRORS, RequestError.__name__, "").inc()

    def _close(self, closing: Closing, *, sent: bool = False) -> None:
        """Send the queued events, then close the connection.

        Args:
            sent: the client has got the error already; it is not sent again.
        """
        if self._closed:
            return
        if not sent:
            for event in self._session.error(closing.error):
                assert isinstance(event, dict)
                self._send(event)
        self._closed = True
        self._out.put_nowait(closing)
        if self._writer is not None:  # a client that does not read is not waited for
            asyncio.get_running_loop().call_later(CLOSE_S, self._writer.cancel)

    async def _write(self) -> None:
        while True:
            item = await self._out.get()
            if self._websocket.client_state is WebSocketState.DISCONNECTED:
                return
            if isinstance(item, Closing):
                await self._websocket.close(item.code, item.error.code)
                return
            if (sounds := self._sounds.get(item.sound_of)) is not None:
                sounds.popleft()
                if not sounds:
                    del self._sounds[item.sound_of]
            if item.text:
                await self._websocket.send_text(item.text)
                self._add_unsent(-len(item.text))


def too_slow() -> ClientError:
    """Return the error that ends the session of a client that does not read its events."""
    return ClientError("the client does not read its events", code=TOO_SLOW)


def new_id(prefix: str) -> str:
    """Return a new id, e.g. item_8fc1..."""
    return f"{prefix}_{uuid.uuid4().hex[:24]}"
