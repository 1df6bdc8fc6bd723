"""Checks whether a text is too long, without tokenizing all of it."""

from __future__ import annotations

from typing import Any

SHORT = 4
"""Texts of up to this many characters per token of the limit are tokenized at once, longer ones piece by piece."""

SMALLEST_PIECE = 4096

CERTAIN = 2
"""Tokenization stops when the pieces together have more than this many times the limit in tokens. Tokens that would
cross the borders between pieces cannot make up for that."""


def needed(tokenizer: Any, text: str, limit: int, *, from_end: bool = False) -> int:
    """Return how many characters of a text certainly have more than `limit` tokens; all if the text is short enough.

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
