"""Tiny BAGEL checkpoints: the tensors that the golden data were made with, in the files of the release."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vllm_omni_ext.cli.tiny import main
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.model_plugins.bagel.tiny.bagel import FILES, SPECIAL_TOKENS, write_bagel
from vllm_omni_ext.tiny.directory import MARKER

MANIFEST = Path(__file__).parents[1] / "data" / "bagel" / "manifest.json"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bagel(tmp_path_factory.mktemp("bagel") / "model")


def digest(directory: Path) -> str:
    found = hashlib.sha256()
    for file in ("ema.safetensors", "ae.safetensors"):
        for name, tensor in sorted(load_file(directory / file).items()):
            found.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def test_tensors_are_those_of_the_golden_data(small: Path) -> None:
    assert digest(small) == json.loads(MANIFEST.read_text())["checkpoint_sha256"]


def test_it_writes_these_files(small: Path) -> None:
    assert {path.name for path in small.iterdir()} == {*FILES, MARKER}
    index = json.loads((small / "model.safetensors.index.json").read_text())
    for file in ("ema.safetensors", "ae.safetensors"):
        assert {name for name, where in index["weight_map"].items() if where == file} == set(load_file(small / file))


def test_the_same_seed_gives_the_same_bytes_and_another_one_other_weights(small: Path, tmp_path: Path) -> None:
    for seed, expected in ((0, []), (1, ["ema.safetensors", "ae.safetensors"])):
        other = write_bagel(tmp_path / str(seed), seed=seed)
        assert [name for name in FILES if (other / name).read_bytes() != (small / name).read_bytes()] == expected


def test_random_states_of_the_caller_are_left_alone(tmp_path: Path) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    write_bagel(tmp_path)
    assert torch.equal(torch.rand(3), expected)


def test_an_earlier_checkpoint_is_replaced_and_a_foreign_directory_is_not(tmp_path: Path) -> None:
    write_bagel(tmp_path / "a", seed=1)
    write_bagel(tmp_path / "a")
    assert json.loads((tmp_path / "a" / MARKER).read_text())["seed"] == 0
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not empty and was not written by this command"):
        write_bagel(tmp_path / "b")


def test_transformers_reads_the_tokenizer(small: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(small)
    assert tokenizer.convert_ids_to_tokens([294, 295, 302, 303]) == [
        "<|im_start|>",
        "<|im_end|>",
        "<|vision_start|>",
        "<|vision_end|>",
    ]
    assert [tokenizer.encode(token) for token in SPECIAL_TOKENS] == [[293 + at] for at in range(len(SPECIAL_TOKENS))]
    text = "Make the fox blue, naïve: 月!\n 12"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bagel", str(tmp_path / "m"), "--seed", "3"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "m")
    assert json.loads((tmp_path / "m" / MARKER).read_text()) == {"model": "bagel", "sizes": "small", "seed": 3}
