"""Measures a checkpoint with Transformers, on requests that are not in the training data.

Prints the shares of right tokens and of right replies for written requests, sounds in held-out ways of speaking, and
pictures. Writes `phrases.npz` with spoken replies, for `judge_phrases.py`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dev.training.tiny_omni import tasks
from dev.training.tiny_omni.listening import Voices
from dev.training.tiny_omni.thinker import judge
from dev.training.tiny_omni.turns import Preprocessors, Requests, Turn, tensors
from dev.training.tiny_omni.words import chat, ids_of, world_vocabulary
from dev.training.tiny_omni.world import VOICES

SEED = 1_000_003
"""Seed of all requests here; it differs from those of the training, which are small numbers."""
BATCH = 20


@torch.no_grad()
def text_figures(thinker: Any, turns: list[Turn], preprocessors: Preprocessors) -> tuple[float, float]:
    """Return (share of right tokens, share of right replies); all turns are text, or all sounds, or all pictures."""
    figures = []
    for first in range(0, len(turns), BATCH):
        _, *shares = judge(thinker, *tensors(turns[first : first + BATCH], preprocessors))
        figures.append(shares)
    tokens, replies = np.mean(figures, axis=0)
    return float(tokens), float(replies)


def said(model: Any, request: str, voice: str, sample: bool) -> tuple[str, np.ndarray]:
    """Return the text of the model's reply, and its samples at 24 kHz.

    Args:
        sample: draw the talker's codes; False: choose the most likely ones.
    """
    vocabulary = world_vocabulary()
    ids = torch.tensor([ids_of(chat(request), vocabulary)])
    found, sound = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        speaker=voice,
        thinker_max_new_tokens=16,
        thinker_eos_token_id=vocabulary.id_of("<|im_end|>"),
        thinker_do_sample=False,
        talker_do_sample=sample,
        talker_max_new_tokens=150,
    )
    names = {id_: token for token, id_ in vocabulary.ids.items()}
    words = [names[i].replace("Ġ", "") for i in found[0, ids.shape[1] :].tolist() if i in names]
    return " ".join(words), sound.flatten().numpy()


def write_phrases(model: Any, count: int, out: Path, sample: bool) -> None:
    """Write replies to random requests: `VOICE/requested words` -> samples. Print replies whose text is wrong."""
    random, sounds = np.random.default_rng(SEED), {}
    for number in range(count):
        words = " ".join(tasks.some_words(random))
        voice = VOICES[number % len(VOICES)]
        text, sounds[f"{voice}/{words}"] = said(model, f"say {words}", voice, sample)
        if text != words:
            print(f"asked for {words!r}, got {text!r}")
    np.savez(out, **sounds)


def main() -> None:
    """Measure a checkpoint from the command line."""
    from transformers import Qwen3OmniMoeForConditionalGeneration

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("heard", type=Path, help="directory of heard.py")
    parser.add_argument("phrases", type=Path, help="file to write")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--phrases-count", type=int, default=40)
    parser.add_argument("--sample", action="store_true", help="draw codes as a server does by default")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(arguments.checkpoint, dtype=torch.float32).eval()
    requests, preprocessors = Requests(Voices(np.load(arguments.heard / "held_out.npz"))), Preprocessors.of_checkpoint()
    random = np.random.default_rng(SEED)
    for name, draw in (("text", requests.text), ("spoken", requests.spoken), ("seen", requests.seen)):
        turns = [draw(random) for _ in range(arguments.count)]
        tokens, replies = text_figures(model.thinker, turns, preprocessors)
        print(f"{name}: {tokens:.3f} of tokens, {replies:.3f} of {len(turns)} replies", flush=True)
    write_phrases(model, arguments.phrases_count, arguments.phrases, arguments.sample)


if __name__ == "__main__":
    main()
