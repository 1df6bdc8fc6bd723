"""Flows of requests with sound output through Qwen2.5-Omni's stages. Pure.

The talker reads the thinker's hidden states of prompt and reply. The thinker exports them while it computes, and the
talker follows position by position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_omni_ext.connectors.chunks import ALL, ChunkSchedule, ChunkWriter
from vllm_omni_ext.connectors.codec_stream import CodecError
from vllm_omni_ext.modalities.base import AUDIO, TEXT
from vllm_omni_ext.modalities.chunks import AudioChunk
from vllm_omni_ext.model_plugins.qwen2_5_omni.messages import MEDIA, TalkerChunk, TalkerPrompt, Utterance
from vllm_omni_ext.model_plugins.qwen2_5_omni.voice import TOKEN2WAV, UtteranceStream
from vllm_omni_ext.model_plugins.qwen_omni.hidden_states import HiddenStates
from vllm_omni_ext.plugins.flow import Action, Emit, Extend, Fail, Finished, Forward, Open, Produced, Recompute
from vllm_omni_ext.wire.envelope import HiddenStatesChunkReady, StageError
from vllm_omni_ext.wire.stage_input import HiddenStatesRef

THINKER, TALKER = "thinker", "talker"
MOST_RECOMPUTATIONS = 3
"""Limit of repeated prefills in the thinker for a request whose hidden states the talker could not read."""

HEADER = 2
"""Number of positions in the talker's prompt after those of the thinker's prompt: the speaker's id, and the first token
of the reply."""

TOO_SHORT = "the reply has fewer than two tokens, so there is nothing to speak"


@dataclass(frozen=True, kw_only=True)
class CodecIds:
    """Special ids of the talker's vocabulary; speech ends when the talker samples `pad` or `end`."""

    pad: int
    begin: int
    end: int
    mask: int

    @classmethod
    def of(cls, config: Any) -> CodecIds:
        """Read the ids from a `Qwen2_5OmniConfig`."""
        talker = config.talker_config
        return cls(
            pad=talker.tts_codec_pad_token_id,
            begin=talker.tts_codec_start_token_id,
            end=talker.tts_codec_end_token_id,
            mask=talker.tts_codec_mask_token_id,
        )


@dataclass(frozen=True, kw_only=True)
class SpeechPlan:
    """Values of a spoken request that are fixed when it is opened.

    Attributes:
        prompt: the thinker's prompt ids.
        media: token ids of the placeholders of sounds, images and videos.
        voice: text id of the speaker, which precedes the reply in the talker's prompt.
        ids: special ids of the talker.
        utterance: message that starts the stream in token2wav: speaker and parameters, with a seed.
        delay: number of codes that must follow a code before its sound is final.
        positions: int32 M-RoPE positions [3, talker prompt length] of a prompt with media, else None.
    """

    prompt: Sequence[int]
    media: frozenset[int]
    voice: int
    ids: CodecIds
    utterance: Utterance
    delay: int
    sample_rate: int
    positions: bytes | None = None


