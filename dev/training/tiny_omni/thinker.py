"""Fits the thinker with its encoders: requests as text, sound and pictures in, the replies' text out.

The first steps train with written requests, the next ones train the encoders alone (`encoders.py`), and the last ones
train everything together. A step has a kind: "text", "ear" (audio encoder alone), "eye" (vision encoder alone),
"spoken" (requests with a sound) or "seen" (requests with a picture).
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
from dev.training.tiny_omni import start
from dev.training.tiny_omni.encoders import WordScores, heard_loss, seen_loss
from dev.training.tiny_omni.listening import Voices
from dev.training.tiny_omni.turns import IGNORE, Preprocessors, Requests, Turn, tensors

KINDS = ("text", "ear", "eye", "spoken", "seen")


def judge(thinker: Any, inputs: dict[str, Tensor], wanted: Tensor) -> tuple[Tensor, float, float]:
    """Return (loss, share of right tokens, share of right replies), both shares with the most likely tokens."""
    logits = thinker(**inputs, use_cache=False).logits
    at = wanted != IGNORE
    loss = torch.nn.functional.cross_entropy(logits[at], wanted[at])
    right = (logits.argmax(-1) == wanted) | ~at
    return loss, right[at].float().mean().item(), right.all(dim=1).float().mean().item()


def kind_of(step: int, arguments: argparse.Namespace) -> str:
    """Return the kind of a step (see the module): text, then the encoders alone, then everything, half with sounds."""
    if step <= arguments.text_steps:
        return "text"
    if step <= arguments.text_steps + arguments.encoder_steps:
        return ("ear", "eye")[step % 2]
    return ("spoken", "seen", "spoken", "text")[step % 4]


def turns_of(requests: Requests, kind: str, random: np.random.Generator, count: int) -> list[Turn]:
    """Return `count` random requests for a step of this kind."""
    draws = {"text": requests.text, "seen": requests.seen, "spoken": requests.spoken}
    draw = draws[{"ear": "spoken", "eye": "seen"}.get(kind, kind)]
    return [draw(random) for _ in range(count)]


def train(thinker: Any, requests: Requests, arguments: argparse.Namespace) -> None:
    """Fit the thinker, and write `thinker.pt` every 200 steps."""
    random, preprocessors = np.random.default_rng(arguments.seed), Preprocessors.of_checkpoint()
    scores = WordScores(thinker)
    weights = [*thinker.parameters(), scores.nothing]
    optimizer = torch.optim.AdamW(weights, lr=arguments.rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, arguments.rate, arguments.steps, pct_start=0.1)
    begin, means = time.monotonic(), {kind: np.zeros(3) for kind in KINDS}
    for step in range(1, arguments.steps + 1):
        kind = kind_of(step, arguments)
        turns = turns_of(requests, kind, random, arguments.batch * (2 if kind == "eye" else 1))
        loss, figures = loss_of(thinker, scores, kind, turns, preprocessors)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        means[kind] += (np.array(figures) - means[kind]) / 20
        if step % 50 == 0:
            print(f"step {step} {shown(means)}; {time.monotonic() - begin:.0f} s", flush=True)
        if step % 200 == 0 or step == arguments.steps:
            torch.save(thinker.state_dict(), arguments.out / "thinker.pt")


def loss_of(
    thinker: Any, scores: WordScores, kind: str, turns: list[Turn], preprocessors: Preprocessors
) -> tuple[Tensor, tuple[float, float, float]]:
    """Return the loss of one step, and (loss, share of right tokens, share of right replies) for the log.

    For the kinds "ear" and "eye", both shares are that of recognised words.
    """
    inputs, wanted = tensors(turns, preprocessors)
    if kind == "ear":
        made = thinker.get_audio_features(inputs["input_features"], inputs["feature_attention_mask"])
        loss, right = heard_loss(scores, made.last_hidden_state, turns)
    elif kind == "eye":
        made = thinker.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
        loss, right = seen_loss(scores, made.pooler_output, turns)
    else:
        loss, *shares = judge(thinker, inputs, wanted)
        return loss, (loss.item(), shares[0], shares[1])
    return loss, (loss.item(), right, right)


def shown(means: dict[str, np.ndarray]) -> str:
    """Return a line for the log: loss, share of right tokens and share of right replies, for each kind of step."""
    return "; ".join(f"{kind} {' '.join(f'{value:.3f}' for value in mean)}" for kind, mean in means.items())


def main() -> None:
    """Train the thinker from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("heard", type=Path, help="directory of heard.py")
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--text-steps", type=int, default=700)
    parser.add_argument("--encoder-steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    thinker = whole.build(arguments.seed).thinker
    start.fill(thinker, arguments.seed)
    train(thinker, Requests(Voices(np.load(arguments.heard / "training.npz"))), arguments)


if __name__ == "__main__":
    main()
