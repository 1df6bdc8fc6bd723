"""The messages with the input of the talker and of token2wav, and the parameters of token2wav. Pure.

Source: Transformers' `Qwen2_5OmniForConditionalGeneration.generate`. The talker's prompt has all positions of the
thinker's prompt, the speaker's text id, and the first token of the reply. After the prompt, the talker's input at each
position is the code of the position before, with the next token of the reply; after the last token, with the end of
the text, then with padding. Each token of prompt and reply is accompanied by its hidden state of the thinker.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

MEDIA = -1
"""Text id of a position whose input is a hidden state alone."""


class TalkerPrompt(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="prompt"):
    """The message that opens a request in the talker.

    Attributes:
        text: ids of the thinker's prompt (MEDIA for placeholders of sounds, images and videos).
        voice: text id of the speaker.
        reply: ids of the reply that have a hidden state. The last token of a reply has none.
        ended: no id of the reply follows.
        positions: int32 M-RoPE positions [3, prompt length], row-major, of a prompt with media; None: a text prompt.
        codes: codes that a lost replica of the talker has generated for the request.
    """

    text: list[int]
    voice: int
    reply: tuple[int, ...] = ()
    ended: bool = False
    positions: bytes | None = None
    codes: list[int] = []


class TalkerChunk(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="chunk"):
    """The message with more ids of the reply for an open request of the talker.

    Attributes:
        reply: ids that follow those sent so far.
        ended: no id of the reply follows.
    """

    reply: tuple[int, ...] = ()
    ended: bool = False


TalkerPayload = TalkerPrompt | TalkerChunk


class Token2WavParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the token2wav stage, those of Transformers' `Qwen2_5OmniToken2WavModel`; see `solver.Solver`.

    Attributes:
        seed: seed of the noise from which the sound is generated; None: a random seed for each request.
        num_steps: number of times at which the equation is solved, one more than its steps. The work grows with it.
        guidance_scale: weight of the difference between the predictions with and without the codes.
        sway_coefficient: moves the times towards 0 (negative) or 1.
    """

    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    num_steps: Annotated[int, msgspec.Meta(ge=2, le=50)] = 10
    guidance_scale: Annotated[float, msgspec.Meta(ge=0.0, le=10.0)] = 0.5
    sway_coefficient: Annotated[float, msgspec.Meta(ge=-1.0, le=1.0)] = -1.0


class Utterance(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="utterance"):
    """The message with part 0 of an utterance for token2wav.

    Attributes:
        speaker: name of the speaker.
        params: parameters of the utterance; `seed` is set.
    """

    speaker: str
    params: Token2WavParams