class SpeechFlow:
    """Implements `plugins.flow.Flow`: thinker tokens and hidden states -> talker codes -> sound.

    The talker is opened with the request and computes its prompt while hidden states arrive. If the text is sent in one
    piece (`text: all`), the talker receives its prompt together with the text.

    Args:
        text: number of tokens in each chunk that the talker receives.
        frames: number of codes in each part that token2wav receives.
        text_too: the answer includes the text.
    """

    stages = frozenset({THINKER, TALKER, TOKEN2WAV})

    def __init__(
        self, speech: SpeechPlan, *, text: ChunkSchedule, frames: ChunkSchedule, text_too: bool = True
    ) -> None:
        self.outputs = frozenset({TEXT, AUDIO}) if text_too else frozenset({AUDIO})
        self._speech = speech
        self._sound = UtteranceStream(frames, speech.sample_rate, speech.utterance, speech.delay)
        self._hidden = HiddenStates(len(speech.prompt))
        self._writer = ChunkWriter[int](text)
        self._ahead = text.size(0) != ALL
        self._tokens: list[int] = []  # tokens of the reply so far
        self._complete = False  # no token follows `_tokens`
        self._computing = True  # the thinker has not ended, so that it exports all hidden states
        self._written = 0  # number of tokens of the reply that `_writer` has got
        self._given: list[int] = []  # tokens of the reply in the chunks that `_writer` has returned
        self._closed = False  # no token follows `_given`
        self._sent = 0  # number of tokens in `_given` that were sent to the talker
        self._ended = False  # all tokens of the reply were sent to the talker
        self._opened = False
        self._spoken = False  # the talker has ended
        self._announced: HiddenStatesRef | None = None
        self._recomputations = 0
        self._recomputing = False  # the thinker has got a `Recompute`, whose end is not reported

    def begin(self) -> list[Action]:
        """Forward the client's request, and open the talker with its prompt except the last position."""
        return [Forward(THINKER), *([self._open_talker()] if self._ahead else [])]

    def handle(self, event: Produced) -> list[Action]:
        """Return the actions that follow from an output of a stage."""
        if event.stage == TALKER and isinstance(event.payload, StageError):
            return self._without_hidden_states(event.payload.reason)
        if event.finish in ("abort", "error"):
            return [Fail(f"the {event.stage} stage ended the request: {event.finish}")]
        if event.stage == THINKER:
            return self._on_thinker(event)
        return self._on_talker(event) if event.stage == TALKER else self._on_token2wav(event)

    def replay(self, stage: str) -> list[Action]:
        """Return the actions that open the request again in a stage that lost it, with all codes generated so far."""
        return [self._open_talker() if stage == TALKER else self._sound.again()]

    def _on_thinker(self, event: Produced) -> list[Action]:
        if isinstance(event.payload, HiddenStatesChunkReady):
            self._hidden.add(event.payload)
        self._tokens += event.tokens
        if event.finish is not None:
            self._complete, self._computing = True, False
        return self._forward()

    def _forward(self) -> list[Action]:
        """Return the actions that send new tokens of the reply, and the location of hidden states, to the talker.

        A token is sent when its hidden state exists. After the talker's end, nothing is sent.
        """
        if self._spoken:
            return []
        if self._complete and len(self._tokens) < 2:
            return [self._silence(TOO_SHORT), Finished()]
        # The last token is never an input of the thinker, so it has no hidden state.
        spoken = len(self._tokens) - 1 if self._complete else len(self._tokens)
        if not (self._computing or self._recomputing or self._with_hidden_states(spoken) == spoken):
            return self._recompute("the thinker has exported too few of them")
        if not self._closed:
            usable = max(self._written, self._with_hidden_states(spoken))
            last = self._complete and usable == spoken
            chunk = self._writer.write(self._tokens[self._written : usable], last=last)
            self._written = usable
            if chunk is not None:
                self._given += chunk.items
                self._closed = chunk.last
        return self._extend_talker()

    def _with_hidden_states(self, tokens: int) -> int:
        """Return how many of the first `tokens` tokens of the reply have a hidden state."""
        return max(0, min(tokens, self._hidden.count - len(self._speech.prompt)))

    def _extend_talker(self) -> list[Action]:
        if not self._opened:
            return [self._open_talker()] if self._given and self._hidden.ref is not None else []
        before, was_ended = self._sent, self._ended
        self._take_stock()
        if self._sent == before and self._ended == was_ended:
            return self._more_hidden_states()
        self._announced = self._hidden.ref
        return [
            Extend(
                stage=TALKER,
                payload=TalkerChunk(reply=tuple(self._given[before : self._sent]), ended=self._ended),
                last=self._ended,
                prompt_positions=int(not before),
                step_inputs=self._sent - max(before, 1),
                hidden_states=self._announced,
            )
        ]

    def _take_stock(self) -> None:
        """Count the tokens of the reply that the talker may get: those whose hidden states exist.

        `_ended` becomes True when these are all tokens of the reply.
        """
        self._sent = max(self._sent, self._with_hidden_states(len(self._given)))
        self._ended = self._closed and self._sent == len(self._given)

    def _more_hidden_states(self) -> list[Action]:
        """Return the action that sends the talker the location of new hidden states; none if there are none."""
        ref, known = self._hidden.ref, self._announced
        if ref is None or not self._opened or (known is not None and ref.count <= known.count):
            return []
        self._announced = ref
        return [Extend(stage=TALKER, last=self._ended, hidden_states=ref)]

    def _open_talker(self) -> Open:
        speech, size = self._speech, len(self._speech.prompt)
        self._sent = 0
        self._take_stock()
        codes = [int(code) for code in self._sound.frames.between(0, self._sound.frames.count).ravel()]
        self._opened = True
        self._announced = self._hidden.ref
        payload = TalkerPrompt(
            text=[MEDIA if token in speech.media else token for token in speech.prompt],
            voice=speech.voice,
            reply=tuple(self._given[: self._sent]),
            ended=self._ended,
            positions=speech.positions,
            codes=codes,
        )
        return Open(
            stage=TALKER,
            # Penalties apply to the ids of the prompt, as in Transformers.
            prompt=[speech.ids.mask] * size + [speech.ids.pad, speech.ids.begin] + codes,
            payload=payload,
            last=self._ended,
            prompt_positions=size + 1 + min(self._sent, 1),
            step_inputs=max(self._sent - 1, 0),
            hidden_spans=((0, size), (size + 1, size + HEADER)),
            hidden_states=self._announced,
            done=len(codes),
            stop=(speech.ids.pad, speech.ids.end),
            **self._sound.joined,
        )

    def _without_hidden_states(self, reason: str) -> list[Action]:
        """Return the actions that restart a talker which could not read the thinker's hidden states.

        The talker reads another copy of the hidden states if there is one. Otherwise the replica that stored them was
        lost. If the thinker has ended, it computes prompt and reply again in one prefill. If it has not ended, it has
        been restarted on another replica and exports all hidden states again; or only its prefill replica was lost,
        and the second computation begins at the reply's end. The talker is opened with the first of them: until then
        it gets no input, for which its stage would wait `chunk_timeout_s` at most.
        """
        assert self._announced is not None
        self._hidden.lose(self._announced)
        if self._hidden.count >= len(self._speech.prompt) + len(self._given):
            return [self._open_talker()]
        if self._computing and self._hidden.ref is None:
            self._opened = False
            return []
        return [self._open_talker(), *([] if self._computing else self._recompute(reason))]

    def _recompute(self, reason: str) -> list[Action]:
        self._recomputations += 1
        if self._recomputations > MOST_RECOMPUTATIONS:
            return [Fail(f"the talker could not take the thinker's hidden states: {reason}")]
        return [self._again()]

    def _again(self) -> Action:
        self._recomputing = True
        return Recompute(THINKER, tokens=tuple(self._tokens[:-1]))  # the reply has ended: its last token is no input

    def _on_talker(self, event: Produced) -> list[Action]:
        done = self._spoken = event.finish is not None
        # The code with which speech ends is no sound; the last code at the length limit is.
        codes = event.tokens[:-1] if event.finish == "stop" else event.tokens
        frames = np.array(codes, np.int64)[:, None] if codes else None
        part = self._sound.take(frames, last=done, at=event.at, load=event.load)
        if done and not self._sound.frames.count:
            return [self._silence("the talker ended before its first code"), Finished()]
        return [] if part is None else [part]

    def _on_token2wav(self, event: Produced) -> list[Action]:
        try:
            piece = self._sound.receive(event)
        except CodecError as error:
            return [Fail(f"token2wav could not decode the codes: {error}", status=503 if error.retry else 500)]
        if piece is None:
            return []
        samples = piece.samples.float().numpy().reshape(-1)
        emit = self._chunk(samples, piece.frames, last=piece.last)
        return [emit, Finished()] if piece.last else [emit]

    def _silence(self, note: str) -> Emit:
        return self._chunk(np.zeros(0, np.float32), 0, note=note)

    def _chunk(self, samples: np.ndarray, codes: int, *, last: bool = True, note: str | None = None) -> Emit:
        spoken, rate = self._sound.frames.between(0, codes), self._speech.sample_rate
        return Emit(AudioChunk(samples=samples, sample_rate=rate, frames=spoken, note=note, last=last))


