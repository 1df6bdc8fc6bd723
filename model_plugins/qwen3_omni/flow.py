"""How a spoken request passes through Qwen3-Omni's stages. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_omni_ext.connectors.chunks import ALL, Chunk, ChunkSchedule, ChunkWriter
from vllm_omni_ext.model_plugins.qwen3_omni.prompt import HEADER, SpecialIds, Spoken, talker_prompt
from vllm_omni_ext.model_plugins.qwen3_omni.voice import Voice, VoiceError
from vllm_omni_ext.orchestrator.flow import Action, Emit, Extend, Fail, Finished, Open, Produced

THINKER, TALKER = "thinker", "talker"
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
        self._rows = RowCollector(speech.parts.row_count)
        self._text = ChunkWriter[int](text)
        self._voice = Voice(frames)
        self._talk: _Talk | None = None
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
        rows = None if event.payload is None else self._rows.add(*event.payload)
        handed: list[Action] = [] if rows is None or self._talk is None else [Extend(TALKER, (), False, rows=[rows])]
        if not event.tokens and event.finish is None:  # rows of a prefill that goes on
            return handed
        tokens, self._begun = (*self._begun, *event.tokens), ()
        if event.finish is not None:
            # The last token is never fed to the thinker, so it has no row: the end mark takes its place.
            tokens = (*(tokens[:-1] if event.tokens else tokens), self._speech.ids.tts_eos)
        chunk = self._text.write(tokens, last=event.finish is not None)
        return handed if chunk is None else [*handed, *self._speak(chunk)]

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
        if not self._rows.complete:
            return [Fail(f"the thinker handed over {self._rows.count} of {self._rows.due} multimodal rows")]
        first, track = chunk.items[:1], chunk.items[1:]
        talk.text += first
        talk.take(track, chunk.last)
        if self._talk is not None:
            return [Extend(TALKER, track, chunk.last, prompt=first)]
        self._talk = talk
        return [self._open_talker()]

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
        if self._speech.positions is not None:
            handoff["positions"] = self._speech.positions
        made = self._voice.frames.between(0, self._voice.frames.count).tolist()
        if made:
            handoff["frames"] = made
        # The engine counts the prompt in ids that no penalty and no sampling can touch.
        prompt = [ids.codec_pad] * len(talk.codec) + [frame[0] for frame in made]
        return Open(TALKER, prompt, handoff, rows=self._rows.pieces, stop=(ids.codec_eos,), done=len(made))

    def _said(self, event: Produced) -> list[Action]:
        # The frame of the step that ends the talker (end of speech, or the length limit) is not part of the sound.
        done = event.finish is not None
        if done:
            self._rows.release()
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
    """What the talker has been given: its prompt, and the text track so far."""

    text: list[int]
    codec: list[int]
    track: list[int] = field(default_factory=list)
    closed: bool = False

    @property
    def begun(self) -> bool:
        """Whether the prompt has its last position, the first spoken text token."""
        return len(self.text) == len(self.codec)

    def take(self, items: Sequence[int], last: bool) -> None:
        self.track.extend(items)
        self.closed = last


class RowCollector:
    """Collects exported rows in order, whatever was sent twice after a preemption."""

    def __init__(self, due: int) -> None:
        self.due = due
        self.count = 0
        self._pieces: list[Any] = []

    @property
    def complete(self) -> bool:
        return self.count >= self.due

    def add(self, first: int, rows: Any) -> Any | None:
        """Take rows whose first one has index `first`; known ones are skipped, a gap is an error.

        Returns:
            Those that are new; None if none are.
        """
        if first > self.count:
            raise ValueError(f"multimodal rows {self.count} to {first} are missing")
        new = rows[self.count - first :]
        if not len(new):
            return None
        self._pieces.append(new)
        self.count += len(new)
        return new

    @property
    def pieces(self) -> Any:
        """All pieces in order; None if there are none."""
        return list(self._pieces) or None

    def release(self) -> None:
        """Give the pieces up: nobody will ask for them again."""
        self._pieces = []
