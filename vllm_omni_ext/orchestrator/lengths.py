"""Whether a text is too long, without tokenizing all of it."""

from __future__ import annotations

from typing import Any

SHORT = 4
"""Texts of up to so many characters for each token of the limit are tokenized at once, longer ones piece by piece."""

SMALLEST_PIECE = 4096

CERTAIN = 2
"""Pieces that together have more tokens than so many times the limit are enough: tokens that would cross the cuts
between pieces do not make up for that."""


def needed(tokenizer: Any, text: str, limit: int, *, from_end: bool = False) -> int:
    """How many characters of a text certainly have more than `limit` tokens; all of them if the text has not so many.

    Args:
        tokenizer: vLLM's.
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
