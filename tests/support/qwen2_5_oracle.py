"""Transformers' Qwen2.5-Omni: the reference for every token, code and sample. See `tests.support.oracle`."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import Qwen2_5OmniForConditionalGeneration, Qwen2_5OmniProcessor

from tests.support.media import Message
from tests.support.oracle import Golden, Prompts, digest, one_thread, recorder


class Oracle(Prompts):
    """A checkpoint in Transformers on the CPU in float32; its answers have frames of one code.

    Attributes:
        checkpoint: digest of weights and config, the same for checkpoints that answer alike.
    """

    def __init__(self, model_dir: str | Path) -> None:
        self.checkpoint = digest(model_dir)
        self.model = Qwen2_5OmniForConditionalGeneration.from_pretrained(model_dir, dtype=torch.float32).eval()
        self.processor = Qwen2_5OmniProcessor.from_pretrained(model_dir)
        self.eos_ids = json.loads((Path(model_dir) / "generation_config.json").read_text())["eos_token_id"]
        codec = self.model.config.talker_config
        self.codec_ends = [codec.tts_codec_pad_token_id, codec.tts_codec_end_token_id]

    @one_thread()
    @torch.no_grad()
    def run(
        self,
        messages: Sequence[Message],
        *,
        voice: str,
        seed: int,
        thinker_max_tokens: int,
        talker_max_tokens: int,
        talker_sampling: Mapping[str, Any] | None = None,
    ) -> Golden:
        """Thinker greedy, talker greedy (or with `talker_sampling`); `seed`: of the noise from which sound is made."""
        inputs = self.inputs(messages)
        prompt_ids = inputs["input_ids"][0].tolist()
        text = {"thinker_max_new_tokens": thinker_max_tokens, "thinker_eos_token_id": self.eos_ids}
        sequences = self.model.generate(
            **inputs, **text, speaker=voice, thinker_do_sample=False, generation_mode="text"
        )
        thinker_ids = sequences[0, len(prompt_ids) :].tolist()
        if len(thinker_ids) < 2:  # nothing to speak: generate() itself would fail here
            return Golden(prompt_ids, thinker_ids, [], np.zeros((0, 1), np.int64), np.zeros(0, np.float32))
        codes, talker_ids, wav = self._speak(inputs | text, voice, seed, talker_max_tokens, talker_sampling)
        return Golden(prompt_ids, thinker_ids, talker_ids, codes, wav)

    @one_thread()
    @torch.no_grad()
    def read_aloud(
        self, opening: str, text: str, *, voice: str, seed: int, talker_max_tokens: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Codes [n, 1] and samples of `generate`, with a thinker whose reply is the text."""
        tokenizer, thinker = self.processor.tokenizer, self.model.thinker
        prompt = torch.tensor([tokenizer.encode(opening)])
        reply = torch.tensor([tokenizer.encode(text, split_special_tokens=True)])
        said = torch.cat([prompt, reply], dim=1)
        layers = thinker(input_ids=said, output_hidden_states=True).hidden_states
        steps = said.split([prompt.shape[1]] + [1] * reply.shape[1], dim=1)
        starts = np.cumsum([0, *(step.shape[1] for step in steps)])
        by_step = [
            tuple(layer[:, start : start + step.shape[1]] for layer in layers)
            for start, step in zip(starts, steps, strict=False)
        ]
        ended = torch.cat([said, torch.tensor([[self.eos_ids]])], dim=1)
        made = mock.Mock(return_value=SimpleNamespace(sequences=ended, hidden_states=tuple(by_step)))
        inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt), "thinker_eos_token_id": self.eos_ids}
        with mock.patch.object(thinker, "generate", made):
            codes, _, wav = self._speak(inputs, voice, seed, talker_max_tokens, None)
        return codes, wav

    def _speak(
        self,
        inputs: Mapping[str, Any],
        voice: str,
        seed: int,
        talker_max_tokens: int,
        sampling: Mapping[str, Any] | None,
    ) -> tuple[np.ndarray, list[int], np.ndarray]:
        """Run `generate`; returns the codes [n, 1] that token2wav gets, the talker's tokens, and the samples."""
        talker = {f"talker_{name}": value for name, value in (sampling or {"do_sample": False}).items()}
        options = {"talker_max_new_tokens": talker_max_tokens, "talker_eos_token_id": self.codec_ends, **talker}
        talked = recorder(self._talk)
        decoded = recorder(lambda codes, **rest: self.sound(codes, seed, **rest))
        with (
            mock.patch.object(self.model.talker, "generate", talked),
            mock.patch.object(self.model.token2wav, "forward", decoded),
        ):
            self.model.generate(**inputs, **options, speaker=voice, thinker_do_sample=False)
        codes = decoded.arguments[0]
        talker_ids = talked.result[0, inputs["input_ids"].shape[1] + 2 :].tolist()
        return codes[0, :, None].numpy(), talker_ids, decoded.result.numpy()

    def _talk(self, *, pixel_values: Any = None, pixel_values_videos: Any = None, **options: Any) -> torch.Tensor:
        """The talker, as the model defines it. Transformers 5.19 differs from its own forward functions in two ways.

        It gives the talker pixels, which the talker refuses. And it drops an attention mask of ones, without which the
        talker leaves out the code embeddings of its prompt and the positions of media.
        """
        talker = self.model.talker
        forward = type(talker).forward

        def with_mask(**given: Any) -> Any:
            past = given["past_key_values"].get_seq_length()
            new = given["input_ids"] if given.get("inputs_embeds") is None else given["inputs_embeds"]
            mask = torch.ones(new.shape[0], past + new.shape[1], dtype=torch.long)
            return forward(talker, **{**given, "attention_mask": mask})

        with mock.patch.object(talker, "forward", functools.wraps(forward)(with_mask)):
            return type(talker).generate(talker, **options)

    def sound(self, codes: torch.Tensor, seed: int, **options: Any) -> torch.Tensor:
        """The samples of codes [1, n]: token2wav over all of them, with the noise of `seed`."""
        if not codes.shape[1]:
            return torch.zeros(0)
        torch.manual_seed(seed)
        return type(self.model.token2wav).forward(self.model.token2wav, codes, **options)

    def spoken(self, codes: Sequence[int], voice: str, seed: int) -> np.ndarray:
        """The samples of codes in a voice."""
        speaker = self.model.speaker_map[voice]
        with torch.no_grad():
            sound = self.sound(
                torch.tensor([list(codes)]), seed, conditioning=speaker["cond"], reference_mel=speaker["ref_mel"]
            )
        return sound.flatten().numpy()
