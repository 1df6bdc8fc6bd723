"""Fits code2wav to the words of the speech synthesiser (`teacher.py`): codes in, the synthesiser's samples out."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dev.training.tiny_omni import codes as quantiser
from dev.training.tiny_omni import model as whole
from dev.training.tiny_omni.model import TRAINED
from dev.training.tiny_omni.world import FRAME, LEAD, PAUSE, VOICES, WORDS

GAMMA = 0.1
"""Start of the ConvNeXt scales; the stock 1e-6 does not learn in this time."""
RESOLUTIONS = ((256, 64), (512, 128), (1024, 256))
SAMPLES_WEIGHT = 40.0
FRAMES = 10
"""Frames of a training example."""


@dataclass(frozen=True)
class Lexicon:
    """Codes and sounds of all words.

    Attributes:
        codes: (voice, word) -> codes [frames, groups].
        sounds: (voice, word) -> samples at 24 kHz.
        books: the codebooks that assign the codes.
        points: features of all frames [frames, dimensions].
    """

    codes: dict[tuple[str, str], np.ndarray]
    sounds: dict[tuple[str, str], np.ndarray]
    books: quantiser.Codebooks
    points: np.ndarray


def lexicon(directory: Path, seed: int, words: Sequence[str] = WORDS) -> Lexicon:
    """Read the teacher's sounds and assign codes to each frame; the same arguments give the same codes."""
    files = {voice: np.load(directory / f"{voice}.npz") for voice in VOICES}
    sounds = {(voice, word): files[voice][word] for voice in VOICES for word in words}
    points = {key: quantiser.features(sound, VOICES.index(key[0])) for key, sound in sounds.items()}
    every = np.concatenate(list(points.values()))
    books = quantiser.fit(every, TRAINED.num_code_groups, TRAINED.codebook_size, seed)
    return Lexicon({key: books.encode(value) for key, value in points.items()}, sounds, books, every)


def phrase(world: Lexicon, voice: str, words: Sequence[str], pause: int = PAUSE) -> tuple[np.ndarray, np.ndarray]:
    """Return codes [frames, groups] and samples of words spoken one after the other."""
    groups = TRAINED.num_code_groups
    codes = [np.zeros((LEAD, groups), int)]
    sounds = [np.zeros(LEAD * FRAME, np.float32)]
    for word in words:
        codes += [world.codes[voice, word], np.zeros((pause, groups), int)]
        sounds += [world.sounds[voice, word], np.zeros(pause * FRAME, np.float32)]
    return np.concatenate(codes), np.concatenate(sounds)


def example(world: Lexicon, words: Sequence[str], random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return codes [FRAMES, groups] and samples of a random cut, not aligned with words, from a random phrase."""
    voice = VOICES[random.integers(len(VOICES))]
    said = [words[i] for i in random.integers(len(words), size=4)]
    codes, sound = phrase(world, voice, said, int(random.integers(1, 4)))
    start = int(random.integers(len(codes) - FRAMES))
    return codes[start : start + FRAMES], sound[start * FRAME : (start + FRAMES) * FRAME]


def build(world: Lexicon, seed: int) -> torch.nn.Module:
    """Return code2wav with start values from which it can be trained fast."""
    model = whole.build(seed).code2wav
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gamma"):
                parameter.fill_(GAMMA)
        vectors = quantiser.starting_vectors(world.books, TRAINED.code2wav["hidden_size"], world.points)
        model.code_embedding.weight.copy_(torch.from_numpy(vectors).flatten(0, 1))
    return model


def spectrum(sound: Tensor, size: int, hop: int) -> Tensor:
    """Return the magnitudes [n, bins, windows] of the short-time spectra of sounds [n, samples]."""
    window = torch.hann_window(size)
    found = torch.stft(sound, size, hop, window=window, return_complex=True)
    return torch.sqrt(found.real**2 + found.imag**2 + 1e-8)


def loss_of(made: Tensor, wanted: Tensor) -> Tensor:
    """Return the distance of sounds [n, samples]: of their spectra at three resolutions, and of their samples."""
    total = SAMPLES_WEIGHT * (made - wanted).abs().mean()
    for size, hop in RESOLUTIONS:
        ours, theirs = spectrum(made, size, hop), spectrum(wanted, size, hop)
        total = total + torch.linalg.norm(ours - theirs) / torch.linalg.norm(theirs)
        total = total + (torch.log(ours + 1e-2) - torch.log(theirs + 1e-2)).abs().mean()
    return total


def train(world: Lexicon, words: Sequence[str], model: torch.nn.Module, arguments: argparse.Namespace) -> None:
    """Fit the model; write it and the sounds of all words every `--save` steps."""
    random = np.random.default_rng(arguments.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.rate, betas=(0.8, 0.99), weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, arguments.rate, arguments.steps, pct_start=0.1)
    start, mean = time.monotonic(), 0.0
    for step in range(1, arguments.steps + 1):
        batch = [example(world, words, random) for _ in range(arguments.batch)]
        codes = torch.from_numpy(np.stack([codes for codes, _ in batch])).transpose(1, 2)
        wanted = torch.from_numpy(np.stack([sound for _, sound in batch]))
        made = model(codes)[:, 0]
        loss = loss_of(made[:, FRAME:], wanted[:, FRAME : made.shape[1]])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        mean += (loss.item() - mean) / min(step, 50)
        if step % 50 == 0:
            print(f"step {step} loss {mean:.3f} {time.monotonic() - start:.0f} s", flush=True)
        if step % arguments.save == 0 or step == arguments.steps:
            torch.save(model.state_dict(), arguments.out / "code2wav.pt")
            write_words(world, words, model, arguments.out)


@torch.no_grad()
def write_words(world: Lexicon, words: Sequence[str], model: torch.nn.Module, out: Path) -> None:
    """Write VOICE.npz with the model's sound of every word, for `judge_sounds.py`."""
    for voice in VOICES:
        said = {}
        for word in words:
            codes, _ = phrase(world, voice, [word])
            sound = model(torch.from_numpy(codes.T[None]))[0, 0].numpy()
            said[word] = sound[LEAD * FRAME : (len(codes) - PAUSE) * FRAME]
        np.savez(out / f"{voice}.npz", **said)


def main() -> None:
    """Train code2wav from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sounds", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--words", type=int, default=len(WORDS))
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rate", type=float, default=4e-3)
    parser.add_argument("--save", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    words = WORDS[: arguments.words]
    world = lexicon(arguments.sounds, arguments.seed, words)
    frames = np.concatenate(list(world.codes.values()))
    print(f"{len(frames)} frames, {len(np.unique(frames, axis=0))} different ones in codes")
    model = build(world, arguments.seed)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.3f} M parameters", flush=True)
    train(world, words, model, arguments)


if __name__ == "__main__":
    main()
