"""Writes a tiny random BAGEL checkpoint with the files of the released one.

Irregularities of the release are kept: `vit_config.json` counts one layer more than the weights have, `max_latent_size`
in `config.json` is smaller than the side of the stored table of latent positions, patch weights are two-dimensional in
(row, column, channel) order, and both position tables are stored in bfloat16.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_omni_ext.model_plugins.bagel.sizes import RELEASED, BagelSizes, LlmSizes, ResizeRule, VaeSizes, VitSizes
from vllm_omni_ext.model_plugins.qwen3_omni.tiny import vocabulary
from vllm_omni_ext.model_plugins.qwen3_omni.tiny.texts import tokenizer_json
from vllm_omni_ext.model_plugins.qwen3_omni.tiny.vocabulary import Vocabulary, byte_letters
from vllm_omni_ext.tiny.directory import MARKER, make_room, write_json

if TYPE_CHECKING:
    from torch import Tensor

Json = dict[str, Any]

FILES = (
    "config.json",
    "llm_config.json",
    "vit_config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "ema.safetensors",
    "ae.safetensors",
    "model.safetensors.index.json",
)
"""All files of a checkpoint, except the marker."""

SMALL = BagelSizes(
    llm=LlmSizes(
        hidden=64,
        feed_forward=128,
        layers=3,
        heads=2,
        kv_heads=1,
        head_dim=32,
        vocabulary=384,
        rope_theta=1e6,
        epsilon=1e-6,
    ),
    vit=VitSizes(hidden=64, feed_forward=96, layers=2, heads=2, patch=14, side=8, epsilon=1e-6),
    vae=VaeSizes(
        width=32, widths=(32, 32, 32, 32), blocks=1, channels=16, scale=RELEASED.vae.scale, shift=RELEASED.vae.shift
    ),
    latent_side=16,
    latent_patch=2,
    vae_resize=ResizeRule(96, 48, 16),
    vit_resize=ResizeRule(112, 42, 14),
)

LONGEST, RELEASED_LONGEST = 2048, 32768
"""`max_position_embeddings` of the tiny checkpoints and of the release."""

SPECIAL_TOKENS = (*vocabulary.SPECIAL_TOKENS[:14], *vocabulary.SPECIAL_TOKENS[16:19])
"""The special tokens of Qwen3-Omni, without those for tools, repositories, thinking and sound."""

_MERGES = (
    "Ġ t/h e/i n/Ġ a/r e/o n/Ġt he/e r/Ġ s/a t/Ġ w/e n/o r/i t/i s/Ġ o/Ġ c/a n/Ġ b/e s/in g/o u/Ġ f/e d/Ġ p/a r/"
    "l l/Ġ in/Ġ re/Ġan d/o f/l e/Ġ m/h i/s t/t h/Ġo f/s h"
)
"""BPE merges of frequent English pairs, by priority. A pair is left out if one of its parts is not a token yet."""


def write_bagel(
    directory: str | Path, *, seed: int = 0, released_shape: bool = False, size: BagelSizes | None = None
) -> Path:
    """Write a complete checkpoint of about a million parameters and return its directory.

    The same seed gives the same tensors on every machine and with every version of torch.

    Args:
        directory: created if needed; a checkpoint written here before is replaced.
        seed: all weights come from it.
        released_shape: the sizes of BAGEL-7B-MoT; all weights are zeros in sparse files, which take no room on a disk.
        size: sizes of the checkpoint instead of the tiny ones, for measurements.

    Raises:
        ConfigError: the path is a file, or a directory with other files in it.
    """
    path, words = Path(directory), bagel_vocabulary()
    name = "released" if released_shape else "other" if size else "small"
    size = RELEASED if released_shape else size or SMALL
    make_room(path, FILES)
    write_json(path / MARKER, {"model": "bagel", "sizes": name, "seed": seed})
    write_json(path / "config.json", model_config(size, words))
    write_json(path / "llm_config.json", _llm_config(size, words))
    write_json(path / "vit_config.json", _vit_config(size, size.vit.layers + 1))
    write_json(path / "generation_config.json", _generation_config(words))
    write_json(path / "preprocessor_config.json", _preprocessor_config(size))
    _write_tokenizer(path, words)
    _write_weights(path, size, words, None if released_shape else seed)
    return path


def bagel_vocabulary() -> Vocabulary:
    """Return a vocabulary: the 256 bytes (the id is the byte's value), merged pairs, then the special tokens."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    in_order = [*printable, *sorted(set(range(256)) - set(printable))]
    letters = dict(zip(in_order, byte_letters(), strict=True))
    ids = {letters[byte]: byte for byte in range(256)}
    merges: list[tuple[str, str]] = []
    for line in _MERGES.split("/"):
        left, right = line.split(" ")
        if left in ids and right in ids and left + right not in ids:
            ids[left + right] = len(ids)
            merges.append((left, right))
    return Vocabulary(ids, tuple(merges), {token: len(ids) + at for at, token in enumerate(SPECIAL_TOKENS)})


def _llm_config(size: BagelSizes, words: Vocabulary) -> Json:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": words.id_of("<|endoftext|>"),
        "eos_token_id": words.id_of("<|im_end|>"),
        "hidden_act": "silu",
        "hidden_size": size.llm.hidden,
        "initializer_range": 0.02,
        "intermediate_size": size.llm.feed_forward,
        "max_position_embeddings": RELEASED_LONGEST if size is RELEASED else LONGEST,
        "max_window_layers": size.llm.layers,
        "model_type": "qwen2",
        "num_attention_heads": size.llm.heads,
        "num_hidden_layers": size.llm.layers,
        "num_key_value_heads": size.llm.kv_heads,
        "qk_norm": True,
        "rms_norm_eps": size.llm.epsilon,
        "rope_theta": size.llm.rope_theta,
        "sliding_window": 131072,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": size.llm.vocabulary,
    }


