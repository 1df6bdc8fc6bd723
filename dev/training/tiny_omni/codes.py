"""Assigns codes to sound frames: a small residual quantiser on the spectra of all frames of the closed world.

The first group of codes is k-means on the features of a frame (its voice included), each further group k-means on the
residual. Code 0 of every group means silence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dev.training.tiny_omni.world import FRAME, RATE

STEPS = 6
"""Spectra of a frame."""
BANDS = 32
FLOOR = 1e-3
VOICE_WEIGHT = 8.0


def bank(bins: int) -> np.ndarray:
    """Return triangular filters [bands, bins], evenly spaced on the mel scale up to half the rate."""
    top = 2595 * np.log10(1 + RATE / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, top, BANDS + 2) / 2595) - 1)
    hertz = np.linspace(0, RATE / 2, bins)
    up = (hertz - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    down = (edges[2:, None] - hertz) / (edges[2:] - edges[1:-1])[:, None]
    return np.clip(np.minimum(up, down), 0, None)


def features(sound: np.ndarray, voice: int) -> np.ndarray:
    """Return features [frames, STEPS * BANDS + 1] of a whole number of frames."""
    hop = FRAME // STEPS
    padded = np.pad(sound, (hop // 2, hop + hop // 2))
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * hop)[::hop][: len(sound) // hop]
    spectra = np.abs(np.fft.rfft(windows * np.hanning(2 * hop), n=1024))
    mel = np.log(spectra @ bank(spectra.shape[1]).T + FLOOR * hop)
    frames = mel.reshape(len(sound) // FRAME, -1)
    return np.column_stack([frames, np.full(len(frames), VOICE_WEIGHT * (2 * voice - 1))])


def nearest(points: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """Return the index of the nearest centre of each point."""
    return np.argmin((centres**2).sum(1) - 2 * points @ centres.T, axis=1)


def k_means(points: np.ndarray, count: int, random: np.random.Generator, rounds: int = 30) -> np.ndarray:
    """Return centres [count, dimensions]; they start at points far from each other."""
    centres = points[[random.integers(len(points))]]
    while len(centres) < count:
        distance = np.min(((points[:, None] - centres) ** 2).sum(-1), axis=1)
        if distance.sum() == 0:
            return np.pad(centres, ((0, count - len(centres)), (0, 0)), mode="edge")
        centres = np.vstack([centres, points[random.choice(len(points), p=distance / distance.sum())]])
    for _ in range(rounds):
        member = nearest(points, centres)
        for index in np.unique(member):
            centres[index] = points[member == index].mean(0)
    return centres


@dataclass(frozen=True)
class Codebooks:
    """Centres [groups, codes, dimensions]; code 0 is silence. `middle` is the mean that is subtracted first."""

    centres: np.ndarray
    middle: np.ndarray

    def encode(self, points: np.ndarray) -> np.ndarray:
        """Return codes [frames, groups] of features."""
        left, codes = points - self.middle, []
        for book in self.centres:
            chosen = 1 + nearest(left, book[1:])
            left = left - book[chosen]
            codes.append(chosen)
        return np.stack(codes, axis=1)


def fit(points: np.ndarray, groups: int, size: int, seed: int) -> Codebooks:
    """Fit the codebooks to features [frames, dimensions]."""
    random = np.random.default_rng(seed)
    middle = points.mean(0)
    left, books = points - middle, []
    for _ in range(groups):
        book = k_means(left, size - 1, random)
        left = left - book[nearest(left, book)]
        books.append(np.vstack([np.zeros(points.shape[1]), book]))
    return Codebooks(np.stack(books), middle)


def silence_features() -> np.ndarray:
    """Return the features of silence in no voice."""
    quiet = features(np.zeros(FRAME, np.float32), 0)[0]
    quiet[-1] = 0  # in no voice
    return quiet


def starting_vectors(books: Codebooks, width: int, points: np.ndarray) -> np.ndarray:
    """Return vectors [groups, codes, width] for a code embedding: the centres' main components, small ones raised.

    The mean over a frame's codes then is about the frame's features, with a mean square of 1.
    """
    _, spread, axes = np.linalg.svd(points - books.middle, full_matrices=False)
    weighed = (axes[:width] / np.sqrt(spread[:width, None] + 1e-6)).T
    vectors = np.zeros((*books.centres.shape[:2], width), np.float32)
    vectors[:, :, : weighed.shape[1]] = books.centres @ weighed
    vectors[0, 0, : weighed.shape[1]] = (silence_features() - books.middle) @ weighed
    return vectors * len(vectors) / np.sqrt(np.mean(((points - books.middle) @ weighed) ** 2))
