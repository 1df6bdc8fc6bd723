"""Converts text to ids and back in BAGEL's prompt format: no role names, no line breaks between turns."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from vllm_omni_ext.model_plugins.bagel.parameters import ParameterError
from vllm_omni_ext.model_plugins.bagel.sizes import CheckpointError

_START, _END = "<|im_start|>", "<|im_end|>"


class Tokens:
    """The checkpoint's tokenizer, with the ids of the special tokens.

    Attributes:
        start, end: ids around every text. A reply follows one `start` and ends before `end`.
        image_start, image_end: ids of the markers around every image.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.start = self._id(_START)
        self.end = self._id(_END)
        self.image_start = self._id("<|vision_start|>")
        self.image_end = self._id("<|vision_end|>")

    @classmethod
    def from_directory(cls, directory: Path) -> Tokens:
        """Read `tokenizer.json`; CheckpointError if the file or one of its tokens is missing."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{path}: is missing")
        return cls(Tokenizer.from_file(str(path)))

    def text(self, text: str) -> tuple[int, ...]:
        """Return `start`, the ids of a text, and `end`. ParameterError if the text is not valid Unicode."""
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ParameterError("prompt: is not valid Unicode text", parameter="prompt") from None
        return (self.start, *self._tokenizer.encode(text, add_special_tokens=False).ids, self.end)

    def reply(self, ids: list[int]) -> str:
        """Return the text of generated ids, which begin with `start`, up to the first end or second start."""
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text.split(_END)[0].split(_START)[1]

    def _id(self, token: str) -> int:
        id_ = self._tokenizer.token_to_id(token)
        if id_ is None:
            raise CheckpointError(f"tokenizer.json: has no token {token}")
        return id_
