"""Writes tiny random Qwen3-Omni checkpoints that Transformers and vLLM load like the released checkpoint."""

from __future__ import annotations

import shutil
from importlib import import_module
from pathlib import Path

from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.model_plugins.qwen3_omni.tiny import config, texts, vocabulary, weights
from vllm_omni_ext.tiny.directory import MARKER, make_room, write_json

FILES = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors",
)
"""All files of a checkpoint, except the marker."""

PACKAGE = "vllm_omni_ext_tiny"
"""Package with the trained checkpoint. It is separate, since most installations do not use its 8 MB of weights."""


def write_qwen3_omni(
    directory: str | Path,
    *,
    seed: int = 0,
    real_vocab: bool = False,
    released_shape: bool = False,
    trained: bool = False,
) -> Path:
    """Write a complete checkpoint and return its directory.

    The default has a vocabulary of a few hundred ids, 4 code groups of 64 codes and about a million parameters.
    The same arguments give the same bytes.

    Args:
        directory: created if needed; a checkpoint written here before is replaced.
        seed: all weights come from it.
        real_vocab: keep the released token ids, 16 x 2048 codes and 1920 samples a frame; about 25 million parameters.
        released_shape: the sizes of Qwen3-Omni-30B-A3B-Instruct as in its public `config.json`, without weights.
        trained: a checkpoint that speaks and understands 44 words, from the package vllm-omni-ext-tiny; has no seed.

    Raises:
        ConfigError: two of `real_vocab`, `released_shape` and `trained`, `trained` without its package, or a directory
            with other files in it.
    """
    if real_vocab + released_shape + trained > 1:
        raise ConfigError(
            "model_plugins.qwen3_omni.tiny.qwen3_omni: real_vocab, released_shape and trained exclude each other; "
            "choose one"
        )
    path = Path(directory)
    if trained:
        return _write_trained(path, seed)
    size = config.RELEASED if released_shape else config.REAL_VOCAB if real_vocab else config.SMALL
    return write_sizes(path, size, seed)


def write_sizes(path: Path, size: config.Sizes, seed: int = 0) -> Path:
    """Write a checkpoint of these sizes with random weights; `config.RELEASED` is written without weights.

    Args:
        path: the directory; see `write_qwen3_omni`.
        size: sizes of the model.
        seed: all weights come from it.
    """
    words = vocabulary.small_vocabulary() if size is config.SMALL else vocabulary.real_vocabulary()
    make_room(path, FILES)
    write_json(path / MARKER, {"model": "qwen3-omni", "sizes": size.name, "seed": seed})
    _write_texts(path, size, words)
    if size is not config.RELEASED:
        _write_weights(path, size, words, seed)
    return path


def _write_trained(path: Path, seed: int) -> Path:
    if seed:
        raise ConfigError("the trained checkpoint has no seed; leave out `seed`")
    source = trained_checkpoint()
    make_room(path, FILES)
    for file in sorted(source.iterdir()):
        shutil.copyfile(file, path / file.name)
    return path


def trained_checkpoint() -> Path:
    """Return the directory of the installed trained checkpoint.

    Raises:
        ConfigError: the package with the checkpoint is not installed.
    """
    try:
        found = import_module(PACKAGE)
    except ModuleNotFoundError as err:
        if err.name != PACKAGE:
            raise
        raise ConfigError(
            "the trained checkpoint is a package of its own that is not installed; run: pip install vllm-omni-ext-tiny "
            "(in a clone of the repository: pip install dev/training/package)"
        ) from None
    return Path(found.qwen3_omni())


def _write_texts(path: Path, size: config.Sizes, words: vocabulary.Vocabulary) -> None:
    write_json(path / "config.json", config.model_config(size, words))
    write_json(path / "generation_config.json", texts.generation_config(size, words))
    write_json(path / "preprocessor_config.json", texts.PREPROCESSOR_CONFIG)
    write_json(path / "tokenizer.json", texts.tokenizer_json(words))
    write_json(path / "tokenizer_config.json", texts.tokenizer_config(words))
    shutil.copyfile(texts.CHAT_TEMPLATE, path / "chat_template.jinja")


def _write_weights(path: Path, size: config.Sizes, words: vocabulary.Vocabulary, seed: int) -> None:
    """Create the Transformers model with random weights; Transformers writes it in its own checkpoint format."""
    import torch
    from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration

    shape = Qwen3OmniMoeConfig(**config.model_config(size, words))
    with torch.random.fork_rng(devices=[]):
        model = Qwen3OmniMoeForConditionalGeneration(shape)
    weights.fill(model, size, words, seed)
    texts_before = {name: (path / name).read_bytes() for name in ("config.json", "generation_config.json")}
    model.save_pretrained(path)
    for name, content in texts_before.items():
        (path / name).write_bytes(content)
