"""The state of one session of the Realtime API, as a state machine without I/O and without a clock.

`Connection` passes in the client's events, the frames of `SpeechFrames`, and the outputs of the model. Methods return
events (dicts), which `Connection` sends to the client, and commands (e.g. `Generate`), which `Connection` executes.
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
"""Fraction of the tokens that `truncation` "auto" keeps in a prompt that was too long; see `shortened`."""

BLOCK_MARGIN_MS = 200
"""Milliseconds of sound after a block (see `Offer.block_ms`) that must have arrived before the block is computed.

Later sound changes the last samples of a block by resampling (up to 110 ms with soxr from 8 kHz), and the last frames
of a block by the windows of the spectrogram (12.5 ms)."""

STEPS_A_BLOCK = 4
"""Number of `ComputeAhead` commands for each block length of a turn's sound.

Each command computes all blocks of the turn again, as louder sound that follows may change their features. Unchanged
blocks are in the prefix cache, so that a command computes few tokens."""

LETTERS_A_TOKEN, MS_A_TOKEN, PICTURE_TOKENS = 4, 80, 1000
"""Estimates for `shortened`: characters per token, milliseconds of sound per token, and tokens per picture.

They determine how many items are dropped from a prompt. Whether the prompt is too long does not depend on them."""

LEAST_UNPLAYED_MS = 1.0
"""Least length of unplayed sound, in ms, for which an interruption truncates an item."""


def shutting_down() -> ClientError:
    """Return a new error for a session of a server that is shutting down."""
    return ClientError("the server is shutting down", code="server_shutting_down", kind=SERVER_ERROR)


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Command: send the chat request of a response.

    Attributes:
        settings: settings of the response, which override those of the session.
        messages: chat messages of the prompt, from `conversation.messages`.
    """

    response_id: str
    settings: Settings
    messages: list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Abort:
    """Command: abort the chat request of a response, and drop the response's sound that has not been sent."""

    response_id: str


@dataclass(frozen=True, kw_only=True)
class ComputeAhead:
    """Command: compute the prompt of the next response during the user's turn, so that the prefix cache has it.

    The prompt is computed up to the last whole block (`Offer.block_ms`) of the turn's sound. The request of an earlier
    `ComputeAhead` is aborted.

    Attributes:
        settings: settings of the session.
        messages: chat messages of the conversation; the last one is the sound of the current turn.
    """

    settings: Settings
    messages: list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class StopAhead:
    """Command: abort the request of `ComputeAhead`, as its turn has ended. Computed blocks stay in the prefix cache."""


@dataclass(frozen=True, kw_only=True)
class Transcribe:
    """Command: transcribe the sound of a user's item.

    Attributes:
        settings: the session's `audio.input.transcription`.
    """

    item_id: str
    sound: Sound
    settings: Settings


@dataclass(frozen=True, kw_only=True)
class StopTranscribing:
    """Command: abort the transcription of an item, as the client has deleted the item."""

    item_id: str


@dataclass(frozen=True, kw_only=True)
class Detection:
    """Command: reset `SpeechFrames`, which computes the probabilities of speech, for the sound of the next `Detect`s.

    Attributes:
        format: format of the sound, e.g. {"type": "audio/pcm", "rate": 24000}; None: turn detection is off.
        from_ms: position of the first sample in the input sound of the session, in ms.
    """

    format: dict[str, Any] | None
    from_ms: float


@dataclass(frozen=True, kw_only=True)
class Detect:
    """Command: compute the probability of speech in each frame of `data`, and pass the frames to `Session.frames`."""

    data: bytes


Command = Generate | Abort | ComputeAhead | StopAhead | Transcribe | StopTranscribing | Detection | Detect
Out = Event | Command
Outs = list[Out]


class Playback(Protocol):
    """How much of the sound that was sent a client has played, by response; implemented by `Answers`."""

    def played_ms(self, response_id: str) -> float:
        """Return the milliseconds of a response's sound that the client has played; `math.inf`: all, long ago."""

    def remaining_ms(self, response_id: str) -> float:
        """Return the milliseconds of a response's sound that were sent, and that the client has not played yet."""


