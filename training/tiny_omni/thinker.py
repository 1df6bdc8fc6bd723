"""Fits the thinker with its encoders: requests as text, sound and pictures in, the replies' text out."""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from training.tiny_omni import model as whole
from training.tiny_omni import start, tasks
from training.tiny_omni.listening import Voices
from training.tiny_omni.turns import IGNORE, Preprocessors, Requests, Turn, tensors

KINDS = ("text", "spoken", "seen")


def judge(thinker: Any, inputs: dict[str, Tensor], wanted: Tensor) -> tuple[Tensor, float, float]:
    """Return the loss, the share of right tokens, and the share of replies that greedy decoding would get right."""
    logits = thinker(**inputs, use_cache=False).logits
    at = wanted != IGNORE
    loss = torch.nn.functional.cross_entropy(logits[at], wanted[at])
    right = (logits.argmax(-1) == wanted) | ~at
    return loss, right[at].float().mean().item(), right.all(dim=1).float().mean().item()


def kind_of(step: int, text_steps: int) -> str:
    """Return what a step trains: text alone at first, then half of the steps listening."""
    if step <= text_steps:
        return "text"
    return ("spoken", "seen", "spoken", "text")[step % 4]


def longest_of(step: int, text_steps: int, steps: int) -> int:
    """Return the most words of a spoken request: one at first, all lengths after half of the steps that listen."""
    part = (step - text_steps) / max(1, steps - text_steps)
    return int(np.clip(1 + part * 2 * tasks.LONGEST, 1, tasks.LONGEST))


def turns_of(requests: Requests, step: int, random: np.random.Generator, arguments: argparse.Namespace) -> list[Turn]:
    """Return the requests of one step."""
    draw = {
        "text": requests.text,
        "seen": requests.seen,
        "spoken": partial(requests.spoken, longest=longest_of(step, arguments.text_steps, arguments.steps)),
    }[kind_of(step, arguments.text_steps)]
    return [draw(random) for _ in range(arguments.batch)]


def train(thinker: Any, requests: Requests, arguments: argparse.Namespace) -> None:
    """Fit the thinker; its weights are written every few hundred steps."""
    random, preprocessors = np.random.default_rng(arguments.seed), Preprocessors.of_checkpoint()
    weights = list(thinker.parameters())
    optimizer = torch.optim.AdamW(weights, lr=arguments.rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, arguments.rate, arguments.steps, pct_start=0.1)
    begin, means = time.monotonic(), {kind: np.zeros(3) for kind in KINDS}
    for step in range(1, arguments.steps + 1):
        inputs, wanted = tensors(turns_of(requests, step, random, arguments), preprocessors)
        loss, tokens, replies = judge(thinker, inputs, wanted)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        mean = means[kind_of(step, arguments.text_steps)]
        mean += (np.array([loss.item(), tokens, replies]) - mean) / 20
        if step % 50 == 0:
            print(f"step {step} {shown(means)}; {time.monotonic() - begin:.0f} s", flush=True)
        if step % 200 == 0 or step == arguments.steps:
            torch.save(thinker.state_dict(), arguments.out / "thinker.pt")


def shown(means: dict[str, np.ndarray]) -> str:
    """Return loss, right tokens and right replies of each kind."""
    return "; ".join(f"{kind} {' '.join(f'{value:.3f}' for value in mean)}" for kind, mean in means.items())


def main() -> None:
    """Train the thinker from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("heard", type=Path, help="directory of heard.py")
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=4500)
    parser.add_argument("--text-steps", type=int, default=800)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    thinker = whole.build(arguments.seed).thinker
    start.fill(thinker, arguments.seed)
    train(thinker, Requests(Voices(arguments.heard / "training.npz")), arguments)


if __name__ == "__main__":
    main()
