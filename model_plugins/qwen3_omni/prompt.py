"""Computes the talker's prompt from the thinker's token ids, and defines the messages with the talker's input. Pure.

Source: Transformers' `Qwen3OmniMoeForConditionalGeneration.generate` (`_get_talker_user_parts`,
`_get_talker_assistant_parts`). The talker's prompt contains all user segments, but no system or earlier assistant
segments. After them come the last assistant header: three header ids, four pads, the begin mark, and the first text
token.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, NamedTuple

import msgspec
import numpy as np

from vllm_omni_ext.wire.stage_input import KEY_POSITIONS

MULTIMODAL = -1  # text id of a position whose input is a hidden state
NO_CODEC = -1  # codec id of a position without a code
HEADER = 3  # <|im_start|> assistant \n
PADS = 4


@dataclass(frozen=True, kw_only=True)
class SpecialIds:
    """Special token ids, read from a checkpoint's config."""

    im_start: int
    user: int
    assistant: int
    tts_bos: int
    tts_eos: int
    tts_pad: int
    multimodal: frozenset[int]
    codec_nothink: int
    codec_think_bos: int
    codec_think_eos: int
    codec_pad: int
    codec_bos: int
    codec_eos: int
    speakers: Mapping[str, int]

    @classmethod
    def of(cls, config: Any) -> SpecialIds:
        """Read the ids from a `Qwen3OmniMoeConfig`."""
        talker, thinker = config.talker_config, config.thinker_config
        return cls(
            im_start=config.im_start_token_id,
            user=config.user_token_id,
            assistant=config.assistant_token_id,
            tts_bos=config.tts_bos_token_id,
            tts_eos=config.tts_eos_token_id,
            tts_pad=config.tts_pad_token_id,
            multimodal=frozenset((thinker.audio_token_id, thinker.image_token_id, thinker.video_token_id)),
            codec_nothink=talker.codec_nothink_id,
            codec_think_bos=talker.codec_think_bos_id,
            codec_think_eos=talker.codec_think_eos_id,
            codec_pad=talker.codec_pad_id,
            codec_bos=talker.codec_bos_id,
            codec_eos=talker.codec_eos_token_id,
            speakers={name.lower(): int(i) for name, i in talker.speaker_id.items()},
        )


@dataclass(frozen=True)
class PromptSegments:
    """Segments (turns of a conversation) of a thinker prompt.

    Attributes:
        user: ranges [start, stop) of the user segments.
        header: position of the last assistant header.
        multimodal: ranges of multimodal positions inside the user segments, ascending.
    """

    user: tuple[tuple[int, int], ...]
    header: int
    multimodal: tuple[tuple[int, int], ...]

    @property
    def multimodal_count(self) -> int:
        return sum(stop - start for start, stop in self.multimodal)

    @property
    def talker_spans(self) -> list[tuple[int, int]]:
        """The ranges `multimodal` as positions of the talker's prompt, which joins the user segments."""
        found: list[tuple[int, int]] = []
        before = 0
        for start, stop in self.user:
            inside = [(a, b) for a, b in self.multimodal if start <= a < stop]
            found += [(before + a - start, before + b - start) for a, b in inside]
            before += stop - start
        return found


def find_parts(prompt: Sequence[int], ids: SpecialIds) -> PromptSegments | None:
    """Return the segments of a chat prompt; None if it does not end in an assistant turn."""
    starts = [p for p, token in enumerate(prompt) if token == ids.im_start]
    stops = [*starts, len(prompt)][1:]
    roles = [(a, b, prompt[a + 1] if a + 1 < len(prompt) else None) for a, b in zip(starts, stops, strict=True)]
    headers = [a for a, _, role in roles if role == ids.assistant]
    if not headers or headers[-1] != starts[-1] or len(prompt) - headers[-1] < HEADER:
        return None
    user = tuple((a, b) for a, b, role in roles if role == ids.user)
    return PromptSegments(user=user, header=headers[-1], multimodal=_runs(prompt, user, ids.multimodal))


def _runs(
    prompt: Sequence[int], segments: Sequence[tuple[int, int]], wanted: frozenset[int]
) -> tuple[tuple[int, int], ...]:
    runs: list[tuple[int, int]] = []
    for start, stop in segments:
        for p in range(start, stop):
            if prompt[p] not in wanted:
                continue
            if runs and runs[-1][1] == p:
                runs[-1] = (runs[-1][0], p + 1)
            else:
                runs.append((p, p + 1))
    return tuple(runs)


def talker_prompt(
    prompt: Sequence[int], parts: PromptSegments, voice: str, ids: SpecialIds
) -> tuple[list[int], list[int]]:
    """Return the text ids and the codec ids of the talker's prompt.

    The talker's input at a position is the sum of the embeddings of its text id and of its codec id. A position without
    a text id (its input is a hidden state) has MULTIMODAL, one without a codec id NO_CODEC. The list of text ids is
    shorter by one: the text id of the last position is the first token of the reply, which does not exist yet.

    Args:
        prompt: the thinker's prompt ids.
        parts: segments of that prompt.
        voice: name of the speaker, a key of `ids.speakers`.
    """
    text = [MULTIMODAL if t in ids.multimodal else t for a, b in parts.user for t in prompt[a:b]]
    codec = [NO_CODEC] * (len(text) + HEADER)
    text += prompt[parts.header : parts.header + HEADER]
    text += [ids.tts_pad] * PADS + [ids.tts_bos]
    codec += [ids.codec_nothink, ids.codec_think_bos, ids.codec_think_eos, ids.speakers[voice]]
    codec += [ids.codec_pad, ids.codec_bos]
    return text, codec


