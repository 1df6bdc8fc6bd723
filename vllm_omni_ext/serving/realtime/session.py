"""The state of a session. Pure: events of the client, of the turn detector and of the model in; events for the client
and commands out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from vllm_omni_ext.serving.realtime import events, settings
from vllm_omni_ext.serving.realtime.conversation import (
    IN_PROGRESS,
    Conversation,
    Item,
    Part,
    check_size,
    make_item,
    messages,
)
from vllm_omni_ext.serving.realtime.events import (
    SERVER_ERROR,
    WRONG_VALUE,
    ClientError,
    Event,
    ItemReference,
    SessionFields,
    event,
)
from vllm_omni_ext.serving.realtime.limits import Limits
from vllm_omni_ext.serving.realtime.response import CANCELLED, COMPLETED, FAILED, INCOMPLETE, Response, Usage
from vllm_omni_ext.serving.realtime.settings import Offer, Settings
from vllm_omni_ext.serving.realtime.sound import SHORTEST_MS, InputBuffer, Sound, decoded
from vllm_omni_ext.serving.realtime.turns import (
    Completeness,
    IdleTimeout,
    SemanticVad,
    ServerVad,
    SpeechStarted,
    SpeechStopped,
    TurnDetector,
)

AUTO_RATIO = 0.8
"""Part of a conversation that stays in the prompt with `truncation` "auto", once it is too long."""

BLOCK_MARGIN_MS = 200
"""Milliseconds of sound that must follow a block: they have influence on its last samples and frames, by resampling (up
to 110 ms with soxr from 8 kHz) and by the windows of the spectrogram (12.5 ms)."""

STEPS_A_BLOCK = 4
"""Number of times that the blocks of a turn are computed during a block that follows: a louder sound may have changed
their features. Blocks that are unchanged are cached, so such a request computes a few tokens."""

LETTERS_A_TOKEN, MS_A_TOKEN, PICTURE_TOKENS = 4, 80, 1000
"""Estimates of an item's share of the prompt. They decide how many items are dropped, not whether."""

