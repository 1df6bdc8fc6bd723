"""Requests with their replies as input of the thinker: ids, sounds and pictures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor

from dev.training.tiny_omni import tasks
from dev.training.tiny_omni.listening import HOP, RATE, Voices, audio_tokens
from dev.training.tiny_omni.pictures import picture
from dev.training.tiny_omni.words import chat, ids_of, world_vocabulary
from vllm_omni_ext.model_plugins.qwen3_omni.tiny.texts import MERGED_PATCHES, PATCH, PREPROCESSOR_CONFIG

IGNORE = -100
MERGED = PATCH * MERGED_PATCHES
"""Side in pixels of the part of a picture that becomes one embedding."""


@dataclass(frozen=True)
class Turn:
    """One request with its reply; at most one of `sound` and `image` is set.

    Attributes:
        request: text with one placeholder for each embedding of the sound or the picture.
        reply: the reply's words.
        sound: samples at 16 kHz.
        middles: the sample in the middle of each of the sound's words.
    """

    request: str
    reply: list[str]
    sound: np.ndarray | None = None
    image: Image | None = None
    middles: tuple[int, ...] = ()


class Requests:
    """Draws random requests with their replies.

    Args:
        voices: sounds of words, for requests with a sound.
    """

    def __init__(self, voices: Voices) -> None:
        self._voices = voices

    def text(self, random: np.random.Generator) -> Turn:
        """Return a written request."""
        return Turn(*tasks.text_task(random))

    def spoken(self, random: np.random.Generator, longest: int = tasks.LONGEST) -> Turn:
        """Return a request with a sound; the reply is the words in the sound."""
        words = tasks.some_words(random, longest=longest)
        sound, middles = self._voices.say(words, random)
        count = audio_tokens(len(sound) // HOP)
        media = "<|audio_start|>" + "<|audio_pad|>" * count + "<|audio_end|>"
        return Turn(asked(media, tasks.HEAR, random), words, sound=sound, middles=tuple(middles))

    def seen(self, random: np.random.Generator) -> Turn:
        """Return a request with a picture; the reply is the name of the picture."""
        image, name = picture(random)
        count = (image.width // MERGED) * (image.height // MERGED)
        media = "<|vision_start|>" + "<|image_pad|>" * count + "<|vision_end|>"
        return Turn(asked(media, tasks.SEE, random), name, image=image)


def asked(media: str, question: str, random: np.random.Generator) -> str:
    """Return the text of a request: media placeholders with the question after or before them, or without question."""
    return (media + question, question + media, media)[random.choice(3, p=[0.5, 0.25, 0.25])]


@dataclass(frozen=True)
class Preprocessors:
    """Transformers' preprocessors with the settings of the checkpoint."""

    sound: Any
    image: Any

    @classmethod
    def of_checkpoint(cls) -> Preprocessors:
        """Return the preprocessors of the checkpoint's `preprocessor_config.json`."""
        from transformers import Qwen2VLImageProcessor, WhisperFeatureExtractor

        settings = PREPROCESSOR_CONFIG
        return cls(WhisperFeatureExtractor(**settings), Qwen2VLImageProcessor(**settings))

    def media(self, turns: list[Turn]) -> dict[str, Tensor]:
        """Return the thinker's inputs for all sounds and pictures of the turns, by name of the input."""
        found: dict[str, Tensor] = {}
        sounds = [turn.sound for turn in turns if turn.sound is not None]
        if sounds:
            options = {"sampling_rate": RATE, "padding": True, "truncation": False, "return_attention_mask": True}
            mel = self.sound(sounds, return_tensors="pt", **options)
            found |= {"input_features": mel["input_features"], "feature_attention_mask": mel["attention_mask"]}
        images = [turn.image for turn in turns if turn.image is not None]
        if images:
            patches = self.image(images=images, return_tensors="pt")
            found |= {name: patches[name] for name in ("pixel_values", "image_grid_thw")}
        return found


def tensors(turns: list[Turn], preprocessors: Preprocessors) -> tuple[dict[str, Tensor], Tensor]:
    """Return the thinker's inputs by name, and the token ids to predict [n, length] (IGNORE where there is none).

    The input ids are those of the requests with their replies (teacher forcing).

    Args:
        turns: all without media, or all with a sound, or all with a picture.
    """
    vocabulary = world_vocabulary()
    prompts = [ids_of(chat(turn.request), vocabulary) for turn in turns]
    replies = [ids_of(" ".join(turn.reply) + "<|im_end|>", vocabulary) for turn in turns]
    length = max(len(prompt) + len(reply) for prompt, reply in zip(prompts, replies, strict=True))
    ids = torch.full((len(turns), length), vocabulary.id_of("<|endoftext|>"))
    mask, wanted = torch.zeros_like(ids), torch.full_like(ids, IGNORE)
    for row, (prompt, reply) in enumerate(zip(prompts, replies, strict=True)):
        start, stop = len(prompt), len(prompt) + len(reply)
        ids[row, :stop] = torch.tensor(prompt + reply)
        mask[row, :stop] = 1
        wanted[row, start - 1 : stop - 1] = torch.tensor(reply)
    return {"input_ids": ids, "attention_mask": mask} | preprocessors.media(turns), wanted
