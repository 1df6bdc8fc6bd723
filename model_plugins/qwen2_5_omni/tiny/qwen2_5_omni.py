"""Writes tiny random Qwen2.5-Omni checkpoints that Transformers and vLLM load like the released checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_omni_ext.model_plugins.qwen2_5_omni.speakers import SPEAKERS_FILE
from vllm_omni_ext.model_plugins.qwen2_5_omni.tiny import config, weights
from vllm_omni_ext.model_plugins.qwen3_omni.tiny import texts
from vllm_omni_ext.model_plugins.qwen3_omni.tiny.vocabulary import Vocabulary, real_vocabulary, small_vocabulary
from vllm_omni_ext.tiny.directory import MARKER, make_room, write_json

if TYPE_CHECKING:
    import torch


Speakers = dict[str, dict[str, object]]

CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")

FILES = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors",
    SPEAKERS_FILE,
)
"""All files of a checkpoint, except the marker."""

PREPROCESSOR_CONFIG = {
    **texts.PREPROCESSOR_CONFIG,
    "processor_class": "Qwen2_5OmniProcessor",
    "patch_size": 14,
}


def write_qwen2_5_omni(directory: str | Path, *, seed: int = 0, released_shape: bool = False) -> Path:
    """Write a complete checkpoint of about 0.5 million parameters and return its directory.

    Args:
        directory: created if needed; a checkpoint written here before is replaced.
        seed: all weights and speakers come from it.
        released_shape: the sizes of Qwen2.5-Omni-7B as in its public `config.json`, without weights.

    Raises:
        ConfigError: the directory has other files in it.
    """
    import torch

    path, sizes = Path(directory), config.RELEASED if released_shape else config.SMALL
    words = (real_vocabulary if released_shape else small_vocabulary)(config.SPECIAL_TOKENS)
    generator = torch.Generator().manual_seed(seed)
    speakers = _speakers(sizes, words, generator)
    make_room(path, FILES)
    write_json(path / MARKER, {"model": "qwen2-5-omni", "sizes": sizes.name, "seed": seed})
    write_json(path / "config.json", config.model_config(sizes, words))
    ends = {"eos_token_id": words.id_of("<|im_end|>"), "pad_token_id": words.id_of("<|endoftext|>")}
    write_json(path / "generation_config.json", ends)
    write_json(path / "preprocessor_config.json", PREPROCESSOR_CONFIG)
    write_json(path / "tokenizer.json", texts.tokenizer_json(words))
    write_json(path / "tokenizer_config.json", texts.tokenizer_config(words, config.NAMED_TOKENS))
    shutil.copyfile(CHAT_TEMPLATE, path / "chat_template.jinja")
    torch.save(speakers, path / SPEAKERS_FILE)
    if not released_shape:
        _write_weights(path, words, speakers, generator)
    return path


def _write_weights(path: Path, words: Vocabulary, speakers: Speakers, generator: torch.Generator) -> None:
    """Create the Transformers model with random weights; Transformers writes it in its own checkpoint format."""
    import torch
    from transformers import Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration

    shape = Qwen2_5OmniConfig(**config.model_config(config.SMALL, words))
    with torch.random.fork_rng(devices=[]):
        model = Qwen2_5OmniForConditionalGeneration(shape)
    weights.fill(model, words, speakers, generator)
    texts_before = {name: (path / name).read_bytes() for name in ("config.json", "generation_config.json")}
    model.save_pretrained(path)
    for name, content in texts_before.items():
        (path / name).write_bytes(content)


def _speakers(sizes: config.Sizes, words: Vocabulary, generator: torch.Generator) -> Speakers:
    """Return random speakers in the released layout: text id, embedding and reference spectrogram of each by name."""
    import torch

    return {
        name: {
            "bos_token": token,
            "cond": torch.randn(1, sizes.speaker_width, generator=generator),
            "ref_mel": torch.randn(1, sizes.reference_frames, sizes.mel, generator=generator),
        }
        for name, token in config.speaker_tokens(words).items()
    }
