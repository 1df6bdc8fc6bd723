"""The messages with the input of the talker and of token2wav, and the parameters of token2wav. Pure.

Source: Transformers' `Qwen2_5OmniForConditionalGeneration.generate`. The talker's prompt has all positions of the
thinker's prompt, the id that opens the speaker's text, and the first token of the reply. After the prompt, its input is
the last code and the next token of the reply, then the end of the text, then padding. Each token of prompt and reply
comes with its hidden state.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

MEDIA = -1
"""Text id of a position whose input is a hidden state alone."""


class TalkerPrompt(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="prompt"):
    """The message that opens a request in the talker.

    Attributes:
        text: ids of the thinker's prompt (MEDIA for tokens of media).
        voice: id that opens the speaker's text.
        reply: ids of the reply that have a hidden state. The last token of a reply has none.
        ended: no id follows.
        positions: int32 M-RoPE positions [3, prompt length], row-major, of a prompt with media.
        codes: codes that another replica has generated.
    """

    text: list[int]
    voice: int
    reply: tuple[int, ...] = ()
    ended: bool = False
    positions: bytes | None = None
    codes: list[int] = []


class TalkerChunk(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="chunk"):
    """The message with more ids of the reply for an open request; fields as in `TalkerPrompt`."""

    reply: tuple[int, ...] = ()
    ended: bool = False


TalkerPayload = TalkerPrompt | TalkerChunk


class Token2WavParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of token2wav, those of Transformers' `Qwen2_5OmniToken2WavModel`.

    Attributes:
        seed: of the noise from which the sound is made; None: another one for each request.
        num_steps: times of the equation, one more than its steps. The work grows with it.
        guidance_scale: weight of the codes in each step.
        sway_coefficient: moves the times towards the beginning (negative) or the end.
    """

    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    num_steps: Annotated[int, msgspec.Meta(ge=2, le=50)] = 10
    guidance_scale: Annotated[float, msgspec.Meta(ge=0.0, le=10.0)] = 0.5
    sway_coefficient: Annotated[float, msgspec.Meta(ge=-1.0, le=1.0)] = -1.0


class Utterance(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="utterance"):
    """The message of the first part of a stream in token2wav: the speaker, and the parameters with a seed."""

    speaker: str
    params: Token2WavParams
