"""Byte-level BPE vocabularies in the form of the Qwen tokenizer, built without any downloaded file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FIRST_SPECIAL_ID = 151643
"""Id of `<|endoftext|>` in the released tokenizer; the other special tokens follow in the order below."""

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
    "<tts_text_bos_single>",
    "<|audio_pad|>",
)
"""The added tokens of the released tokenizer in id order (151643 .. 151675)."""

NOT_SPECIAL = frozenset({"<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"})
"""Added tokens that stay visible when special tokens are skipped."""

ROLE_IDS: Mapping[str, int] = {"system": 8948, "user": 872, "assistant": 77091}
"""Ids of the role names in the released tokenizer."""

_WORDS = ("Ġthe", "Ġis", "Ġyou", "Ġsay", "Ġof", "Ġhello", "Ġin", "Ġand", "Ġred", "Ġblue", "Ġcat", "Ġmoon")
_SPACE = "Ġ"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens, ids and merges of a text tokenizer.

    Attributes:
        ids: text token (in byte-level letters) -> id, without the special tokens.
        merges: BPE merges in order of priority.
        specials: special token -> id.
    """

    ids: Mapping[str, int]
    merges: tuple[tuple[str, str], ...]
    specials: Mapping[str, int]

    @property
    def size(self) -> int:
        """Number of ids of the tokenizer; ids are contiguous from 0."""
        return len(self.ids) + len(self.specials)

    def id_of(self, token: str) -> int:
        """Return the id of a text or special token."""
        return self.specials[token] if token in self.specials else self.ids[token]

    def speakable_ids(self) -> list[int]:
        """Return text ids that decode to printable ASCII, so that the random model's text is readable."""
        plain = {chr(code) for code in range(0x21, 0x7F)} | {_SPACE}
        return sorted(id_ for token, id_ in self.ids.items() if set(token) <= plain)


def byte_letters() -> list[str]:
    """Return the 256 letters of byte-level BPE in id order: printable bytes first, then the rest from U+0100 on."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def word_merges(words: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Return the BPE merges that build each word letter by letter from the left; shared prefixes occur once."""
    merges: dict[tuple[str, str], None] = {}
    for word in words:
        for end in range(1, len(word)):
            merges[(word[:end], word[end])] = None
    return tuple(merges)


def small_vocabulary(specials: Sequence[str] = SPECIAL_TOKENS) -> Vocabulary:
    """Return a vocabulary of a few hundred ids: 256 bytes, the role names, 12 words, and the special tokens."""
    merges = word_merges((*ROLE_IDS, *_WORDS))
    tokens = [*byte_letters(), *("".join(pair) for pair in merges)]
    ids = {token: index for index, token in enumerate(tokens)}
    return Vocabulary(ids, merges, {token: len(ids) + index for index, token in enumerate(specials)})


def real_vocabulary(specials: Sequence[str] = SPECIAL_TOKENS) -> Vocabulary:
    """Return a vocabulary in the released layout: bytes at 0..255, role names and special tokens at their released ids.

    All other ids are made-up words (`w1000`, `w1001`, ...). Only the model can generate them: no merge builds them.
    """
    merges = word_merges((*ROLE_IDS, *_WORDS))
    tokens: list[str | None] = [*byte_letters(), *[None] * (FIRST_SPECIAL_ID - 256)]
    for role, id_ in ROLE_IDS.items():
        tokens[id_] = role
    partial = iter([word for pair in merges if (word := "".join(pair)) not in ROLE_IDS])
    ids: dict[str, int] = {}
    for index, token in enumerate(tokens):
        ids[token if token is not None else next(partial, f"{_SPACE}w{index}")] = index
    return Vocabulary(ids, merges, {token: FIRST_SPECIAL_ID + index for index, token in enumerate(specials)})