class ReadAloudFlow(SpeechFlow):
    """Implements `plugins.flow.Flow` for a text that is read out (`/v1/audio/speech`).

    The talker needs hidden states, so the thinker computes the text as its own reply. The one token that the thinker
    generates after it is dropped.

    Args:
        reply: ids of the text; at least one.
    """

    def __init__(self, speech: SpeechPlan, reply: Sequence[int], *, text: ChunkSchedule, frames: ChunkSchedule) -> None:
        super().__init__(speech, text=text, frames=frames, text_too=False)
        self._tokens = [*reply, 0]  # all tokens but the last are spoken
        self._complete = True

    def begin(self) -> list[Action]:
        """Open the thinker with conversation and text, and the talker with its prompt except the last position."""
        return [self._again(), *([self._open_talker()] if self._ahead else [])]

    def replay(self, stage: str) -> list[Action]:
        """Return the actions that open the request again in a stage that lost it."""
        return [self._again()] if stage == THINKER else super().replay(stage)

    def _on_thinker(self, event: Produced) -> list[Action]:
        if isinstance(event.payload, HiddenStatesChunkReady):
            self._hidden.add(event.payload)
        self._computing = self._computing and event.finish is None
        return self._forward()

    def _again(self) -> Action:
        self._computing = True
        prompt = [*self._speech.prompt, *self._tokens[:-1]]
        return Open(stage=THINKER, prompt=prompt, export=((0, len(prompt)),))