def _vit_config(size: BagelSizes, layers: int) -> Json:
    return {
        "attention_dropout": 0.0,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": size.vit.hidden,
        "image_size": size.vit.side * size.vit.patch,
        "intermediate_size": size.vit.feed_forward,
        "layer_norm_eps": size.vit.epsilon,
        "model_type": "siglip_vision_model",
        "num_attention_heads": size.vit.heads,
        "num_channels": 3,
        "num_hidden_layers": layers,
        "patch_size": size.vit.patch,
        "torch_dtype": "bfloat16",
    }


def model_config(size: BagelSizes, words: Vocabulary) -> Json:
    """Return `config.json`. Its `vit_config` has the true number of layers: vLLM corrects only the released number."""
    return {
        "architectures": ["BagelForConditionalGeneration"],
        "model_type": "bagel",
        "visual_gen": True,
        "visual_und": True,
        "llm_config": _llm_config(size, words),
        "vit_config": _vit_config(size, size.vit.layers),
        "vae_config": {
            "resolution": 256,
            "in_channels": 3,
            "downsample": size.vae.downsample,
            "ch": size.vae.width,
            "out_ch": 3,
            "ch_mult": [width // size.vae.width for width in size.vae.widths],
            "num_res_blocks": size.vae.blocks,
            "z_channels": size.vae.channels,
            "scale_factor": size.vae.scale,
            "shift_factor": size.vae.shift,
        },
        "vae_transform": list(astuple(size.vae_resize)),
        "vit_transform": list(astuple(size.vit_resize)),
        "latent_patch_size": size.latent_patch,
        "max_latent_size": size.latent_side // 2,
        "vit_max_num_patch_per_side": size.vit.side,
        "connector_act": "gelu_pytorch_tanh",
        "interpolate_pos": False,
        "timestep_shift": 1.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def _generation_config(words: Vocabulary) -> Json:
    end = words.id_of("<|endoftext|>")
    return {"bos_token_id": end, "pad_token_id": end, "eos_token_id": [words.id_of("<|im_end|>"), end]}


def _preprocessor_config(size: BagelSizes) -> Json:
    """Return `preprocessor_config.json` of the release: a resize to a square, which the model does not use."""
    side = size.vit.side * size.vit.patch
    return {
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "image_processor_type": "SiglipImageProcessor",
        "processor_class": "BagelProcessor",
        "rescale_factor": 1 / 255,
        "resample": 3,
        "size": {"height": side, "width": side},
    }


def _write_tokenizer(path: Path, words: Vocabulary) -> None:
    common = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    config = {
        "add_prefix_space": False,
        "add_bos_token": False,
        "added_tokens_decoder": {str(id_): {"content": token, **common} for token, id_ in words.specials.items()},
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "errors": "replace",
        "model_max_length": 2048,
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
    }
    write_json(path / "tokenizer.json", tokenizer_json(words))
    write_json(path / "tokenizer_config.json", config)
    write_json(path / "vocab.json", dict(words.ids))
    lines = ["#version: 0.2", *(" ".join(pair) for pair in words.merges)]
    (path / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _write_weights(path: Path, size: BagelSizes, words: Vocabulary, seed: int | None) -> None:
    from safetensors.torch import save_file

    from vllm_omni_ext.model_plugins.bagel.tiny.weights import autoencoder_weights, model_weights

    files: dict[str, dict[str, Tensor]] = {
        "ema.safetensors": model_weights(size, words, seed),
        "ae.safetensors": autoencoder_weights(size, seed),
    }
    for name, tensors in files.items():
        if seed is None:
            _write_zeros(path / name, tensors)
        else:
            save_file(tensors, path / name, metadata={"format": "pt"})
    total = sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())
    where = {key: name for name, tensors in files.items() for key in tensors}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    write_json(path / "model.safetensors.index.json", index)


def _write_zeros(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a sparse safetensors file: a header, and a hole of the size of these tensors, whose values are not read."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": "BF16" if tensor.itemsize == 2 else "F32",
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        file.truncate(file.tell() + end)
