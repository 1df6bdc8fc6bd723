"""Flows of requests with sound output through Qwen3-Omni's stages. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_omni_ext.connectors.chunks import ALL, Chunk, ChunkSchedule, ChunkWriter
from vllm_omni_ext.connectors.codec_stream import MOST_JOINED, CodecError
from vllm_omni_ext.modalities.base import AUDIO, TEXT
from vllm_omni_ext.modalities.chunks import AudioChunk
from vllm_omni_ext.model_plugins.qwen3_omni.prompt import (
    HEADER,
    Medium,
    PromptSegments,
    SpecialIds,
    TalkerChunk,
    TalkerPrompt,
    prefix_keys,
    talker_prompt,
)
from vllm_omni_ext.model_plugins.qwen3_omni.voice import CODE2WAV, code2wav_stream
from vllm_omni_ext.model_plugins.qwen_omni.hidden_states import HiddenStates
from vllm_omni_ext.plugins.flow import Action, Emit, Extend, Fail, Finished, Forward, Open, Produced, Recompute
from vllm_omni_ext.wire.envelope import HiddenStatesChunkReady, StageError
from vllm_omni_ext.wire.stage_input import HiddenStatesRef

THINKER, TALKER = "thinker", "talker"
MOST_RECOMPUTATIONS = 3
"""Limit of repeated prefills in the thinker for a request whose hidden states the talker could not read."""

MOST_TOKENS = 16
"""Largest number of text tokens that a chunk for the talker waits for."""

TOO_SHORT = "the reply has fewer than two tokens, so there is nothing to speak"


@dataclass(frozen=True, kw_only=True)
class SpeechPlan:
    """Values of a spoken request that are fixed when it is opened.

    Attributes:
        prompt: the thinker's prompt ids.
        parts: user and assistant segments of the prompt.
        voice: name of the speaker, a key of `ids.speakers`.
        positions: int32 M-RoPE positions [3, talker prompt length] of a multimodal prompt, else None.
        media: media items of the thinker's prompt.
        scope: requests with different scopes share nothing in the talker's prefix cache.
    """

    prompt: Sequence[int]
    parts: PromptSegments
    voice: str
    ids: SpecialIds
    sample_rate: int
    positions: bytes | None = None
    media: Sequence[Medium] = ()
    scope: str = ""


class ReadAloudFlow:
    """Implements `plugins.flow.Flow` for a text that is read out: talker frames -> sound.

    Args:
        reply: ids of the text; at least one.
        frames: number of frames in each part that code2wav receives.
    """

    stages = frozenset({TALKER, CODE2WAV})
    outputs = frozenset({AUDIO})

    def __init__(self, speech: SpeechPlan, reply: Sequence[int] = (), *, frames: ChunkSchedule) -> None:
        self._speech = speech
        self._voice = code2wav_stream(frames, speech.sample_rate)
        self._hidden = HiddenStates(speech.parts.multimodal_count)
        self._talk: TalkerInput | None = None
        self._reply = tuple(reply)

    def begin(self) -> list[Action]:
        """Open the talker with the whole text."""
        self._talk = self._new_talk()
        self._talk.begin((*self._reply, self._speech.ids.tts_eos), last=True)
        return [self._open_talker()]

    def handle(self, event: Produced) -> list[Action]:
        """Return the actions that follow an event."""
        if event.stage == TALKER and isinstance(event.payload, StageError):
            return self._without_hidden_states(event.payload.reason)
        if event.finish in ("abort", "error"):
            return [Fail(f"the {event.stage} stage ended the request: {event.finish}")]
        return self._on_talker(event) if event.stage == TALKER else self._on_code2wav(event)

    def replay(self, stage: str) -> list[Action]:
        """Return the actions that open the request again in a stage that lost it, with all frames generated so far."""
        return [self._open_talker() if stage == TALKER else self._voice.again()]

    def _without_hidden_states(self, reason: str) -> list[Action]:
        return [Fail(f"the talker could not take the thinker's hidden states: {reason}")]

    def _new_talk(self) -> TalkerInput:
        speech = self._speech
        text, codec = talker_prompt(speech.prompt, speech.parts, speech.voice, speech.ids)
        keys = prefix_keys(
            speech.prompt,
            speech.parts,
            text,
            codec,
            positions=speech.positions,
            media=speech.media,
            scope=speech.scope,
        )
        return TalkerInput(text, codec, keys)

    def _open_talker(self) -> Open:
        talk, ids = self._talk, self._speech.ids
        assert talk is not None, "a stage can only lose a request that was opened there"
        talk.hidden = self._hidden.ref
        made = self._voice.frames.between(0, self._voice.frames.count).tolist()
        payload = TalkerPrompt(
            text=list(talk.text),
            codec=talk.codec,
            fill=ids.tts_pad,
            track=list(talk.track),
            positions=self._speech.positions,
            frames=made,
        )
        return Open(
            stage=TALKER,
            # The engine counts the prompt in padding ids, so that no penalty applies to it.
            prompt=[ids.codec_pad] * len(talk.codec) + [frame[0] for frame in made],
            payload=payload,
            last=talk.closed,
            prompt_positions=len(talk.text),
            step_inputs=len(talk.track),
            hidden_spans=self._speech.parts.talker_spans,
            hidden_states=talk.hidden,
            done=len(made),
            prefix_keys=talk.keys,
            stop=(ids.codec_eos,),
            **self._voice.joined,
        )

    def _on_talker(self, event: Produced) -> list[Action]:
        # The frame of the talker's last step (end of speech, or the length limit) is not part of the sound.
        done = event.finish is not None
        part = self._voice.take(None if done else event.payload, last=done, at=event.at, load=event.load)
        if done and not self._voice.frames.count:
            return [self._silence("the talker ended before its first frame"), Finished()]
        return [] if part is None else [part]

    def _on_code2wav(self, event: Produced) -> list[Action]:
        try:
            piece = self._voice.receive(event)
        except CodecError as error:
            return [Fail(f"code2wav could not decode the frames: {error}")]
        if piece is None:
            return []
        emit = self._sound(piece.samples.float().numpy().reshape(-1), piece.frames, last=piece.last)
        return [emit, Finished()] if piece.last else [emit]

    def _silence(self, note: str) -> Emit:
        return self._sound(np.zeros(0, np.float32), 0, note=note)

    def _sound(
        self,
        samples: np.ndarray[tuple[int, ...], np.dtype[np.float32]],
        frames: int,
        *,
        last: bool = True,
        note: str | None = None,
    ) -> Emit:
        spoken = self._voice.frames.between(0, frames)
        rate = self._speech.sample_rate
        return Emit(AudioChunk(samples=samples, sample_rate=rate, frames=spoken, note=note, last=last))


class SpeechFlow(ReadAloudFlow):
    """Implements `plugins.flow.Flow`: thinker tokens -> talker frames -> sound.

    The talker is opened with the request and computes its prompt while it arrives: text at once, multimodal positions
    when their hidden states arrive, and the last position after the thinker's first token. If the text is sent in one
    piece (`text: all`), the talker receives its prompt together with the text.

    Args:
        text: number of tokens in each chunk that the talker receives.
        text_too: the answer includes the text.
    """

    stages = frozenset({THINKER, TALKER, CODE2WAV})

    def __init__(
        self, speech: SpeechPlan, *, text: ChunkSchedule, frames: ChunkSchedule, text_too: bool = True
    ) -> None:
        super().__init__(speech, frames=frames)
        self.outputs = frozenset({TEXT, AUDIO}) if text_too else frozenset({AUDIO})
        self._text = ChunkWriter[int](text)
        self._recomputations = 0
        self._ahead = text.size(0) != ALL
        self._paced = self._ahead and frames.rate > 0
        # If the prompt contains the start of the assistant turn, that text is spoken too.
        self._begun: tuple[int, ...] = tuple(speech.prompt[speech.parts.header + HEADER :])

    def begin(self) -> list[Action]:
        """Forward the client's request, and open the talker with its prompt except the last position."""
        if not self._ahead:
            return [Forward(THINKER)]
        self._talk = self._new_talk()
        return [Forward(THINKER), self._open_talker()]

    def handle(self, event: Produced) -> list[Action]:
        """Return the actions that follow an event."""
        if event.stage != THINKER or event.finish in ("abort", "error"):
            actions = super().handle(event)
            return [*actions, *self._send_text()] if self._text.pending and event.stage == TALKER else actions
        if isinstance(event.payload, HiddenStatesChunkReady):
            self._hidden.add(event.payload)
        if not event.tokens and event.finish is None:  # hidden states of an unfinished prefill
            return self._more_hidden_states()
        tokens, self._begun = (*self._begun, *event.tokens), ()
        if event.finish is not None:
            # The last token is never an input of the thinker, so it has no hidden state. The end mark replaces it.
            tokens = (*(tokens[:-1] if event.tokens else tokens), self._speech.ids.tts_eos)
        return [*self._more_hidden_states(), *self._send_text(tokens, last=event.finish is not None)]

    def _send_text(self, tokens: Sequence[int] = (), *, last: bool = False) -> list[Action]:
        """Add tokens of the reply, and send the talker the next chunk of its text if it is due.

        With adaptive chunks, a chunk has at least half as many tokens as the talker has and has not used yet, so that
        fewer messages are sent and the talker does not wait.
        """
        least = 1
        if self._paced and self._talk is not None:
            unused = len(self._talk.track) - self._voice.frames.count - MOST_JOINED
            least = max(1, min(MOST_TOKENS, unused // 2))
        chunk = self._text.write(tokens, last=last, least=least)
        return [] if chunk is None else self._speak(chunk)

    def _speak(self, chunk: Chunk[int]) -> list[Action]:
        talk = self._talk or self._new_talk()
        if talk.begun:
            talk.take(chunk.items, chunk.last)
            return [_extend(track=chunk.items, last=chunk.last)]
        if chunk.items == (self._speech.ids.tts_eos,) and chunk.last:
            return [self._silence(TOO_SHORT), Finished()]
        if not (self._hidden.complete or self._recomputations):
            received = f"{self._hidden.count} of {self._hidden.expected}"
            return [Fail(f"the thinker handed over {received} hidden states of multimodal positions")]
        talk.begin(chunk.items, last=chunk.last)
        if self._talk is not None:
            return [_extend(text=chunk.items[:1], track=chunk.items[1:], last=chunk.last)]
        self._talk = talk
        return [self._open_talker()]

    def _more_hidden_states(self) -> list[Action]:
        """Send the talker the location of new hidden states."""
        ref, talk = self._hidden.ref, self._talk
        if ref is None or talk is None or (talk.hidden is not None and ref.count <= talk.hidden.count):
            return []
        talk.hidden = ref
        return [Extend(stage=TALKER, last=talk.closed, hidden_states=ref)]

    def _without_hidden_states(self, reason: str) -> list[Action]:
        """Restart a talker that could not read its hidden states: with another copy, or after a new prefill."""
        assert self._talk is not None and self._talk.hidden is not None
        self._hidden.lose(self._talk.hidden)
        if self._hidden.complete:
            return [self._open_talker()]
        self._recomputations += 1
        if self._recomputations > MOST_RECOMPUTATIONS:
            return super()._without_hidden_states(reason)
        return [self._open_talker(), Recompute(THINKER)]


def _extend(*, text: tuple[int, ...] = (), track: tuple[int, ...], last: bool) -> Extend:
    payload = TalkerChunk(text=text, track=track)
    return Extend(stage=TALKER, payload=payload, last=last, prompt_positions=len(text), step_inputs=len(track))


@dataclass
class TalkerInput:
    """Input that was sent to the talker: ids and keys of its prompt, the text track, and where hidden states are."""

    text: list[int]
    codec: list[int]
    keys: tuple[bytes, ...] = ()
    track: list[int] = field(default_factory=list)
    closed: bool = False
    hidden: HiddenStatesRef | None = None

    @property
    def begun(self) -> bool:
        """Whether the prompt is complete: its last position is the first spoken text token."""
        return len(self.text) == len(self.codec)

    def begin(self, items: Sequence[int], *, last: bool) -> None:
        """Add the first token id of the reply to the talker's prompt, and the other `items` to its later text input.

        Args:
            items: token ids of the reply.
            last: no more follow.
        """
        self.text += items[:1]
        self.take(items[1:], last)

    def take(self, items: Sequence[int], last: bool) -> None:
        self.track.extend(items)
        self.closed = last
