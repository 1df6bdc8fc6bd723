"""Assigns codec codes to sound frames: a small residual quantiser, fitted to the spectra of all words of the model.

A frame has one code of each group. The codes of the first group are the clusters of k-means on the features of frames,
which include the voice. The codes of each further group are clusters of the remaining differences (residuals). Code 0
of every group means silence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dev.training.tiny_omni.world import FRAME, RATE

STEPS = 6
"""Number of spectra computed for a frame."""
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
    """Return features [frames, STEPS * BANDS + 1] of a sound: log mel spectra, and the voice.

    Args:
        sound: samples at 24 kHz, a whole number of frames.
        voice: 0 or 1.
    """
    hop = FRAME // STEPS
    padded = np.pad(sound, (hop // 2, hop + hop // 2))
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * hop)[::hop][: len(sound) // hop]
    spectra = np.abs(np.fft.rfft(windows * np.hanning(2 * hop), n=1024))
    mel = np.log(spectra @ bank(spectra.shape[1]).T + FLOOR * hop)
    frames = mel.reshape(len(sound) // FRAME, -1)
    return np.column_stack([frames, np.full(len(frames), VOICE_WEIGHT * (2 * voice - 1))])


def nearest(points: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """Return [n], the index of the nearest centre [count, dimensions] for each point [n, dimensions]."""
    return np.argmin((centres**2).sum(1) - 2 * points @ centres.T, axis=1)


def k_means(points: np.ndarray, count: int, random: np.random.Generator, rounds: int = 30) -> np.ndarray:
    """Cluster points [n, dimensions] with k-means++; return the centres [count, dimensions]."""
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
    """A fitted residual quantiser.

    Attributes:
        centres: [groups, codes, dimensions]; code 0 is silence.
        middle: [dimensions], the mean of all features, which is subtracted before the first group.
    """

    centres: np.ndarray
    middle: np.ndarray

    def encode(self, points: np.ndarray) -> np.ndarray:
        """Return codes [frames, groups] of features [frames, dimensions]; never code 0."""
        left, codes = points - self.middle, []
        for book in self.centres:
            chosen = 1 + nearest(left, book[1:])
            left = left - book[chosen]
            codes.append(chosen)
        return np.stack(codes, axis=1)


def fit(points: np.ndarray, groups: int, size: int, seed: int) -> Codebooks:
    """Fit codebooks of `groups` groups with `size` codes each to features [frames, dimensions]."""
    random = np.random.default_rng(seed)
    middle = points.mean(0)
    left, books = points - middle, []
    for _ in range(groups):
        book = k_means(left, size - 1, random)
        left = left - book[nearest(left, book)]
        books.append(np.vstack([np.zeros(points.shape[1]), book]))
    return Codebooks(np.stack(books), middle)


def silence_features() -> np.ndarray:
    """Return the features [dimensions] of a silent frame; the voice feature is 0, between both voices."""
    quiet = features(np.zeros(FRAME, np.float32), 0)[0]
    quiet[-1] = 0  # in no voice
    return quiet


def starting_vectors(books: Codebooks, width: int, points: np.ndarray) -> np.ndarray:
    """Return start values [groups, codes, width] of code2wav's code embedding.

    The values of a code are proportional to its centre in the first `width` principal components of the features, which
    are scaled to equal variance. So the mean over a frame's codes approximates the frame's features, with a mean square
    of 1.

    Args:
        points: features [frames, dimensions] to which `books` were fitted.
    """
    _, spread, axes = np.linalg.svd(points - books.middle, full_matrices=False)
    weighed = (axes[:width] / np.sqrt(spread[:width, None] + 1e-6)).T
    vectors = np.zeros((*books.centres.shape[:2], width), np.float32)
    vectors[:, :, : weighed.shape[1]] = books.centres @ weighed
    vectors[0, 0, : weighed.shape[1]] = (silence_features() - books.middle) @ weighed
    return vectors * len(vectors) / np.sqrt(np.mean(((points - books.middle) @ weighed) ** 2))
