"""How a spoken request passes through Qwen3-Omni's stages. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_omni_ext.connectors.chunks import ALL, Chunk, ChunkSchedule, ChunkWriter
from vllm_omni_ext.model_plugins.qwen3_omni.prompt import HEADER, SpecialIds, Spoken, talker_prompt
from vllm_omni_ext.model_plugins.qwen3_omni.voice import Voice, VoiceError
from vllm_omni_ext.orchestrator.flow import Action, Emit, Extend, Fail, Finished, Open, Produced, Repeat
from vllm_omni_ext.wire.handoff import GIVEN
from vllm_omni_ext.wire.rows import Given, Notice

THINKER, TALKER = "thinker", "talker"
MOST_REPEATS = 3
"""How often the thinker reads a prompt again, because the talker could not take what it had made of it."""

TOO_SHORT = "the reply has fewer than two tokens, so there is nothing to speak"


@dataclass(frozen=True, kw_only=True)
class Speech:
    """What is fixed when the request is opened.

    Attributes:
        prompt: the thinker's prompt ids.
        positions: int32 M-RoPE positions [3, talker prompt length] of a multimodal prompt, else None.
    """

    prompt: Sequence[int]
    parts: Spoken
    voice: str
    ids: SpecialIds
    sample_rate: int
    positions: bytes | None = None


class SpeechFlow:
    """Implements `orchestrator.flow.Flow`: thinker tokens -> talker frames -> sound.

    The talker is opened with the request and computes its prompt as far as that is known: text at once, multimodal
    positions as their rows come, and the last position when the thinker's first token is there. If the text is handed
    over in one piece (`text: all`), the talker gets its prompt together with it.
    """

    def __init__(self, speech: Speech, *, text: ChunkSchedule, frames: ChunkSchedule) -> None:
        self._speech = speech
        self._rows = Rows(speech.parts.row_count)
        self._text = ChunkWriter[int](text)
        self._voice = Voice(frames)
        self._talk: _Talk | None = None
        self._repeated = 0
        self._ahead = text.size(0) != ALL
        # An assistant turn that the prompt has begun already is spoken too.
        self._begun: tuple[int, ...] = tuple(speech.prompt[speech.parts.header + HEADER :])

    def begin(self) -> list[Action]:
        """Open the talker with what is known of its prompt."""
        if not self._ahead:
            return []
        self._talk = self._new_talk()
        return [self._open_talker()]

    def handle(self, event: Produced) -> list[Action]:
        """Decide what follows from an event."""
        if event.stage == TALKER and isinstance(event.payload, str):
            return self._without_rows(event.payload)
        if event.finish in ("abort", "error"):
            return [Fail(f"the {event.stage} stage ended the request: {event.finish}")]
        match event.stage:
            case "thinker":
                return self._thought(event)
            case "talker":
                return self._said(event)
            case _:
                return self._sounded(event)

    def _thought(self, event: Produced) -> list[Action]:
        if event.payload is not None:
            self._rows.add(event.payload)
        if not event.tokens and event.finish is None:  # rows of a prefill that goes on
            return self._more_rows()
        tokens, self._begun = (*self._begun, *event.tokens), ()
        if event.finish is not None:
            # The last token is never fed to the thinker, so it has no row: the end mark takes its place.
            tokens = (*(tokens[:-1] if event.tokens else tokens), self._speech.ids.tts_eos)
        chunk = self._text.write(tokens, last=event.finish is not None)
        return [*self._more_rows(), *([] if chunk is None else self._speak(chunk))]

    def replay(self, stage: str) -> list[Action]:
        """What opens the request again in a stage that lost it: everything known so far, frames made included."""
        return [self._open_talker() if stage == TALKER else self._voice.again()]

    def _speak(self, chunk: Chunk[int]) -> list[Action]:
        talk = self._talk or self._new_talk()
        if talk.begun:
            talk.take(chunk.items, chunk.last)
            return [Extend(TALKER, chunk.items, chunk.last)]
        if chunk.items == (self._speech.ids.tts_eos,) and chunk.last:
            return [self._silence(TOO_SHORT), Finished()]
        if not (self._rows.complete or self._repeated):
            return [Fail(f"the thinker handed over {self._rows.count} of {self._rows.due} multimodal rows")]
        first, track = chunk.items[:1], chunk.items[1:]
        talk.text += first
        talk.take(track, chunk.last)
        if self._talk is not None:
            return [Extend(TALKER, track, chunk.last, first)]
        self._talk = talk
        return [self._open_talker()]

    def _more_rows(self) -> list[Action]:
        """Tell the talker of rows that it has not been told of."""
        given, talk = self._rows.given, self._talk
        if given is None or talk is None or (talk.given is not None and given.count <= talk.given.count):
            return []
        talk.given = given
        return [Extend(TALKER, (), talk.closed, more={GIVEN: given.plain()})]

    def _without_rows(self, reason: str) -> list[Action]:
        """The talker could not take its rows and has ended: it begins anew with those of another place, or new ones."""
        assert self._talk is not None and self._talk.given is not None
        self._rows.lose(self._talk.given)
        if self._rows.complete:
            return [self._open_talker()]
        self._repeated += 1
        if self._repeated > MOST_REPEATS:
            return [Fail(f"the talker could not take the thinker's rows: {reason}")]
        return [self._open_talker(), Repeat(THINKER)]

    def _new_talk(self) -> _Talk:
        return _Talk(*talker_prompt(self._speech.prompt, self._speech.parts, self._speech.voice, self._speech.ids))

    def _open_talker(self) -> Open:
        talk, ids = self._talk, self._speech.ids
        assert talk is not None, "a stage can only lose what it was given"
        handoff: dict[str, Any] = {
            "text": talk.text,
            "codec": talk.codec,
            "fill": ids.tts_pad,
            "track": list(talk.track),
            "last": talk.closed,
            "rows": self._speech.parts.talker_rows,
        }
        talk.given = self._rows.given
        if talk.given is not None:
            handoff[GIVEN] = talk.given.plain()
        if self._speech.positions is not None:
            handoff["positions"] = self._speech.positions
        made = self._voice.frames.between(0, self._voice.frames.count).tolist()
        if made:
            handoff["frames"] = made
        # The engine counts the prompt in ids that no penalty and no sampling can touch.
        prompt = [ids.codec_pad] * len(talk.codec) + [frame[0] for frame in made]
        return Open(TALKER, prompt, handoff, stop=(ids.codec_eos,), done=len(made))

    def _said(self, event: Produced) -> list[Action]:
        # The frame of the step that ends the talker (end of speech, or the length limit) is not part of the sound.
        done = event.finish is not None
        part = self._voice.take(None if done else event.payload, last=done, at=event.at)
        if done and not self._voice.frames.count:
            return [self._silence("the talker ended before its first frame"), Finished()]
        return [] if part is None else [part]

    def _sounded(self, event: Produced) -> list[Action]:
        try:
            piece = self._voice.heard(event)
        except VoiceError as error:
            return [Fail(f"code2wav could not decode the frames: {error}")]
        if piece is None:
            return []
        emit = Emit("audio", piece.samples, self._facts(piece.frames), piece.last)
        return [emit, Finished()] if piece.last else [emit]

    def _silence(self, note: str) -> Emit:
        return Emit("audio", None, self._facts(0, note))

    def _facts(self, frames: int, note: str | None = None) -> dict[str, Any]:
        spoken = self._voice.frames.between(0, frames)
        return {"sample_rate": self._speech.sample_rate, "frames": spoken, "note": note}


@dataclass
class _Talk:
    """What the talker has been given: its prompt, the text track so far, and rows."""

    text: list[int]
    codec: list[int]
    track: list[int] = field(default_factory=list)
    closed: bool = False
    given: Given | None = None

    @property
    def begun(self) -> bool:
        """Whether the prompt has its last position, the first spoken text token."""
        return len(self.text) == len(self.codec)

    def take(self, items: Sequence[int], last: bool) -> None:
        self.track.extend(items)
        self.closed = last


class Rows:
    """Where exported rows are. A thinker that takes a request over exports them anew: then there are two places."""

    def __init__(self, due: int) -> None:
        self.due = due
        self._places: dict[tuple[str, str], Given] = {}
        self._lost: set[tuple[str, str]] = set()

    @property
    def given(self) -> Given | None:
        """The place with the most rows, of equal ones the latest; None if there is none."""
        return max(reversed(self._places.values()), key=lambda given: given.count, default=None)

    @property
    def count(self) -> int:
        return 0 if self.given is None else self.given.count

    @property
    def complete(self) -> bool:
        return self.count >= self.due

    def add(self, notice: Notice) -> None:
        """More rows lie somewhere; ValueError if there is a gap before them, or if they could not be put there."""
        if notice.failed:
            raise ValueError(f"the thinker could not hand its rows over: {notice.failed}")
        place = notice.source, notice.name
        if place in self._lost:
            return
        known = self._places[place].count if place in self._places else 0
        if notice.first != known:
            raise ValueError(f"multimodal rows {known} to {notice.first} are missing")
        self._places[place] = Given(source=notice.source, name=notice.name, count=known + notice.count)

    def lose(self, given: Given) -> None:
        """Rows cannot be taken from where these are."""
        place = given.source, given.name
        self._lost.add(place)
        self._places.pop(place, None)
