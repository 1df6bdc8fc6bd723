"""Fits the thinker and its audio encoder: requests as text and as sound in, the replies' text out."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import model as whole
import numpy as np
import start
import tasks
import torch
from listening import HOP, RATE, Voices, audio_tokens
from talker import chat, ids_of
from torch import Tensor
from words import world_vocabulary

IGNORE = -100


@dataclass(frozen=True)
class Turn:
    """One request with its reply, in token ids.

    Attributes:
        prompt: ids with one audio placeholder for each embedding of the sound.
        sound: samples at 16 kHz, or None.
    """

    prompt: list[int]
    reply: list[int]
    sound: np.ndarray | None = None


class Requests:
    """Draws requests; the sounds come from the file of ways of speaking."""

    def __init__(self, voices: Voices | None) -> None:
        self._voices, self._vocabulary = voices, world_vocabulary()

    def text(self, random: np.random.Generator) -> Turn:
        """Return a request that is written."""
        request, reply = tasks.text_task(random)
        return self._turn(request, reply)

    def spoken(self, random: np.random.Generator, longest: int = tasks.LONGEST) -> Turn:
        """Return a sound whose words are wanted."""
        assert self._voices is not None
        words = tasks.some_words(random, longest=longest)
        sound = self._voices.say(words, random)
        count = audio_tokens(len(sound) // HOP)
        media = "<|audio_start|>" + "<|audio_pad|>" * count + "<|audio_end|>"
        return self._turn(media + tasks.HEAR, words, sound)

    def _turn(self, request: str, reply: list[str], sound: np.ndarray | None = None) -> Turn:
        ids = ids_of(" ".join(reply) + "<|im_end|>", self._vocabulary)
        return Turn(ids_of(chat(request), self._vocabulary), ids, sound)


def tensors(turns: list[Turn], extractor: Any) -> tuple[dict[str, Tensor], Tensor]:
    """Return the thinker's inputs and the targets [n, length]; all turns have sound, or none has."""
    length = max(len(turn.prompt) + len(turn.reply) for turn in turns)
    ids = torch.zeros(len(turns), length, dtype=torch.long)
    mask, wanted = torch.zeros_like(ids), torch.full_like(ids, IGNORE)
    for row, turn in enumerate(turns):
        stop = len(turn.prompt) + len(turn.reply)
        ids[row, :stop] = torch.tensor(turn.prompt + turn.reply)
        mask[row, :stop] = 1
        wanted[row, len(turn.prompt) - 1 : stop - 1] = torch.tensor(turn.reply)
    inputs = {"input_ids": ids, "attention_mask": mask}
    sounds = [turn.sound for turn in turns if turn.sound is not None]
    if sounds:
        mel = extractor(
            sounds, sampling_rate=RATE, padding=True, truncation=False, return_attention_mask=True, return_tensors="pt"
        )
        inputs |= {"input_features": mel["input_features"], "feature_attention_mask": mel["attention_mask"]}
    return inputs, wanted


def judge(model: Any, inputs: dict[str, Tensor], wanted: Tensor) -> tuple[Tensor, float, float]:
    """Return the loss, and the shares of right tokens and of replies without an error (with the right text before)."""
    logits = model.thinker(**inputs, use_cache=False).logits
    at = wanted != IGNORE
    loss = torch.nn.functional.cross_entropy(logits[at], wanted[at])
    right = (logits.argmax(-1) == wanted) | ~at
    return loss, right[at].float().mean().item(), right.all(dim=1).float().mean().item()


def train(model: Any, requests: Requests, extractor: Any, arguments: argparse.Namespace) -> None:
    """Fit the thinker to written requests first, then to written and spoken ones in turn."""
    random = np.random.default_rng(arguments.seed)
    weights = [p for name, p in model.thinker.named_parameters() if "visual" not in name]
    optimizer = torch.optim.AdamW(weights, lr=arguments.rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, arguments.rate, arguments.steps, pct_start=0.1)
    begin, means = time.monotonic(), {"text": np.zeros(3), "spoken": np.zeros(3)}
    for step in range(1, arguments.steps + 1):
        kind = "spoken" if step > arguments.text_steps and step % 4 else "text"
        longest = 1 + min(tasks.LONGEST - 1, 4 * (step - arguments.text_steps) // arguments.steps * 4)
        draw = requests.text if kind == "text" else lambda r, most=longest: requests.spoken(r, most)
        inputs, wanted = tensors([draw(random) for _ in range(arguments.batch)], extractor)
        loss, tokens, replies = judge(model, inputs, wanted)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        means[kind] += (np.array([loss.item(), tokens, replies]) - means[kind]) / 20
        if step % 50 == 0:
            shown = ", ".join(f"{name} {' '.join(f'{x:.3f}' for x in mean)}" for name, mean in means.items())
            print(f"step {step} {shown} {time.monotonic() - begin:.0f} s", flush=True)
        if step % 200 == 0 or step == arguments.steps:
            torch.save(model.thinker.state_dict(), arguments.out / "thinker.pt")


def extractor() -> Any:
    """Return the feature extractor of the checkpoint's `preprocessor_config.json`."""
    from transformers import WhisperFeatureExtractor

    from vllm_omni_ext.model_plugins.qwen3_omni.tiny.texts import preprocessor_config

    return WhisperFeatureExtractor(**preprocessor_config(whole.TRAINED))


def main() -> None:
    """Train the thinker from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("heard", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--text-steps", type=int, default=800)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    model = whole.build(arguments.seed)
    start.fill(model.thinker, arguments.seed)
    train(model, Requests(Voices(arguments.heard / "training.npz")), extractor(), arguments)


if __name__ == "__main__":
    main()
