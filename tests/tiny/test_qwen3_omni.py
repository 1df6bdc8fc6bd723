"""Tiny Qwen3-Omni checkpoints: complete, deterministic, and the same model in Transformers and vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_omni_ext.cli.tiny import main
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.model_plugins.qwen3_omni.tiny.qwen3_omni import FILES, MARKER, write_qwen3_omni
from vllm_omni_ext.model_plugins.qwen3_omni.tiny.trained import trained_checkpoint
from vllm_omni_ext.model_plugins.qwen3_omni.tiny.vocabulary import (
    ROLE_IDS,
    SPECIAL_TOKENS,
    real_vocabulary,
    small_vocabulary,
)

WEIGHTS = "model.safetensors"


def read(directory: Path, name: str = "config.json") -> dict:
    return json.loads((directory / name).read_text())


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_omni(tmp_path_factory.mktemp("small") / "model", seed=0)


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_omni(tmp_path_factory.mktemp("released"), released_shape=True)


def test_it_writes_these_files(small: Path) -> None:
    assert {path.name for path in small.iterdir()} == {*FILES, MARKER}


def test_the_same_seed_gives_the_same_bytes(small: Path, tmp_path: Path) -> None:
    again = write_qwen3_omni(tmp_path / "again", seed=0)
    for name in FILES:
        assert (again / name).read_bytes() == (small / name).read_bytes(), name


def test_another_seed_gives_other_weights_only(small: Path, tmp_path: Path) -> None:
    other = write_qwen3_omni(tmp_path / "other", seed=1)
    assert [name for name in FILES if (other / name).read_bytes() != (small / name).read_bytes()] == [WEIGHTS]


def test_random_state_of_the_caller_is_left_alone(tmp_path: Path) -> None:
    import torch

    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    write_qwen3_omni(tmp_path)
    assert torch.equal(torch.rand(3), expected)


def test_an_earlier_checkpoint_is_replaced_and_other_files_in_it_stay(tmp_path: Path) -> None:
    write_qwen3_omni(tmp_path, seed=1)
    (tmp_path / "notes.txt").write_text("mine")
    write_qwen3_omni(tmp_path, released_shape=True)
    assert not (tmp_path / WEIGHTS).exists()
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_it_refuses_a_directory_that_is_not_its_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not empty and was not written by this command"):
        write_qwen3_omni(tmp_path)
    assert (tmp_path / "config.json").read_text() == "{}"


def test_it_refuses_a_file(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        write_qwen3_omni(tmp_path / "model")


def test_sizes_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        write_qwen3_omni(tmp_path, real_vocab=True, released_shape=True)
    with pytest.raises(ConfigError, match="exclude each other"):
        write_qwen3_omni(tmp_path, real_vocab=True, trained=True)


def test_the_trained_checkpoint_is_copied(tmp_path: Path) -> None:
    write_qwen3_omni(tmp_path, seed=1)
    write_qwen3_omni(tmp_path, trained=True)
    names = {file.name for file in trained_checkpoint().iterdir()}
    assert {file.name for file in tmp_path.iterdir()} == names == {*FILES, MARKER}
    assert all((tmp_path / name).read_bytes() == (trained_checkpoint() / name).read_bytes() for name in names)
    assert sum((tmp_path / name).stat().st_size for name in names) < 10 << 20


def test_the_trained_checkpoint_has_no_seed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no seed"):
        write_qwen3_omni(tmp_path, seed=1, trained=True)


def test_without_the_package_of_the_trained_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm_omni_ext_tiny", None)
    with pytest.raises(ConfigError, match="pip install vllm-omni-ext-tiny"):
        write_qwen3_omni(tmp_path / "model", trained=True)
    assert not (tmp_path / "model").exists()


@pytest.mark.engine
def test_importing_it_is_cheap() -> None:
    code = (
        "import sys, vllm_omni_ext.cli.tiny, vllm_omni_ext.model_plugins.qwen3_omni.tiny.qwen3_omni\n"
        "import vllm_omni_ext.model_plugins.qwen3_omni.tiny.weights\n"
        "print([name for name in ('torch', 'transformers', 'vllm', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("flag", ["--released", "--released-shape"])
def test_command_line(flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["qwen3-omni", str(tmp_path / "m"), "--seed", "3", flag]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "m")
    assert read(tmp_path / "m", MARKER) == {"model": "qwen3-omni", "sizes": "released-shape", "seed": 3}


@pytest.mark.parametrize("which", ["small", "released"])
def test_codec_specials_are_in_the_last_1024_ids(which: str, request: pytest.FixtureRequest) -> None:
    config = read(request.getfixturevalue(which))
    talker = config["talker_config"]
    size = talker["text_config"]["vocab_size"]
    specials = [value for name, value in talker.items() if name.startswith("codec_") and name != "codec_head"]
    specials += talker["speaker_id"].values()
    assert size - 1024 == config["code2wav_config"]["codebook_size"]
    assert all(size - 1024 <= id_ < size for id_ in specials)
    assert len(set(specials)) == len(specials) == 9


@pytest.mark.parametrize("which", ["small", "released"])
def test_accept_layer_comes_after_the_deepstack_layers(which: str, request: pytest.FixtureRequest) -> None:
    config = read(request.getfixturevalue(which))
    thinker = config["thinker_config"]
    deepstack = len(thinker["vision_config"]["deepstack_visual_indexes"])
    layers = thinker["text_config"]["num_hidden_layers"]
    assert deepstack < config["talker_config"]["accept_hidden_layer"] < layers


def test_released_ids(released: Path) -> None:
    config = read(released)
    talker = config["talker_config"]
    assert config["im_start_token_id"] == 151644
    assert config["im_end_token_id"] == 151645
    assert [config[f"tts_{name}_token_id"] for name in ("pad", "bos", "eos")] == [151671, 151672, 151673]
    assert {role: config[f"{role}_token_id"] for role in ROLE_IDS} == ROLE_IDS
    assert [talker[f"{name}_token_id"] for name in ("audio", "image", "video")] == [151675, 151655, 151656]
    assert [talker[f"{name}_start_token_id"] for name in ("audio", "vision")] == [151669, 151652]
    assert [talker[f"codec_{name}"] for name in ("pad_id", "bos_id", "eos_token_id")] == [2148, 2149, 2150]
    assert talker["speaker_id"] == {"chelsie": 2301, "ethan": 2302, "aiden": 2303}
    assert not (released / WEIGHTS).exists()
    assert "eos_token_id" not in read(released, "generation_config.json")


def test_released_ids_equal_the_defaults_of_transformers(released: Path) -> None:
    from transformers import Qwen3OmniMoeConfig

    config, defaults = read(released), Qwen3OmniMoeConfig()
    for name in ("im_start", "im_end", "tts_pad", "tts_bos", "tts_eos", "system", "user", "assistant"):
        assert config[f"{name}_token_id"] == vars(defaults)[f"{name}_token_id"], name


@pytest.mark.parametrize("build", [small_vocabulary, real_vocabulary])
def test_ids_are_contiguous_and_unique(build) -> None:
    words = build()
    assert sorted([*words.ids.values(), *words.specials.values()]) == list(range(words.size))
    assert list(words.specials) == list(SPECIAL_TOKENS)


@pytest.mark.parametrize("which", ["small", "released"])
def test_tokenizer_knows_roles_and_specials_as_single_tokens(which: str, request: pytest.FixtureRequest) -> None:
    from transformers import AutoTokenizer

    directory = request.getfixturevalue(which)
    tokenizer, config = AutoTokenizer.from_pretrained(directory), read(directory)
    assert type(tokenizer).__name__.startswith("Qwen2Tokenizer")
    for role in ROLE_IDS:
        assert tokenizer.encode(role) == [config[f"{role}_token_id"]]
    assert tokenizer.encode("<|im_start|>assistant\n") == [
        config["im_start_token_id"],
        config["assistant_token_id"],
        *tokenizer.encode("\n"),
    ]
    assert tokenizer.encode("<|audio_pad|>") == [config["thinker_config"]["audio_token_id"]]
    assert tokenizer.eos_token_id == config["im_end_token_id"]
    assert (tokenizer.image_token, tokenizer.audio_bos_token) == ("<|image_pad|>", "<|audio_start|>")
    text = "A red cat, naïve: 月!\n 12"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_processor_and_tokenizer_share_the_chat_template(small: Path) -> None:
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(small)
    parts = [{"type": kind} for kind in ("audio", "image", "video")] + [{"type": "text", "text": "hi"}]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": parts}]
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\n<|audio_start|><|audio_pad|><|audio_end|>"
        "<|vision_start|><|image_pad|><|vision_end|><|vision_start|><|video_pad|><|vision_end|>hi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert processor.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == text


@pytest.mark.engine
@pytest.mark.parametrize("real_vocab", [False, True])
def test_transformers_loads_every_weight(tmp_path: Path, real_vocab: bool) -> None:
    from transformers import Qwen3OmniMoeForConditionalGeneration

    directory = write_qwen3_omni(tmp_path, real_vocab=real_vocab)
    model, info = Qwen3OmniMoeForConditionalGeneration.from_pretrained(directory, output_loading_info=True)
    assert not any(info.values()), info
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert parameters < (27e6 if real_vocab else 1e6)
    if real_vocab:
        assert model.code2wav.total_upsample == 1920
        assert model.config.thinker_config.text_config.vocab_size == 152064
