"""Writes one checkpoint from the weights of the three stages, which are trained separately.

The weights are `thinker.pt`, `talker.pt` and `code2wav.pt` in a directory.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch

from dev.training.tiny_omni import model as whole
from dev.training.tiny_omni.words import world_vocabulary
from vllm_omni_ext.model_plugins.qwen3_omni.tiny import texts
from vllm_omni_ext.model_plugins.qwen3_omni.tiny.qwen3_omni import FILES
from vllm_omni_ext.tiny.directory import MARKER, make_room, write_json

PARTS = ("thinker", "talker", "code2wav")


def load_parts(directory: Path) -> Any:
    """Return Transformers' model of all stages with the weights of a training directory."""
    model = whole.build(0)
    for part in PARTS:
        getattr(model, part).load_state_dict(torch.load(directory / f"{part}.pt"))
    return model.eval()


def write_checkpoint(model: Any, path: Path) -> None:
    """Write a complete checkpoint; the weights are stored in float16, and `config.json` selects float32."""
    make_room(path, FILES)
    write_json(path / MARKER, {"model": "qwen3-omni", "sizes": whole.TRAINED.name})
    model.half().save_pretrained(path)
    (path / "model.safetensors").chmod(0o644)
    vocabulary = world_vocabulary()
    write_json(path / "config.json", whole.whole_config())
    write_json(path / "generation_config.json", texts.generation_config(whole.TRAINED, vocabulary))
    write_json(path / "preprocessor_config.json", texts.PREPROCESSOR_CONFIG)
    write_json(path / "tokenizer.json", texts.tokenizer_json(vocabulary))
    write_json(path / "tokenizer_config.json", texts.tokenizer_config(vocabulary))
    shutil.copyfile(texts.CHAT_TEMPLATE, path / "chat_template.jinja")


def main() -> None:
    """Write a checkpoint from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", type=Path)
    parser.add_argument("checkpoint", type=Path)
    arguments = parser.parse_args()
    write_checkpoint(load_parts(arguments.parts), arguments.checkpoint)


if __name__ == "__main__":
    main()
