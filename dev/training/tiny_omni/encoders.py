"""Losses that fit the audio and vision encoders to the thinker's token embeddings of the words in sounds and pictures.

With the loss of the thinker's replies alone, the encoders learn next to nothing within minutes, because it contains
little about the position of a word in a sound or of a thing in a picture.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dev.training.tiny_omni.listening import HOP, audio_tokens, token_of
from dev.training.tiny_omni.turns import Turn
from dev.training.tiny_omni.words import ids_of, world_vocabulary
from dev.training.tiny_omni.world import WORDS


class WordScores:
    """Classifies embeddings by word: the score of a word is the product with the thinker's embedding of the word.

    Attributes:
        nothing: trained embedding for "no word".
    """

    def __init__(self, thinker: Any) -> None:
        self._table = thinker.model.embed_tokens.weight
        ids = [ids_of(f" {word}", world_vocabulary()) for word in WORDS]
        assert all(len(each) == 1 for each in ids)
        self._rows = torch.tensor([each[0] for each in ids])
        self.nothing = torch.nn.Parameter(torch.zeros(self._table.shape[1]))

    def __call__(self, made: Tensor) -> Tensor:
        """Return scores [n, 1 + words] of embeddings [n, hidden]; column 0 is the score of "no word"."""
        table = torch.cat([self.nothing[None], self._table[self._rows].detach()])
        return made @ table.T / math.sqrt(made.shape[1])


def heard_loss(scores: WordScores, made: Tensor, turns: Sequence[Turn]) -> tuple[Tensor, float]:
    """Return (loss, share of recognised words) of the audio encoder's output.

    Args:
        made: embeddings [positions, hidden] of all sounds of `turns`, in order.
    """
    found, wanted = scores(made), places(turns)
    right = (found.argmax(-1) == wanted)[wanted > 0]
    return torch.nn.functional.cross_entropy(found, wanted), right.float().mean().item()


def places(turns: Sequence[Turn]) -> Tensor:
    """Return a label for each embedding of the turns' sounds: 1 + index of the word whose middle it covers, else 0."""
    found = []
    for turn in turns:
        assert turn.sound is not None
        row = torch.zeros(audio_tokens(len(turn.sound) // HOP), dtype=torch.long)
        for word, middle in zip(turn.reply, turn.middles, strict=True):
            row[token_of(middle)] = 1 + WORDS.index(word)
        found.append(row)
    return torch.cat(found)


def seen_loss(scores: WordScores, made: Sequence[Tensor], turns: Sequence[Turn]) -> tuple[Tensor, float]:
    """Return (loss, share of pictures all of whose words are recognised) of the vision encoder's output.

    The mean of a picture's embeddings is classified.

    Args:
        made: embeddings [positions, hidden] of each picture.
    """
    found, wanted = scores(torch.stack([each.mean(0) for each in made])), torch.zeros(len(turns), 1 + len(WORDS))
    for row, turn in enumerate(turns):
        for word in turn.reply:
            wanted[row, 1 + WORDS.index(word)] = 1 / len(turn.reply)
    right = [
        set(scored.topk(len(turn.reply)).indices.tolist()) == {1 + WORDS.index(word) for word in turn.reply}
        for scored, turn in zip(found, turns, strict=True)
    ]
    return torch.nn.functional.cross_entropy(found, wanted), sum(right) / len(right)
