"""Fits the talker and its code predictor: text ids in, the teacher's codes out, with the teacher's codes fed back.

Inputs are built from ids exactly as at inference (`model_plugins.qwen3_omni.prompt` and `talker_feed`).
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.tiny_omni import model as whole
import numpy as np
from training.tiny_omni import start
import torch
from torch import Tensor
from training.tiny_omni.vocoder import Lexicon, lexicon, phrase
from training.tiny_omni.words import SPACE, world_vocabulary
from training.tiny_omni.world import VOICES, WORDS

from vllm_omni_ext.model_plugins.qwen3_omni.prompt import NO_CODEC, SpecialIds, find_parts, talker_prompt
from vllm_omni_ext.model_plugins.qwen3_omni.tiny.vocabulary import Vocabulary

IGNORE = -100
LONGEST = 5
"""Words in the longest reply of the training data."""


@dataclass(frozen=True)
class Line:
    """One training example: ids of the text rows, frames, and where the first code is predicted.

    Attributes:
        text: text ids of all positions.
        codec: codec ids of the prompt's positions, NO_CODEC where there is none.
        frames: codes [frames, groups]; frame t is the input of position len(codec) + t.
    """

    text: list[int]
    codec: list[int]
    frames: np.ndarray


def ids_of(text: str, vocabulary: Vocabulary) -> list[int]:
    """Return ids of a text of world words, special tokens and line ends."""
    found: list[int] = []
    for part in text.replace("<", "\x00<").replace(">", ">\x00").split("\x00"):
        if part.startswith("<"):
            found.append(vocabulary.specials[part])
            continue
        for line in part.replace("\n", "\x00\n\x00").split("\x00"):
            tokens = [line] if line == "\n" else [(SPACE if i else "") + word for i, word in enumerate(line.split(" "))]
            found += [vocabulary.ids["Ċ" if token == "\n" else token] for token in tokens if token]
    return found


def chat(request: str) -> str:
    """Return the chat prompt of a request."""
    return f"<|im_start|>user\n{request}<|im_end|>\n<|im_start|>assistant\n"


def line(request: str, reply: list[str], voice: str, world: Lexicon, vocabulary: Vocabulary, ids: SpecialIds) -> Line:
    """Return the example of a reply that is said in a voice."""
    prompt = ids_of(chat(request), vocabulary)
    parts = find_parts(prompt, ids)
    assert parts is not None
    text, codec = talker_prompt(prompt, parts, voice, ids)
    said = ids_of(" ".join(reply), vocabulary)
    frames, _ = phrase(world, voice, reply)
    track = [*said[1:], ids.tts_eos]
    track = (track + [ids.tts_pad] * len(frames))[: len(frames)]
    return Line([*text, said[0], *track], codec, frames)


def batch_of(lines: list[Line], model: Any, eos: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return text ids [n, length], codec ids of all groups [n, length, groups] and targets [n, length, groups].

    Positions without a codec id, and targets beyond the end, are negative. At the end only the first group has a target.
    """
    length, groups = max(len(one.text) for one in lines), lines[0].frames.shape[1]
    text = torch.zeros(len(lines), length, dtype=torch.long)
    codes = torch.full((len(lines), length, groups), NO_CODEC)
    wanted = torch.full((len(lines), length, groups), IGNORE)
    for row, one in enumerate(lines):
        prompt, frames = len(one.codec), torch.from_numpy(one.frames)
        text[row, : len(one.text)] = torch.tensor(one.text)
        codes[row, :prompt, 0] = torch.tensor(one.codec)
        codes[row, prompt : prompt + len(frames)] = frames
        wanted[row, prompt - 1 : prompt - 1 + len(frames)] = frames
        wanted[row, prompt - 1 + len(frames), 0] = eos
    return text, codes, wanted


