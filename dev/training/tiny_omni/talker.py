"""Fits the talker and its code predictor with teacher forcing: text ids in, the codes of the teacher's sound out.

The teacher is the speech synthesiser of `teacher.py`; `codes.py` assigns codes to its sound.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dev.training.tiny_omni import model as whole
from dev.training.tiny_omni import start, tasks
from dev.training.tiny_omni.lines import Asked, Line, batch_of, input_rows, line, with_media
from dev.training.tiny_omni.listening import Voices
from dev.training.tiny_omni.turns import IGNORE, Preprocessors, Requests
from dev.training.tiny_omni.vocoder import Lexicon, lexicon
from dev.training.tiny_omni.world import VOICES
from vllm_omni_ext.model_plugins.qwen3_omni.prompt import SpecialIds

MEDIA_TURNS = 256
"""Sounds, and as many pictures, whose hidden states are computed before the training."""
MEDIA_PART = 0.3


def judge(talker: Any, hidden: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor, float, float]:
    """Return (talker's loss, code predictor's loss, share of right first codes, share of right residual codes).

    Args:
        hidden: the talker's hidden states [n, length, hidden].
        wanted: codes to predict [n, length, groups], IGNORE where there is none.
    """
    at = wanted[..., 0] != IGNORE
    logits, first = talker.codec_head(hidden[at]), wanted[..., 0][at]
    framed = wanted[..., -1] != IGNORE
    rest, residual = residual_logits(talker, hidden[framed], wanted[framed]), wanted[framed][:, 1:]
    return (
        torch.nn.functional.cross_entropy(logits, first),
        torch.nn.functional.cross_entropy(rest.flatten(0, 1), residual.flatten()),
        (logits.argmax(-1) == first).float().mean().item(),
        (rest.argmax(-1) == residual).float().mean().item(),
    )


def residual_logits(talker: Any, hidden: Tensor, codes: Tensor) -> Tensor:
    """Return the code predictor's logits [n, groups - 1, codes] for the residual codes of n frames.

    Args:
        hidden: the talker's hidden states [n, hidden].
        codes: the frames' right codes [n, groups], which are the predictor's inputs (teacher forcing).
    """
    predictor = talker.code_predictor
    tables = [talker.model.codec_embedding, *predictor.model.codec_embedding]
    inputs = torch.stack([hidden, *[tables[g](codes[:, g]) for g in range(codes.shape[1] - 1)]], dim=1)
    out = predictor.model(inputs_embeds=inputs, use_cache=False).last_hidden_state[:, 1:]
    return torch.stack([head(out[:, group]) for group, head in enumerate(predictor.lm_head)], dim=1)


class Lines:
    """Draws random training examples of the talker: text requests, and requests with a sound or a picture."""

    def __init__(self, model: Any, world: Lexicon, voices: Voices, random: np.random.Generator) -> None:
        self.ids = SpecialIds.of(model.config)
        self._talker, self._world, self._random = model.talker, world, random
        self._requests, preprocessors = Requests(voices), Preprocessors.of_checkpoint()
        layer = model.config.talker_config.accept_hidden_layer
        self._media: list[Asked] = []
        for draw in (self._requests.spoken, self._requests.seen):
            turns = [draw(random) for _ in range(MEDIA_TURNS)]
            for first in range(0, MEDIA_TURNS, 16):
                self._media += with_media(turns[first : first + 16], model.thinker, preprocessors, layer)

    def draw(self) -> Line:
        """Return a random request with its reply in a random voice."""
        voice = VOICES[self._random.integers(len(VOICES))]
        return line(self._asked(), voice, self._world, self.ids, self._talker)

    def _asked(self) -> Asked:
        if self._random.random() < MEDIA_PART:
            return self._media[self._random.integers(len(self._media))]
        return Asked(*tasks.text_task(self._random))


def train(model: Any, lines: Lines, arguments: argparse.Namespace) -> None:
    """Fit talker and code predictor together, and write `talker.pt` every 200 steps; the thinker is not changed."""
    talker, embeddings = model.talker, model.thinker.model.embed_tokens.weight.detach()
    weights = list(talker.parameters())
    optimizer = torch.optim.AdamW(weights, lr=arguments.rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, arguments.rate, arguments.steps, pct_start=0.1)
    begin = time.monotonic()
    for step in range(1, arguments.steps + 1):
        batch = batch_of([lines.draw() for _ in range(arguments.batch)], lines.ids.codec_eos)
        rows = input_rows(talker, embeddings, batch)
        hidden = talker.model(inputs_embeds=rows, position_ids=batch.positions, use_cache=False).last_hidden_state
        first, rest, *right = judge(talker, hidden, batch.wanted)
        optimizer.zero_grad()
        (first + rest).backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            losses, shares = f"{first.item():.3f} {rest.item():.3f}", " ".join(f"{share:.4f}" for share in right)
            print(f"step {step} losses {losses} right {shares}; {time.monotonic() - begin:.0f} s", flush=True)
        if step % 200 == 0 or step == arguments.steps:
            torch.save(talker.state_dict(), arguments.out / "talker.pt")


def main() -> None:
    """Train the talker from the command line; OUT contains `thinker.pt`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sounds", type=Path, help="directory of teacher.py")
    parser.add_argument("heard", type=Path, help="directory of heard.py")
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = whole.build(arguments.seed)
    model.thinker.load_state_dict(torch.load(arguments.out / "thinker.pt"))
    start.fill(model.talker, arguments.seed)
    random = np.random.default_rng(arguments.seed)
    world = lexicon(arguments.sounds, arguments.seed)
    train(model, Lines(model, world, Voices(np.load(arguments.heard / "training.npz")), random), arguments)


if __name__ == "__main__":
    main()
