"""Checks whether a text is too long, without tokenizing all of it."""

from __future__ import annotations

from typing import Any

SHORT = 4
"""A text with at most this many characters per token of the limit is tokenized whole, a longer one in pieces."""

SMALLEST_PIECE = 4096

CERTAIN = 2
"""Tokenization stops when the pieces have more than this many times the limit in tokens. Cutting a text into pieces
adds fewer tokens than that, so the whole text is too long too."""


def needed(tokenizer: Any, text: str, limit: int, *, from_end: bool = False) -> int:
    """Return a number of characters of `text` that certainly have more than `limit` tokens.

    If no such number was found, the text may fit, and the length of the whole text is returned.

    Args:
        tokenizer: vLLM's tokenizer.
        from_end: count from the end of the text.
    """
    size, tokens, seen = max(SHORT * limit, SMALLEST_PIECE), 0, 0
    while len(text) - seen > size:
        piece = text[len(text) - seen - size : len(text) - seen] if from_end else text[seen : seen + size]
        seen += size
        tokens += len(tokenizer(piece, add_special_tokens=False)["input_ids"])
        if tokens > CERTAIN * limit:
            return seen
    return len(text)