def input_rows(talker: Any, embeddings: Tensor, text: Tensor, codes: Tensor) -> Tensor:
    """Return the talker's input embeddings [n, length, hidden]."""
    tables = [talker.model.codec_embedding, *talker.code_predictor.model.codec_embedding]
    rows = talker.text_projection(embeddings[text])
    for group, table in enumerate(tables):
        there = (codes[..., group] >= 0).unsqueeze(-1)
        rows = rows + table(codes[..., group].clamp(min=0)) * there
    return rows


def losses(talker: Any, rows: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor, float, float]:
    """Return the losses of talker and code predictor, and the share of first and of residual codes that are right."""
    hidden = talker.model(inputs_embeds=rows, use_cache=False).last_hidden_state
    at = wanted[..., 0] != IGNORE
    logits, first = talker.codec_head(hidden[at]), wanted[..., 0][at]
    loss = torch.nn.functional.cross_entropy(logits, first)
    framed = wanted[..., -1] != IGNORE
    codes, hidden = wanted[framed], hidden[framed]
    predictor = talker.code_predictor
    tables = [talker.model.codec_embedding, *predictor.model.codec_embedding]
    inputs = torch.stack([hidden, *[tables[g](codes[:, g]) for g in range(codes.shape[1] - 1)]], dim=1)
    out = predictor.model(inputs_embeds=inputs, use_cache=False).last_hidden_state[:, 1:]
    rest = torch.stack([head(out[:, g]) for g, head in enumerate(predictor.lm_head)], dim=1)
    rest_loss = torch.nn.functional.cross_entropy(rest.flatten(0, 1), codes[:, 1:].flatten())
    right = (logits.argmax(-1) == first).float().mean().item()
    return loss, rest_loss, right, (rest.argmax(-1) == codes[:, 1:]).float().mean().item()


def random_line(words: list[str], world: Lexicon, vocabulary: Vocabulary, ids: SpecialIds, random: np.random.Generator) -> Line:
    """Return a random reply in a random voice, asked for with or without its words."""
    reply = [words[i] for i in random.integers(len(words), size=random.integers(1, LONGEST + 1))]
    request = "say " + " ".join(reply) if random.random() < 0.7 else "what you hear"
    return line(request, reply, VOICES[random.integers(len(VOICES))], world, vocabulary, ids)


def train(model: Any, world: Lexicon, words: list[str], arguments: argparse.Namespace) -> None:
    """Fit talker and code predictor together; the thinker's embeddings stay as they are."""
    vocabulary, ids = world_vocabulary(), SpecialIds.of(model.config)
    random = np.random.default_rng(arguments.seed)
    talker, embeddings = model.talker, model.thinker.model.embed_tokens.weight.detach()
    weights = [p for name, p in talker.named_parameters() if "hidden_projection" not in name]
    optimizer = torch.optim.AdamW(weights, lr=arguments.rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, arguments.rate, arguments.steps, pct_start=0.1)
    begin = time.monotonic()
    for step in range(1, arguments.steps + 1):
        lines = [random_line(words, world, vocabulary, ids, random) for _ in range(arguments.batch)]
        text, codes, wanted = batch_of(lines, model, ids.codec_eos)
        first, rest, right, right_rest = losses(talker, input_rows(talker, embeddings, text, codes), wanted)
        optimizer.zero_grad()
        (first + rest).backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == 1:
            spent = time.monotonic() - begin
            print(f"step {step} {first.item():.3f} {rest.item():.3f} right {right:.3f} {right_rest:.3f} {spent:.0f} s", flush=True)
        if step % 200 == 0 or step == arguments.steps:
            torch.save(talker.state_dict(), arguments.out / "talker.pt")


def main() -> None:
    """Train the talker from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sounds", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--words", type=int, default=len(WORDS))
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    words = list(WORDS[: arguments.words])
    model = whole.build(arguments.seed)
    start.fill(model.thinker, arguments.seed)
    start.fill(model.talker, arguments.seed)
    thinker = arguments.out / "thinker.pt"
    if thinker.exists():
        model.thinker.load_state_dict(torch.load(thinker))
    train(model, lexicon(arguments.sounds, words, arguments.seed), words, arguments)


if __name__ == "__main__":
    main()