class Session:
    """The settings, conversation, input buffer, turn detection and responses of one session.

    Args:
        offer: properties of the served model.
        playback: how much of each response's sound the client has played.
        new_id: returns a new id with the given prefix, e.g. new_id("item").
        expires_at: Unix time at which the session ends.
        config: fields of `session` that the client's secret contains (see `ClientSecrets`); None: there is no secret.
        completeness: computes the probability that a turn is complete; None: `semantic_vad` is not available.

    Raises:
        ClientError: `config` has a field that this server does not support.
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
        """During a turn, and if detection is turned off within it: id of the item with the turn's sound; else ""."""
        self._steps_ahead = 0
        """Length of the turn's sound at the last `ComputeAhead`, in block lengths / `STEPS_A_BLOCK`; 0: none sent."""
        self._responses: dict[str, Response] = {}
        self._current: Response | None = None
        """The response in progress whose output items are added to the conversation; None: there is none."""
        self._last_spoken: Response | None = None
        self._voice_fixed = False
        self._dropped: set[str] = set()
        """Ids of items that prompts no longer contain, because a prompt was too long."""
        self._transcribing: set[str] = set()
        self._draining = False

    # -- beginning and end --------------------------------------------------------------------------------------

    def begin(self) -> Outs:
        """Return the event `session.created`, and the commands that start turn detection."""
        return self._numbered([event("session.created", session=self.settings), *self._detect_anew()])

    @property
    def detector(self) -> TurnDetector | None:
        """The detector of turns; None: turn detection is off."""
        return self._detector

    @property
    def block_ms(self) -> float | None:
        """Length in ms of the blocks of sound that `ComputeAhead` computes; None: no sound is computed ahead."""
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
        """Refuse new responses from now on, as the server shuts down. Return the error event for the client."""
        self._draining = True
        return self._numbered([shutting_down().event()])

    def error(self, error: ClientError) -> Outs:
        """Return the `error` event for an error that does not refer to the `event_id` of a client's event."""
        return self._numbered([error.event()])

    # -- events of the client -----------------------------------------------------------------------------------

    def receive(self, text: str) -> Outs:
        """Handle an event of the client (a JSON text). For an invalid event, return an `error` event."""
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
        sounding = len(self.buffer) > 0 or any(item.sound_bytes() for item in self.conversation)
        self.settings = settings.updated(
            self.settings, fields, self._offer, voice_fixed=self._voice_fixed, sounding=sounding
        )
        outs: Outs = [event("session.updated", session=self.settings)]
        now = self._input
        self.buffer.use(now["format"])
        if _detection(now) != _detection(before):
            outs += self._detect_anew(other_format=now["format"] != before["format"])
        return outs

    @property
    def _input(self) -> Settings:
        found: Settings = self.settings["audio"]["input"]
        return found

    # -- input sound --------------------------------------------------------------------------------------------

    def _append(self, given: events.Append) -> Outs:
        data = decoded(given.audio, self._input["format"], "audio")
        outs: Outs = []
        if self._detector is not None and self.buffer.must_empty_for(data):
            if self._detector.speaking:
                end_ms = self.buffer.end_ms
                self._detector.drop(end_ms)
                outs = self._turn(SpeechStopped(end_ms))
            else:  # without it, no sound would reach the detector again
                self.buffer.make_room_for(data)
        self.buffer.append(data)
        if self._detector is None:
            return self._compute_ahead()
        return [*outs, Detect(data=data)] if data else []

    def _commit(self) -> Outs:
        sound = self.buffer.peek()
        if sound.ms < SHORTEST_MS:
            raise ClientError(
                f"the input audio buffer must have {SHORTEST_MS} ms of sound or more",
                code="input_audio_buffer_commit_empty",
            )
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
        """Return a `ComputeAhead` if 1 / `STEPS_A_BLOCK` of a block or more has arrived since the last one, else []."""
        block = self._offer.block_ms
        if block is None or self._current is not None or self._draining:
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
        """Add an item with sound to the conversation; the caller has called `Conversation.check` for the item."""
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

    def _detect_anew(self, *, other_format: bool = False) -> Outs:
        """Turn detection of turns on or off, or give the detector other settings, as those of the session say.

        A turn and a pending idle timeout outlast a change of the settings. A client that turns detection off within a
        turn commits the turn itself, as the announced item, or turns detection on again, and the turn goes on.

        Args:
            other_format: the format of the input sound has changed; the buffer is empty then.

        Returns:
            commands to compute the probabilities of speech (`Detection`), when detection is turned on also those of the
            sound that is in the buffer (`Detect`).
        """
        found, start_ms = self._input["turn_detection"], self.buffer.start_ms
        detection = Detection(format=self._input["format"], from_ms=start_ms)
        if found is not None and self._detector is not None:
            self._detector.use(_detector_settings(found), self._completeness, from_ms=start_ms)
            return [detection] if other_format else []
        outs, was_on = self._stop_ahead(), self._detector is not None
        self._detector = None
        if found is None:
            return [*outs, Detection(format=None, from_ms=0)] if was_on else outs
        self._detector = TurnDetector(_detector_settings(found), self._completeness)
        self._detector.drop(start_ms)
        if self._speech_item:
            self._detector.go_on(start_ms)
        outs.append(detection)
        return [*outs, Detect(data=self.buffer.peek().data)] if len(self.buffer) else outs

    def frames(self, frames: Iterable[tuple[float, float]]) -> Outs:
        """Handle frames of the input sound, and return the events and commands of turns that start or end in them.

        Args:
            frames: (end of the frame in ms, probability of speech), from `SpeechFrames.push`.
        """
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
        """Cancel the current response, as the user speaks, and truncate the last spoken item at its played length."""
        spoken, outs = self._last_spoken, list[Out]()
        played = 0.0
        if spoken is not None and spoken.spoken is not None:
            played = self._playback.played_ms(spoken.id)
        if self._current is not None:
            outs += self._abort(self._current, "turn_detected")
        if spoken is not None and spoken.spoken is not None:
            item, part = spoken.spoken
            unplayed = part.sent_ms - played >= LEAST_UNPLAYED_MS
            if unplayed and item in self.conversation and part.heard_ms in (None, part.sent_ms):
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
        index = next(index for index, each in enumerate(item.content) if each is part)
        end_ms = round(heard_ms)
        return [event("conversation.item.truncated", item_id=item.id, content_index=index, audio_end_ms=end_ms)]

    # -- responses ----------------------------------------------------------------------------------------------

    def _create_response(self, fields: events.ResponseFields | None) -> Outs:
        if self._draining:
            raise shutting_down()
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
        own = settings.of_response(self.settings, fields, self._offer, voice_fixed=self._voice_fixed)
        if not own["tools"] and own["tool_choice"] not in ("auto", "none"):
            param = "response.tool_choice"
            raise ClientError(f"{param}: there are no `tools` to call", code=WRONG_VALUE, param=param)
        given = None if fields is None else fields.input
        response = Response(
            self._new_id("resp"),
            own,
            conversation_id=self._conversation_id if writes else None,
            context=self._context() if given is None else self._given_context(given),
            of_conversation=given is None,
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
        """Convert `response.input`, which replaces the conversation in the prompt, to items.

        Raises:
            ClientError: an item is invalid, or the items exceed the limits of a conversation.
        """
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
        if response.spoken is not None and (status != COMPLETED or response.calls_function):  # a call ends the speech
            _, part = response.spoken
            if part.heard_ms is None and not (part.whole and part.sent_ms >= part.made_ms):
                part.heard_ms = part.sent_ms  # sound that was not sent cannot have been played
        return list(outs)

    def _idle_from(self, at_ms: float | None) -> None:
        if self._detector is not None:
            self._detector.idle_from(at_ms)

    # -- outputs of the model; an output for a response that has ended is ignored --------------------------------

    def text(self, response_id: str, delta: str) -> Outs:
        """Add generated text to a response, and return its events."""
        return self._of(response_id, lambda response: response.text(delta))

    def made(self, response_id: str, ms: float, *, last: bool) -> None:
        """Add `ms` to the length of a response's generated sound; `sound` is called when that sound is sent.

        Args:
            last: the model has generated all sound of the response.
        """
        if (response := self._responses.get(response_id)) is not None:
            response.made(ms, last=last)

    def sound(self, response_id: str, data: bytes, ms: float) -> Outs:
        """Add sound to a response, and return the events that send it now.

        Args:
            data: `ms` milliseconds of sound in the response's format.
        """
        response = self._responses.get(response_id)
        if response is None:
            return []
        self._voice_fixed = True
        if response is self._current:
            self._last_spoken = response
        return self._numbered(response.sound(data, ms))

    def call(self, response_id: str, index: int, name: str | None, arguments: str) -> Outs:
        """Add a piece of a function call to a response, and return its events; see `Response.call`."""
        return self._of(response_id, lambda response: response.call(index, name, arguments))

    def generated(self, response_id: str, finish_reason: str, usage: Usage) -> Outs:
        """Record that the model has finished a response, whose sound may still wait to be sent; return its events.

        Args:
            finish_reason: vLLM's finish reason of the text.
        """
        return self._of(response_id, lambda response: response.generated(finish_reason, usage))

    def drained(self, response_id: str) -> Outs:
        """End a response after its last sound was sent, and return its last events."""
        response = self._responses.get(response_id)
        if response is None:
            return []
        if response.cut_off:
            return self._numbered(self._end(response, INCOMPLETE, {"reason": "max_output_tokens"}))
        return self._numbered(self._end(response, COMPLETED))

    def failed(self, response_id: str, message: str, *, kind: str, code: str) -> Outs:
        """End a response with an error, and return its last events.

        Args:
            kind, code: type and code of the error in the protocol.
        """
        response = self._responses.get(response_id)
        if response is None:
            return []
        error = {"type": kind, "code": code, "message": message}
        return self._numbered(self._end(response, FAILED, {"error": error}))

    def shorten(self, response_id: str) -> Outs:
        """Drop the oldest items of a response's prompt, which was too long for the model.

        Returns:
            A `Generate` with the shorter prompt; [] if `truncation` is "disabled", no item can be dropped, or the
            response has ended.
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
        if response.of_conversation:  # items of `response.input` are no reason to shorten other prompts
            dropped = response.context[: len(response.context) - len(kept)]
            self._dropped.update(item.id for item in dropped if item in self.conversation)  # others were deleted
        response.context = kept
        return [self._generate(response)]

    def _of(self, response_id: str, change: Callable[[Response], list[Event]]) -> Outs:
        response = self._responses.get(response_id)
        return [] if response is None else self._numbered(change(response))

    # -- transcripts of input sound -----------------------------------------------------------------------------

    def transcript(self, item_id: str, delta: str) -> Outs:
        """Return the event for a piece of the transcript of a user's item; [] if the item was deleted."""
        if item_id not in self._transcribing:
            return []
        kind = "conversation.item.input_audio_transcription.delta"
        return self._numbered([event(kind, item_id=item_id, content_index=0, delta=delta)])

    def transcribed(self, item_id: str, text: str, usage: Usage) -> Outs:
        """Store the whole transcript of a user's item, and return its event; [] if the item was deleted."""
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
        """Return the event for a transcription that has failed; [] if the item was deleted.

        Args:
            kind, code: type and code of the error in the protocol.
        """
        if item_id not in self._transcribing:
            return []
        self._transcribing.remove(item_id)
        error = {"type": kind, "code": code, "message": message, "param": None}
        name = "conversation.item.input_audio_transcription.failed"
        return self._numbered([event(name, item_id=item_id, content_index=0, error=error)])

    def _numbered(self, outs: Iterable[Any]) -> Outs:
        """Return events and commands; each event gets a new `event_id`."""
        return [events.numbered(each, self._new_id) if isinstance(each, dict) else each for each in outs]


def _added(item: Item, previous: str | None) -> list[Event]:
    """Return the two events about a new item that is complete already; `previous` is the id of the preceding item."""
    names = ("conversation.item.added", "conversation.item.done")
    return [event(name, previous_item_id=previous, item=item.public()) for name in names]


def _detection(found: Settings) -> tuple[Any, ServerVad | SemanticVad | None]:
    """Return the format of the input sound, and the settings of the turn detector (None: it is off).

    Args:
        found: `audio.input` of a session's settings.
    """
    turns = found["turn_detection"]
    return found["format"], None if turns is None else _detector_settings(turns)


def _detector_settings(found: Mapping[str, Any]) -> ServerVad | SemanticVad:
    if found["type"] == "semantic_vad":
        return SemanticVad(eagerness=found["eagerness"])
    names = ("threshold", "prefix_padding_ms", "silence_duration_ms", "idle_timeout_ms")
    return ServerVad(**{name: found[name] for name in names})


def shortened(items: list[Item], ratio: float) -> list[Item]:
    """Drop the oldest items until the estimated tokens of the others are at most `ratio` of those of all items.

    At least one item is dropped, and the last item is kept. Dropping goes on until the first kept item is a message, so
    that no function output is kept without its function call.

    Returns:
        The kept items.
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
