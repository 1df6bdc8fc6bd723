"""Tiny checkpoints: all files, the same bytes for the same seed, and no other directory is overwritten."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from vllm_omni_ext.cli.tiny import main
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.model_plugins.bagel.tiny import bagel
from vllm_omni_ext.model_plugins.qwen3_omni.tiny import qwen3_omni
from vllm_omni_ext.tiny.directory import MARKER

MODELS = {
    "qwen3-omni": (qwen3_omni.write_qwen3_omni, qwen3_omni.FILES, ["model.safetensors"]),
    "bagel": (bagel.write_bagel, bagel.FILES, ["ema.safetensors", "ae.safetensors"]),
}
"""Of each model the function that writes it, its files, and those with weights."""

MANIFEST = Path(__file__).parents[1] / "data" / "bagel" / "manifest.json"


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    return MODELS[request.param]


@pytest.mark.slow
def test_a_seed_gives_the_same_bytes_and_another_one_other_weights(model: Any, tmp_path: Path) -> None:
    write, files, weights = model
    before = torch.get_rng_state()
    first = write(tmp_path / "first")
    assert torch.equal(torch.get_rng_state(), before), "the random state of the caller does not change"
    assert {path.name for path in first.iterdir()} == {*files, MARKER}
    for seed, expected in ((0, []), (1, weights)):
        other = write(tmp_path / str(seed), seed=seed)
        assert [name for name in files if (other / name).read_bytes() != (first / name).read_bytes()] == expected


def test_an_earlier_checkpoint_is_replaced_and_other_files_stay(model: Any, tmp_path: Path) -> None:
    write, _, weights = model
    write(tmp_path / "a", seed=1)
    (tmp_path / "a" / "notes.txt").write_text("mine")
    old = (tmp_path / "a" / weights[0]).read_bytes()
    write(tmp_path / "a")
    assert json.loads((tmp_path / "a" / MARKER).read_text())["seed"] == 0
    assert (tmp_path / "a" / weights[0]).read_bytes() != old
    assert (tmp_path / "a" / "notes.txt").read_text() == "mine"


def test_a_file_and_a_directory_of_other_files_are_refused(model: Any, tmp_path: Path) -> None:
    write, *_ = model
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not empty and was not written by this command"):
        write(tmp_path)
    with pytest.raises(ConfigError, match="is a file"):
        write(tmp_path / "config.json")
    assert (tmp_path / "config.json").read_text() == "{}"


def test_a_directory_that_cannot_be_written_is_named() -> None:
    with pytest.raises(ConfigError, match="DIR /proc/nope/x: cannot be written: No such file or directory"):
        main(["bagel", "/proc/nope/x"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "flags", "sizes"),
    [
        ("bagel", (), "small"),
        ("qwen3-omni", ("--released",), "released-shape"),
        ("qwen3-omni", ("--released-shape",), "released-shape"),
    ],
)
def test_the_command_prints_the_directory(
    name: str, flags: tuple[str, ...], sizes: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, str(tmp_path / "m"), "--seed", "3", *flags]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "m")
    assert json.loads((tmp_path / "m" / MARKER).read_text()) == {"model": name, "sizes": sizes, "seed": 3}


# -- BAGEL ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_bagel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bagel.write_bagel(tmp_path_factory.mktemp("bagel") / "model")


def digest(directory: Path) -> str:
    found = hashlib.sha256()
    for file in ("ema.safetensors", "ae.safetensors"):
        for name, tensor in sorted(load_file(directory / file).items()):
            found.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def test_tensors_are_those_of_the_golden_data(tiny_bagel: Path) -> None:
    assert digest(tiny_bagel) == json.loads(MANIFEST.read_text())["checkpoint_sha256"]


def test_the_index_names_the_file_of_each_tensor(tiny_bagel: Path) -> None:
    index = json.loads((tiny_bagel / "model.safetensors.index.json").read_text())
    for file in ("ema.safetensors", "ae.safetensors"):
        assert {name for name, where in index["weight_map"].items() if where == file} == set(
            load_file(tiny_bagel / file)
        )


def test_transformers_reads_the_tokenizer(tiny_bagel: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_bagel)
    names = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"]
    assert tokenizer.convert_tokens_to_ids(names) == [294, 295, 302, 303]
    assert [tokenizer.encode(token) for token in bagel.SPECIAL_TOKENS] == [
        [293 + at] for at in range(len(bagel.SPECIAL_TOKENS))
    ]
    text = "Make the fox blue, naïve: 月!\n 12"
    assert tokenizer.decode(tokenizer.encode(text)) == text
