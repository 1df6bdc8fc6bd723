"""Transformers: the reference for every token, frame and sample.

Messages are those of `tests.support.media`. The prompt ids are those of stock vLLM: audio is padded with zeros to a
multiple of the feature hop (160 samples), or a ragged end changes the number of features; video frames go in as they
are, without `fps`: both sides count one frame a second.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import Qwen3OmniMoeForConditionalGeneration, Qwen3OmniMoeProcessor

from tests.support.media import Message, of_kind, processor_options

FEATURE_HOP = 160
"""Samples between two mel frames at 16 kHz."""


@dataclass(frozen=True, slots=True)
class Golden:
    """The complete result of one request.

    Attributes:
        prompt_ids: the thinker's prompt, media placeholders expanded.
        thinker_ids: generated text ids with the final token, an end token or the last one allowed.
        talker_ids: generated codes of the first group with the final token; empty for a reply of one token.
        frames: [frames, groups] int64; one frame fewer than `talker_ids`.
        wav: [samples] float32 at 24 kHz: all frames decoded in one piece.
    """

    prompt_ids: list[int]
    thinker_ids: list[int]
    talker_ids: list[int]
    frames: np.ndarray
    wav: np.ndarray


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Torch's threads wait for each other by spinning: if other programs run, small models take minutes with two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Prompts:
    """Prompts and features of a processor."""

    processor: Any

    def prompt(self, messages: Sequence[Message]) -> str:
        """The chat template with one placeholder for each medium."""
        return self.processor.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)

    def inputs(self, messages: Sequence[Message]) -> dict[str, Any]:
        """Ids and features of one request (batch of 1), and options of `generate`."""
        clips = of_kind(messages, "audio") + of_kind(messages, "sound")
        audio = [whole_hops(np.asarray(clip, dtype=np.float32)) for clip in clips]
        options = processor_options(messages)
        batch = self.processor(
            text=[self.prompt(messages)],
            audio=audio or None,
            images=of_kind(messages, "image") or None,
            videos=of_kind(messages, "video") or None,
            return_tensors="pt",
            **options,
        )
        return {**batch, **options}


def digest(model_dir: str | Path) -> str:
    """Return the digest of a checkpoint's weights and config: numbers of heads are in the config only."""
    files = [Path(model_dir, "config.json"), *sorted(Path(model_dir).glob("*.safetensors"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


class Oracle(Prompts):
    """A checkpoint in Transformers on the CPU in float32.

    Attributes:
        checkpoint: digest of weights and config, the same for checkpoints that answer alike.
    """

    def __init__(self, model_dir: str | Path) -> None:
        self.checkpoint = digest(model_dir)
        self.model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(model_dir, dtype=torch.float32).eval()
        # In Transformers 5.19 the talker's get_rope_index reads an audio_config that only the thinker's configuration
        # has: without this line, generate() fails for audio together with an image or video.
        self.model.talker.config.audio_config = self.model.config.thinker_config.audio_config
        self.processor = Qwen3OmniMoeProcessor.from_pretrained(model_dir)
        generation = json.loads((Path(model_dir) / "generation_config.json").read_text())
        self.eos_ids: int | list[int] = generation.get("eos_token_id", self.model.config.im_end_token_id)

    @one_thread()
    @torch.no_grad()
    def run(
        self,
        messages: Sequence[Message],
        *,
        voice: str,
        thinker_max_tokens: int,
        talker_max_tokens: int,
        talker_sampling: Mapping[str, Any] | None = None,
    ) -> Golden:
        """Thinker greedy, talker greedy (or with `talker_sampling`, e.g. `{"do_sample": True, "top_k": 50}`)."""
        inputs = self.inputs(messages)
        prompt_ids = inputs["input_ids"][0].tolist()
        talker = {f"talker_{name}": value for name, value in (talker_sampling or {"do_sample": False}).items()}
        options = {
            "thinker_max_new_tokens": thinker_max_tokens,
            "thinker_eos_token_id": self.eos_ids,
            "thinker_do_sample": False,
            "talker_max_new_tokens": talker_max_tokens,
        }
        sequences, talker_ids, codes = self._generate(inputs | options | talker, voice)
        wav = self.model.code2wav(codes) if codes.shape[-1] else torch.zeros(0)
        thinker_ids = sequences[0, len(prompt_ids) :].tolist()
        return Golden(prompt_ids, thinker_ids, talker_ids, codes[0].T.numpy(), wav.flatten().numpy())

    def _generate(self, arguments: Mapping[str, Any], voice: str) -> tuple[torch.Tensor, list[int], torch.Tensor]:
        """Run `generate`; returns the thinker's ids [1, prompt and answer], the talker's tokens, and the codes
        [1, groups, frames] that code2wav gets.
        """
        thought, talked = recorder(self.model.thinker.generate), recorder(self.model.talker.generate)
        decoded = recorder(self.model.code2wav.chunked_decode)
        with (
            mock.patch.object(self.model.thinker, "generate", thought),
            mock.patch.object(self.model.talker, "generate", talked),
            mock.patch.object(self.model.code2wav, "chunked_decode", decoded),
        ):
            try:
                self.model.generate(**arguments, speaker=voice, return_audio=True)
            except (RuntimeError, IndexError):
                # generate() cannot speak a reply of one token, and cannot stack zero frames: the talker ended at once
                one_token = thought.result.sequences.shape[1] == arguments["input_ids"].shape[1] + 1
                if not one_token and (talked.result is None or talked.result.sequences.shape[1] != 1):
                    raise
        talker_ids = [] if talked.result is None else talked.result.sequences[0].tolist()
        groups = self.model.config.talker_config.num_code_groups
        codes = decoded.arguments[0] if decoded.arguments else torch.zeros((1, groups, 0), dtype=torch.int64)
        return thought.result.sequences, talker_ids, codes


class recorder:
    """Calls a function and keeps the last positional arguments and result."""

    arguments: tuple[Any, ...] = ()
    result: Any = None

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.arguments, self.result = arguments, self.function(*arguments, **options)
        return self.result


def whole_hops(samples: np.ndarray) -> np.ndarray:
    """Zero-pad [samples] to a multiple of the feature hop."""
    return np.pad(samples, (0, -len(samples) % FEATURE_HOP))
