"""How a spoken request passes through Qwen3-Omni's stages. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from vllm_omni_ext.connectors.chunks import Chunk, ChunkReader, ChunkSchedule, ChunkWriter
from vllm_omni_ext.model_plugins.qwen3_omni.prompt import HEADER, SpecialIds, Spoken, talker_prompt
from vllm_omni_ext.orchestrator.flow import Action, Emit, Extend, Fail, Finished, Open, Produced

THINKER, TALKER, CODE2WAV = "thinker", "talker", "code2wav"
POOLING_TASK: Literal["token_embed"] = "token_embed"
"""The task every request names. vLLM's V2 model runner, its default on GPUs, accepts only its own tasks (not "plugin");
this one reads no prefix cache and leaves the output as the pooler returns it, on both runners."""
ONE_UTTERANCE = {"task": POOLING_TASK, "extra_kwargs": {"last": True}}  # what code2wav's pooler expects
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
    """Implements `orchestrator.flow.Flow`: thinker tokens -> talker frames -> sound."""

    def __init__(self, speech: Speech, *, text: ChunkSchedule, frames: ChunkSchedule) -> None:
        self._speech = speech
        self._rows = RowCollector(speech.parts.row_count)
        self._text = ChunkWriter[int](text)
        self._codec = ChunkWriter[tuple[int, ...]](frames)
        self._heard = ChunkReader[tuple[int, ...]]()
        self._frames: list[tuple[int, ...]] = []
        self._talk: _Talk | None = None
        # An assistant turn that the prompt has begun already is spoken too.
        self._begun: tuple[int, ...] = tuple(speech.prompt[speech.parts.header + HEADER :])

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
        if event.payload is not None:
            self._rows.add(*event.payload)
        if not event.tokens and event.finish is None:  # rows of a prefill that goes on
            return []
        tokens, self._begun = (*self._begun, *event.tokens), ()
        if event.finish is not None:
            # The last token is never fed to the thinker, so it has no row: the end mark takes its place.
            tokens = (*(tokens[:-1] if event.tokens else tokens), self._speech.ids.tts_eos)
        return [
            action for chunk in self._text.write(tokens, last=event.finish is not None) for action in self._speak(chunk)
        ]

    def replay(self, stage: str) -> list[Action]:
        """What opens the request again in a stage that lost it: everything known so far, frames made included."""
        return [self._open_talker() if stage == TALKER else _open_vocoder(self._frames)]

    def _speak(self, chunk: Chunk[int]) -> list[Action]:
        if self._talk is not None:
            self._talk.take(chunk.items, chunk.last)
            return [Extend(TALKER, chunk.items, chunk.last)]
        if chunk.items == (self._speech.ids.tts_eos,) and chunk.last:
            return [self._sound(None, note=TOO_SHORT), Finished()]
        if not self._rows.complete:
            return [Fail(f"the thinker handed over {self._rows.count} of {self._rows.due} multimodal rows")]
        first, *track = chunk.items
        text, codec = talker_prompt(
            self._speech.prompt, self._speech.parts, first, self._speech.voice, self._speech.ids
        )
        self._talk = _Talk(text, codec, track, chunk.last)
        return [self._open_talker()]

    def _open_talker(self) -> Open:
        talk, ids = self._talk, self._speech.ids
        assert talk is not None, "a stage can only lose what it was given"
        handoff: dict[str, Any] = {
            "text": talk.text,
            "codec": talk.codec,
            "fill": ids.tts_pad,
            "track": list(talk.track),
            "last": talk.closed,
            "rows": self._rows.due,
        }
        if self._speech.positions is not None:
            handoff["positions"] = self._speech.positions
        if self._frames:
            handoff["frames"] = [list(frame) for frame in self._frames]
        # The engine counts the prompt in ids that no penalty and no sampling can touch.
        prompt = [ids.codec_pad] * len(talk.text) + [frame[0] for frame in self._frames]
        return Open(TALKER, prompt, handoff, rows=self._rows.pieces, stop=(ids.codec_eos,), done=len(self._frames))

    def _said(self, event: Produced) -> list[Action]:
        # The frame of the step that ends the talker (end of speech, or the length limit) is not part of the sound.
        done = event.finish is not None
        if done:
            self._rows.release()
        frames = [] if event.payload is None or done else [tuple(frame) for frame in event.payload.tolist()]
        self._frames += frames
        return [action for chunk in self._codec.write(frames, last=done) for action in self._voice(chunk)]

    def _voice(self, chunk: Chunk[tuple[int, ...]]) -> list[Action]:
        frames = self._heard.read(chunk)
        if not self._frames:
            return [self._sound(None, note="the talker ended before its first frame"), Finished()]
        return [_open_vocoder(frames)]

    def _sounded(self, event: Produced) -> list[Action]:
        if event.payload is None or not len(event.payload):
            return [Fail("code2wav could not decode the frames")]
        return [self._sound(event.payload), Finished()]

    def _sound(self, samples: Any, note: str | None = None) -> Emit:
        facts = {"sample_rate": self._speech.sample_rate, "frames": tuple(self._frames), "note": note}
        return Emit("audio", samples, facts)


def _open_vocoder(frames: Sequence[tuple[int, ...]]) -> Open:
    return Open(CODE2WAV, [code for frame in frames for code in frame], pooling=ONE_UTTERANCE)


@dataclass
class _Talk:
    """What the talker has been given: its prompt, and the text track so far."""

    text: list[int]
    codec: list[int]
    track: list[int]
    closed: bool

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

    def add(self, first: int, rows: Any) -> None:
        """Take rows whose first one has index `first`; known ones are skipped, a gap is an error."""
        if first > self.count:
            raise ValueError(f"multimodal rows {self.count} to {first} are missing")
        new = rows[self.count - first :]
        self._pieces.append(new)
        self.count += len(new)

    @property
    def pieces(self) -> Any:
        """All pieces in order; None if there are none."""
        return list(self._pieces) or None

    def release(self) -> None:
        """Give the pieces up: nobody will ask for them again."""
        self._pieces = []