class Medium(NamedTuple):
    """An image, video or sound in the thinker's prompt: first position, number of positions, key in vLLM's caches."""

    offset: int
    length: int
    identifier: str


def prefix_keys(
    prompt: Sequence[int],
    parts: PromptSegments,
    text: Sequence[int],
    codec: Sequence[int],
    *,
    positions: bytes | None = None,
    media: Sequence[Medium] = (),
    scope: str = "",
) -> tuple[bytes, ...]:
    """Return the keys of the talker's prompt in its prefix cache, one for each beginning of 16, 32, ... positions.

    See `plugins.flow.Open.prefix_keys`. A key is a SHA-256 digest of the ids and M-RoPE positions of the beginning. The
    hidden state of a multimodal position depends on the thinker's prompt up to this position. If the beginning has such
    positions, that part of the thinker's prompt is in the digest too, with the media items that begin in it.

    Args:
        prompt: the thinker's prompt ids.
        parts: segments of that prompt.
        text, codec: ids that `talker_prompt` has returned; the last position, without a text id, is in no key.
        positions: int32 M-RoPE positions [3, talker prompt length], row-major; None: a text, with positions 0, 1, ...
        media: all media items of the thinker's prompt.
        scope: requests with different scopes have different keys (`Rendered.scope`).
    """
    known = len(text)
    axes = np.tile(np.arange(known, dtype=np.int32), (3, 1))
    if positions is not None:
        axes = np.frombuffer(positions, np.int32).reshape(3, -1)[:, :known]
    rows = np.stack([np.array(text, np.int32), np.array(codec[:known], np.int32), *axes], axis=1)
    source = np.full(known, -1)  # the thinker's position of each multimodal position
    for (start, stop), (first, end) in zip(parts.talker_spans, parts.multimodal, strict=True):
        source[start:stop] = np.arange(first, end)
    blocks = known // KEY_POSITIONS
    lasts = source[: blocks * KEY_POSITIONS].reshape(blocks, KEY_POSITIONS).max(axis=1, initial=-1).tolist()
    thinker = _ThinkerPrefix(prompt, media)
    digest, keys = sha256(scope.encode("utf-8", "surrogatepass")), []
    for block, last in enumerate(lasts):
        if last >= 0:
            digest.update(thinker.until(last + 1))
        digest.update(rows[block * KEY_POSITIONS : (block + 1) * KEY_POSITIONS].tobytes())
        keys.append(digest.digest())
    return tuple(keys)


class _ThinkerPrefix:
    """Computes digests of growing beginnings of the thinker's prompt."""

    def __init__(self, prompt: Sequence[int], media: Sequence[Medium]) -> None:
        self._ids = np.array(prompt, np.int32)
        self._media = deque(sorted(media))
        self._done = 0
        self._digest = sha256()

    def until(self, stop: int) -> bytes:
        """Return the digest of positions [0, stop) and the media items that begin there.

        Successive calls must not decrease `stop`.
        """
        begun: list[Medium] = []
        while self._media and self._media[0].offset < stop:
            begun.append(self._media.popleft())
        self._digest.update(struct.pack("<qq", stop - self._done, len(begun)))  # lengths make the stream unambiguous
        self._digest.update(self._ids[self._done : stop].tobytes())
        for each in begun:
            name = each.identifier.encode("utf-8", "surrogatepass")
            self._digest.update(struct.pack("<qqq", each.offset, each.length, len(name)) + name)
        self._done = stop
        return self._digest.digest()


class TalkerPrompt(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="prompt"):
    """The message that opens a request in the talker.

    Attributes:
        text: text ids of the prompt positions sent so far (MULTIMODAL where the input is a hidden state).
        codec: codec ids of all prompt positions (NO_CODEC at positions without an id).
        fill: text id that is used after the last id of `track`.
        track: text ids of the reply after its first token. The input of step t after the prompt is the sum of the
            embeddings of frame t and of `track[t]`.
        positions: int32 M-RoPE positions [3, prompt length], row-major, of a multimodal prompt; None: a text prompt.
        frames: frames that a lost replica of the talker has generated for the request, one code per code group in each.
    """

    text: list[int]
    codec: list[int]
    fill: int
    track: list[int] = []
    positions: bytes | None = None
    frames: list[list[int]] = []


class TalkerChunk(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="chunk"):
    """The message with more input for an open request of the talker.

    Attributes:
        text: ids that are appended to `TalkerPrompt.text`.
        track: ids that are appended to `TalkerPrompt.track`.
    """

    text: tuple[int, ...] = ()
    track: tuple[int, ...] = ()


TalkerPayload = TalkerPrompt | TalkerChunk