DRAINING = "server_shutting_down"


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Answer `messages` with the settings of a response."""

    response_id: str
    settings: Settings
    messages: list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Abort:
    """Abort the answer of a response, and drop its sound that has not been sent."""

    response_id: str


@dataclass(frozen=True, kw_only=True)
class ComputeAhead:
    """Compute the beginning of the prompt of the next response, up to the last whole block of the input sound.

    It replaces an earlier `ComputeAhead`.

    Attributes:
        messages: of the conversation, with the sound of the current turn as the last one.
    """

    settings: Settings
    messages: list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class StopAhead:
    """The turn of a `ComputeAhead` has ended: abort it if it is running. What it has computed can be used."""


@dataclass(frozen=True, kw_only=True)
class Transcribe:
    """Transcribe the sound of an item.

    Attributes:
        settings: `audio.input.transcription`.
    """

    item_id: str
    sound: Sound
    settings: Settings


@dataclass(frozen=True, kw_only=True)
class StopTranscribing:
    """The item of a transcription is gone."""

    item_id: str


@dataclass(frozen=True, kw_only=True)
class Detection:
    """Compute the probability of speech in sound of `format` that follows, whose first sample is at `from_ms`.

    `format` None: turn detection is off.
    """

    format: dict[str, Any] | None
    from_ms: float


@dataclass(frozen=True, kw_only=True)
class Detect:
    """Compute the probability of speech in `data`, and pass it to `Session.frames`."""

    data: bytes


Command = Generate | Abort | ComputeAhead | StopAhead | Transcribe | StopTranscribing | Detection | Detect
Out = Event | Command
Outs = list[Out]


class Playback(Protocol):
    """The playing of the sound that was sent, response by response."""

    def played_ms(self, response_id: str) -> float:
        """Return the milliseconds that were played."""

    def remaining_ms(self, response_id: str) -> float:
        """Return the milliseconds that were sent and are not played yet."""


class Session:
    """One session.

    Args:
        playback: of the sound that was sent.
        new_id: returns an id with a prefix, e.g. "item".
        expires_at: Unix time at which the session ends.
        config: settings that differ from the defaults, with the client's secret.
        completeness: of the turn detector; None: there is no semantic detection.

    Raises:
        ClientError: `config` cannot be met.
    """

    def __init__(
        self,
        offer: Offer,
        limits: Limits,
        playback: Playback,
        *,
        new_id: Callable[[str], str],
        expires_at: int,
        config: SessionFields | None = None,
        completeness: Completeness | None = None,
    ) -> None:
        self._offer = offer
        self._limits = limits
        self._playback = playback
        self._new_id = new_id
        self._completeness = completeness
        self.id = new_id("sess")
        self._conversation_id = new_id("conv")
        self.settings = settings.defaults(offer, self.id, expires_at)
        if config is not None:
            self.settings = settings.updated(self.settings, config, offer)
        self.conversation = Conversation(limits)
        self.buffer = InputBuffer(self._input["format"], limits.buffer_bytes)
        self._detector: TurnDetector | None = None
        self._speech_item = ""
        """Id of the item that the turn becomes, during a turn."""
        self._steps_ahead = 0
        """Length of the current turn's sound at the last `ComputeAhead`, in parts of a block (`STEPS_A_BLOCK`)."""
        self._responses: dict[str, Response] = {}
        self._current: Response | None = None
        """The response that writes to the conversation."""
        self._last_spoken: Response | None = None
        self._voice_fixed = False
        self._dropped: set[str] = set()
        """Ids of items that are no longer in prompts, because the conversation was too long."""
        self._transcribing: set[str] = set()
        self._refused: ClientError | None = None

    # -- beginning and end --------------------------------------------------------------------------------------

    def begin(self) -> Outs:
        """Return the first event."""
        return self._numbered([event("session.created", session=self.settings), *self._detect_anew()])

    @property
    def detector(self) -> TurnDetector | None:
        """The detector of turns; None: turn detection is off."""
        return self._detector

    @property
    def block_ms(self) -> float | None:
        """Length of the blocks of input sound that are computed before the turn ends; None: none is."""
        return self._offer.block_ms

    @property
    def busy(self) -> bool:
        """Whether a response is in progress."""
        return bool(self._responses)

    @property
    def responses(self) -> tuple[str, ...]:
        """Ids of the responses in progress."""
        return tuple(self._responses)

    def drain(self) -> Outs:
        """The server shuts down: no more responses begin. Return the error event for the client."""
        self._refused = ClientError("the server is shutting down", code=DRAINING, kind=SERVER_ERROR)
        return self._numbered([self._refused.event()])

    def error(self, error: ClientError) -> Outs:
        """Return an error event that belongs to no event of the client."""
        return self._numbered([error.event()])

    # -- events of the client -----------------------------------------------------------------------------------

    def receive(self, text: str) -> Outs:
        """Handle a message of the client; a wrong one gets an error event and changes nothing."""
        event_id = None
        try:
            data = events.parse(text, self._limits.values)
            event_id = events.event_id_of(data)
            outs = self._handle(events.read_event(data))
        except ClientError as error:
            outs = [error.event(event_id)]
        return self._numbered(outs)

    def _handle(self, given: events.ClientEvent) -> Outs:
        match given:
            case events.Append():
                return self._append(given)
            case events.Commit():
                return self._commit()
            case events.Clear():
                return self._clear()
            case events.SessionUpdate():
                return self._update(given.session)
            case events.ItemCreate():
                return self._create_item(given)
            case events.ItemDelete():
                return self._delete_item(given.item_id)
            case events.ItemRetrieve():
                found = self.conversation.find(given.item_id).public(audio=True)
                return [event("conversation.item.retrieved", item=found)]
            case events.ItemTruncate():
                return self._truncate(given)
            case events.ResponseCreate():
                return self._create_response(given.response)
            case events.ResponseCancel():
                return self._cancel(given.response_id)
        raise ClientError(
            f"{given.model_dump()['type']}: exists for WebRTC only; send response.cancel and "
            "conversation.item.truncate",
            code="unsupported_event",
            param="type",
        )

    def _update(self, fields: SessionFields) -> Outs:
        before = self._input
        self.settings = settings.updated(
            self.settings, fields, self._offer, voice_fixed=self._voice_fixed, buffered=len(self.buffer) > 0
        )
        outs: Outs = [event("session.updated", session=self.settings)]
        now = self._input
        self.buffer.use(now["format"])
        if (now["format"], now["turn_detection"]) != (before["format"], before["turn_detection"]):
            outs += self._detect_anew()
        return outs

    @property
    def _input(self) -> Settings:
        found: Settings = self.settings["audio"]["input"]
        return found

    # -- input sound --------------------------------------------------------------------------------------------

    def _append(self, given: events.Append) -> Outs:
        data = decoded(given.audio, self._input["format"], "audio")
        self.buffer.append(data)
        if self._detector is None:
            return self._compute_ahead()
        return [Detect(data=data)] if data else []

    def _commit(self) -> Outs:
        if self.buffer.end_ms - self.buffer.start_ms < SHORTEST_MS:
            raise ClientError(
                f"the input audio buffer must have {SHORTEST_MS} ms of sound or more",
                code="input_audio_buffer_commit_empty",
            )
        sound = self.buffer.peek()
        item = self._user_item(self._speech_item or self._new_id("item"), sound)
        self.conversation.check(item)
        self.buffer.clear()
        return [*self._forget_turn(), *self._add_sound(item)]

    def _clear(self) -> Outs:
        self.buffer.clear()
        return [*self._forget_turn(), event("input_audio_buffer.cleared")]

    def _forget_turn(self) -> Outs:
        self._speech_item = ""
        if self._detector is not None:
            self._detector.drop(self.buffer.end_ms)
        return self._stop_ahead()

    def _compute_ahead(self) -> Outs:
        """Return a command for the whole blocks of the turn's sound, if it has grown by a part of a block or more."""
        block = self._offer.block_ms
        if block is None or self._current is not None or self._refused is not None:
            return []
        if self._detector is not None and not self._detector.speaking:
            return []
        length = self.buffer.end_ms - self.buffer.start_ms - BLOCK_MARGIN_MS
        steps = int(length * STEPS_A_BLOCK // block)
        if steps < STEPS_A_BLOCK or steps <= self._steps_ahead:
            return []
        self._steps_ahead = steps
        item = self._user_item(self._speech_item, self.buffer.peek())
        prompt = messages(self.settings["instructions"], [*self._context(), item])
        return [ComputeAhead(settings=self.settings, messages=prompt)]

    def _stop_ahead(self) -> Outs:
        stop: Outs = [StopAhead()] if self._steps_ahead else []
        self._steps_ahead = 0
        return stop

    def _user_item(self, item_id: str, sound: Sound) -> Item:
        return Item(id=item_id, type="message", role="user", content=[Part(type="input_audio", sound=sound)])

    def _add_sound(self, item: Item) -> Outs:
        """Add an item with sound; it has been checked."""
        previous = self.conversation.add(item)
        outs: Outs = [
            event("input_audio_buffer.committed", previous_item_id=previous, item_id=item.id),
            *_added(item, previous),
        ]
        transcription, sound = self._input["transcription"], item.content[0].sound
        if transcription is not None and sound is not None:
            self._transcribing.add(item.id)
            outs.append(Transcribe(item_id=item.id, sound=sound, settings=transcription))
        return outs

    # -- turns --------------------------------------------------------------------------------------------------

    def _detect_anew(self) -> Outs:
        """Begin to detect turns as the settings are now."""
        found, was_on = self._input["turn_detection"], self._detector is not None
        self._speech_item, self._detector = "", None
        outs = self._stop_ahead()
        if found is None:
            return [*outs, Detection(format=None, from_ms=0)] if was_on else outs
        self._detector = TurnDetector(_detector_settings(found), self._completeness)
        self._detector.drop(self.buffer.start_ms)
        outs.append(Detection(format=self._input["format"], from_ms=self.buffer.start_ms))
        return [*outs, Detect(data=self.buffer.peek().data)] if len(self.buffer) else outs

    def frames(self, frames: Iterable[tuple[float, float]]) -> Outs:
        """Take frames of the input sound: the end of each in ms, and its probability of speech."""
        if self._detector is None:
            return []
        outs: Outs = []
        for turn in self._detector.write(frames):
            try:
                outs += self._turn(turn)
            except ClientError as error:
                outs.append(error.event())
        if self._detector is not None:
            self.buffer.drop_before(self._detector.needed_from_ms)
        return self._numbered([*outs, *self._compute_ahead()])

    def _turn(self, turn: SpeechStarted | SpeechStopped | IdleTimeout) -> Outs:
        if isinstance(turn, SpeechStarted):
            return self._speech_started(turn)
        item_id = self._speech_item or self._new_id("item")
        self._speech_item = ""
        if isinstance(turn, SpeechStopped):
            end = round(turn.audio_end_ms)
            outs: Outs = [event("input_audio_buffer.speech_stopped", audio_end_ms=end, item_id=item_id)]
            outs += self._stop_ahead()
            sound = self.buffer.take(to_ms=turn.audio_end_ms)
            return [*outs, *self._turn_ended(item_id, sound, create=self._input["turn_detection"]["create_response"])]
        start, end = round(turn.audio_start_ms), round(turn.audio_end_ms)
        outs = [event("input_audio_buffer.timeout_triggered", audio_start_ms=start, audio_end_ms=end, item_id=item_id)]
        sound = self.buffer.take(turn.audio_start_ms, turn.audio_end_ms)
        return [*outs, *self._turn_ended(item_id, sound, create=True)]

    def _speech_started(self, turn: SpeechStarted) -> Outs:
        self._speech_item = self._new_id("item")
        self.buffer.drop_before(turn.audio_start_ms)
        start = round(turn.audio_start_ms)
        outs: Outs = [event("input_audio_buffer.speech_started", audio_start_ms=start, item_id=self._speech_item)]
        return [*outs, *self._interrupt()] if self._input["turn_detection"]["interrupt_response"] else outs

    def _interrupt(self) -> Outs:
        """Cancel the response, and truncate the last sound at its played length."""
        spoken, outs = self._last_spoken, list[Out]()
        played = 0.0
        if spoken is not None and spoken.spoken is not None:
            played = self._playback.played_ms(spoken.id)
        if self._current is not None:
            outs += self._abort(self._current, "turn_detected")
        if spoken is not None and spoken.spoken is not None:
            item, part = spoken.spoken
            if item in self.conversation and played < part.sent_ms and part.heard_ms in (None, part.sent_ms):
                outs += self._cut(item, part, played)
        self._last_spoken = None
        return outs

    def _turn_ended(self, item_id: str, sound: Sound, *, create: bool) -> Outs:
        outs: Outs = []
        try:
            item = self._user_item(item_id, sound.at_least(SHORTEST_MS))
            self.conversation.check(item)
            outs += self._add_sound(item)
            if create:
                outs += self._create_response(None)
        except ClientError as error:
            outs.append(error.event())
        return outs

    # -- items --------------------------------------------------------------------------------------------------

    def _create_item(self, given: events.ItemCreate) -> Outs:
        found = events.read_item(given.item, "item")
        if isinstance(found, ItemReference):
            raise ClientError("item.type: is for `input` of a response", code=WRONG_VALUE, param="item.type")
        item = make_item(found, self.settings, self._new_id, "item")
        return [*_added(item, self.conversation.add(item, given.previous_item_id))]

    def _delete_item(self, item_id: str) -> Outs:
        item = self.conversation.find(item_id)
        if item.status == IN_PROGRESS:
            raise ClientError(
                "item_id: the item belongs to the response in progress; cancel it first",
                code="item_in_progress",
                param="item_id",
            )
        self.conversation.delete(item)
        self._dropped.discard(item_id)
        outs: Outs = [event("conversation.item.deleted", item_id=item_id)]
        if item_id in self._transcribing:
            self._transcribing.remove(item_id)
            outs.append(StopTranscribing(item_id=item_id))
        return outs

    def _truncate(self, given: events.ItemTruncate) -> Outs:
        item = self.conversation.find(given.item_id)
        parts = item.content
        if given.content_index >= len(parts) or not parts[given.content_index].spoken:
            raise ClientError(
                "content_index: the item has no sound of the assistant there", code=WRONG_VALUE, param="content_index"
            )
        part = parts[given.content_index]
        if given.audio_end_ms > math.ceil(part.sent_ms):  # clients round up
            raise ClientError(
                f"audio_end_ms: the sound has {math.ceil(part.sent_ms)} ms", code=WRONG_VALUE, param="audio_end_ms"
            )
        return self._cut(item, part, min(given.audio_end_ms, part.sent_ms))

    def _cut(self, item: Item, part: Part, heard_ms: float) -> Outs:
        part.heard_ms = heard_ms
        return [event("conversation.item.truncated", item_id=item.id, content_index=0, audio_end_ms=round(heard_ms))]

    # -- responses ----------------------------------------------------------------------------------------------

    def _create_response(self, fields: events.ResponseFields | None) -> Outs:
        if self._refused is not None:
            raise self._refused
        own = settings.of_response(self.settings, fields, self._offer, voice_fixed=self._voice_fixed)
        writes = fields is None or fields.conversation != "none"
        if writes and self._current is not None:
            raise ClientError(
                f"the conversation has the response {self._current.id} in progress; cancel it, or wait for its end",
                code="conversation_already_has_active_response",
            )
        if writes:
            self.conversation.check_room()
        if not writes and len(self._responses) - (self._current is not None) >= self._limits.responses:
            raise ClientError(
                f"at most {self._limits.responses} responses outside of the conversation run at once",
                code="too_many_responses",
            )
        given = None if fields is None else fields.input
        response = Response(
            self._new_id("resp"),
            own,
            conversation_id=self._conversation_id if writes else None,
            context=self._context() if given is None else self._given_context(given),
            metadata=None if fields is None else fields.metadata,
            new_id=self._new_id,
            opened=self._item_added,
            closed=self._item_done,
        )
        self._responses[response.id] = response
        if writes:
            self._current = response
            self._idle_from(None)
        return [*response.begin(), self._generate(response)]

    def _context(self) -> list[Item]:
        return [item for item in self.conversation if item.id not in self._dropped]

    def _given_context(self, given: list[dict[str, Any]]) -> list[Item]:
        """Return the items of `response.input`; they have the limits of a conversation."""
        context = []
        if len(given) > self._limits.items:
            message = f"response.input: may have {self._limits.items} items"
            raise ClientError(message, code="conversation_too_large", param="response.input")
        for at, each in enumerate(given):
            path = f"response.input[{at}]"
            found = events.read_item(each, path)
            if isinstance(found, ItemReference):
                context.append(self.conversation.find(found.id, f"{path}.id"))
            else:
                context.append(make_item(found, self.settings, self._new_id, path))
        check_size(context, self._limits)
        return context

    def _generate(self, response: Response) -> Generate:
        prompt = messages(response.settings["instructions"], response.context)
        return Generate(response_id=response.id, settings=response.settings, messages=prompt)

    def _item_added(self, item: Item) -> Event:
        previous = self.conversation.append_output(item)
        return event("conversation.item.added", previous_item_id=previous, item=item.public())

    def _item_done(self, item: Item) -> Event:
        return event("conversation.item.done", previous_item_id=self.conversation.before(item), item=item.public())

    def _cancel(self, response_id: str | None) -> Outs:
        found = self._current if response_id is None else self._responses.get(response_id)
        if found is None:
            raise ClientError("no such response is in progress", code="response_cancel_not_active", param="response_id")
        return self._abort(found, "client_cancelled")

    def _abort(self, response: Response, reason: str) -> Outs:
        return [Abort(response_id=response.id), *self._end(response, CANCELLED, {"reason": reason})]

    def _end(self, response: Response, status: str, details: dict[str, Any] | None = None) -> Outs:
        del self._responses[response.id]
        if response is self._current:
            self._current = None
            self._idle_from(self.buffer.end_ms + self._playback.remaining_ms(response.id))
        outs = response.end(status, details)
        if status != COMPLETED and response.spoken is not None:
            _, part = response.spoken
            if part.heard_ms is None and not (part.whole and part.sent_ms >= part.made_ms):
                part.heard_ms = part.sent_ms  # sound that was not sent cannot have been played
        return list(outs)

    def _idle_from(self, at_ms: float | None) -> None:
        if self._detector is not None:
            self._detector.idle_from(at_ms)

    # -- the model's answers; those of responses that have ended are dropped -------------------------------------

    def text(self, response_id: str, delta: str) -> Outs:
        """Take text of a response."""
        return self._of(response_id, lambda response: response.text(delta))

    def made(self, response_id: str, ms: float, *, last: bool) -> None:
        """Count sound of a response that waits to be sent."""
        if (response := self._responses.get(response_id)) is not None:
            response.made(ms, last=last)

    def sound(self, response_id: str, data: bytes, ms: float) -> Outs:
        """Take sound that is due, in the format of the response."""
        response = self._responses.get(response_id)
        if response is None:
            return []
        self._voice_fixed = True
        if response is self._current:
            self._last_spoken = response
        return self._numbered(response.sound(data, ms))

    def call(self, response_id: str, index: int, name: str | None, arguments: str) -> Outs:
        """Take a part of a function call; the first part has the name."""
        return self._of(response_id, lambda response: response.call(index, name, arguments))

    def generated(self, response_id: str, finish_reason: str, usage: Usage) -> Outs:
        """The model has ended with vLLM's `finish_reason`; sound may still wait to be sent."""
        return self._of(response_id, lambda response: response.generated(finish_reason, usage))

    def drained(self, response_id: str) -> Outs:
        """All of a response has been sent."""
        response = self._responses.get(response_id)
        if response is None:
            return []
        if response.cut_off:
            return self._numbered(self._end(response, INCOMPLETE, {"reason": "max_output_tokens"}))
        return self._numbered(self._end(response, COMPLETED))

    def failed(self, response_id: str, message: str, *, kind: str, code: str) -> Outs:
        """The model could not answer."""
        response = self._responses.get(response_id)
        if response is None:
            return []
        error = {"type": kind, "code": code, "message": message}
        return self._numbered(self._end(response, FAILED, {"error": error}))

    def shorten(self, response_id: str) -> Outs:
        """The prompt of a response was too long: drop its oldest items, if the settings allow it.

        Returns nothing if there is nothing to drop, or the response has ended.
        """
        response = self._responses.get(response_id)
        if response is None:
            return []
        truncation = response.settings["truncation"]
        if truncation == "disabled":
            return []
        ratio = AUTO_RATIO if truncation == "auto" else truncation["retention_ratio"]
        kept = shortened(response.context, ratio)
        if len(kept) == len(response.context):
            return []
        self._dropped.update(item.id for item in response.context[: len(response.context) - len(kept)])
        response.context = kept
        return [self._generate(response)]

    def _of(self, response_id: str, change: Callable[[Response], list[Event]]) -> Outs:
        response = self._responses.get(response_id)
        return [] if response is None else self._numbered(change(response))

    # -- transcripts of input sound -----------------------------------------------------------------------------

    def transcript(self, item_id: str, delta: str) -> Outs:
        """Take a part of an item's transcript."""
        if item_id not in self._transcribing:
            return []
        kind = "conversation.item.input_audio_transcription.delta"
        return self._numbered([event(kind, item_id=item_id, content_index=0, delta=delta)])

    def transcribed(self, item_id: str, text: str, usage: Usage) -> Outs:
        """Take the whole transcript of an item."""
        if item_id not in self._transcribing:
            return []
        self._transcribing.remove(item_id)
        self.conversation.find(item_id).content[0].text = text
        tokens = {
            "type": "tokens",
            "input_tokens": usage.prompt,
            "output_tokens": usage.text,
            "total_tokens": usage.prompt + usage.text,
            "input_token_details": {
                "text_tokens": usage.prompt - usage.prompt_audio,
                "audio_tokens": usage.prompt_audio,
            },
        }
        kind = "conversation.item.input_audio_transcription.completed"
        return self._numbered([event(kind, item_id=item_id, content_index=0, transcript=text, usage=tokens)])

    def not_transcribed(self, item_id: str, message: str, *, kind: str, code: str) -> Outs:
        """An item could not be transcribed."""
        if item_id not in self._transcribing:
            return []
        self._transcribing.remove(item_id)
        error = {"type": kind, "code": code, "message": message, "param": None}
        name = "conversation.item.input_audio_transcription.failed"
        return self._numbered([event(name, item_id=item_id, content_index=0, error=error)])

    def _numbered(self, outs: Iterable[Any]) -> Outs:
        """Return outs whose events have ids."""
        return [events.numbered(each, self._new_id) if isinstance(each, dict) else each for each in outs]


def _added(item: Item, previous: str | None) -> list[Event]:
    """Return the events about an item that is complete when it is added, after the item with the id `previous`."""
    names = ("conversation.item.added", "conversation.item.done")
    return [event(name, previous_item_id=previous, item=item.public()) for name in names]


def _detector_settings(found: Mapping[str, Any]) -> ServerVad | SemanticVad:
    if found["type"] == "semantic_vad":
        return SemanticVad(eagerness=found["eagerness"])
    names = ("threshold", "prefix_padding_ms", "silence_duration_ms", "idle_timeout_ms")
    return ServerVad(**{name: found[name] for name in names})


def shortened(items: list[Item], ratio: float) -> list[Item]:
    """Return the newest items whose estimated tokens are at most `ratio` of all items'; at least the last item.

    Items before the first message are dropped too, so that no result of a function remains without its call.
    """
    tokens = [_tokens(item) for item in items]
    left, first = float(sum(tokens)), 0
    most = left * ratio
    while first < len(items) - 1 and (first == 0 or left > most or items[first].type != "message"):
        left -= tokens[first]
        first += 1
    return items[first:]


def _tokens(item: Item) -> float:
    sound = sum(part.sound.ms for part in item.content if part.sound is not None)
    pictures = sum(part.image_url is not None for part in item.content)
    text = sum(len(part.heard()) for part in item.content) + len(item.arguments) + len(item.output)
    return 1 + text / LETTERS_A_TOKEN + sound / MS_A_TOKEN + pictures * PICTURE_TOKENS
