"""Tiny Qwen3-Omni checkpoints: ids, tokenizer and template of the release, and Transformers loads them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeThinkerConfig

from tests.support.lora import write_dense
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.model_plugins.qwen3_omni.tiny.qwen3_omni import FILES, MARKER, trained_checkpoint, write_qwen3_omni
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


@pytest.mark.slow
def test_the_released_shape_has_no_weights_not_even_of_an_earlier_checkpoint(tmp_path: Path) -> None:
    write_qwen3_omni(tmp_path, seed=1)
    write_qwen3_omni(tmp_path, released_shape=True)
    assert not (tmp_path / WEIGHTS).exists()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"real_vocab": True, "released_shape": True}, "exclude each other"),
        ({"real_vocab": True, "trained": True}, "exclude each other"),
        ({"seed": 1, "trained": True}, "has no seed"),
    ],
)
def test_options_that_exclude_each_other_are_refused(options: dict, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=reason):
        write_qwen3_omni(tmp_path, **options)


def test_a_thinker_without_experts_has_none_in_transformers(tmp_path: Path) -> None:
    thinker = json.loads((write_dense(tmp_path / "model") / "config.json").read_text())["thinker_config"]
    assert Qwen3OmniMoeThinkerConfig(**thinker).text_config.num_experts == 0


def test_the_trained_checkpoint_is_copied(tmp_path: Path) -> None:
    write_qwen3_omni(tmp_path, seed=1)
    write_qwen3_omni(tmp_path, trained=True)
    names = {file.name for file in trained_checkpoint().iterdir()}
    assert {file.name for file in tmp_path.iterdir()} == names == {*FILES, MARKER}
    assert all((tmp_path / name).read_bytes() == (trained_checkpoint() / name).read_bytes() for name in names)
    assert sum((tmp_path / name).stat().st_size for name in names) < 10 << 20


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


@pytest.mark.parametrize("which", ["small", "released"])
def test_codec_specials_are_the_last_ids_and_the_exported_layer_exists(
    which: str, request: pytest.FixtureRequest
) -> None:
    config = read(request.getfixturevalue(which))
    talker, thinker = config["talker_config"], config["thinker_config"]
    size = talker["text_config"]["vocab_size"]
    specials = [value for name, value in talker.items() if name.startswith("codec_") and name != "codec_head"]
    specials += talker["speaker_id"].values()
    assert size - 1024 == config["code2wav_config"]["codebook_size"]
    assert all(size - 1024 <= id_ < size for id_ in specials)
    assert len(set(specials)) == len(specials) == 9
    deepstack = len(thinker["vision_config"]["deepstack_visual_indexes"])
    assert deepstack < talker["accept_hidden_layer"] < thinker["text_config"]["num_hidden_layers"]


def test_the_released_shape_has_the_released_ids(released: Path) -> None:
    from transformers import Qwen3OmniMoeConfig

    config, defaults = read(released), vars(Qwen3OmniMoeConfig())
    talker = config["talker_config"]
    for name in ("im_start", "im_end", "tts_pad", "tts_bos", "tts_eos", "system", "user", "assistant"):
        assert config[f"{name}_token_id"] == defaults[f"{name}_token_id"], name
    assert {role: config[f"{role}_token_id"] for role in ROLE_IDS} == ROLE_IDS
    assert [talker[f"{name}_token_id"] for name in ("audio", "image", "video")] == [151675, 151655, 151656]
    assert [talker[f"{name}_start_token_id"] for name in ("audio", "vision")] == [151669, 151652]
    assert [talker[f"codec_{name}"] for name in ("pad_id", "bos_id", "eos_token_id")] == [2148, 2149, 2150]
    assert talker["speaker_id"] == {"chelsie": 2301, "ethan": 2302, "aiden": 2303}
    assert not (released / WEIGHTS).exists()
    assert "eos_token_id" not in read(released, "generation_config.json")


@pytest.mark.parametrize("build", [small_vocabulary, real_vocabulary])
def test_ids_are_contiguous_and_unique(build) -> None:
    words = build()
    assert sorted([*words.ids.values(), *words.specials.values()]) == list(range(words.size))
    assert list(words.specials) == list(SPECIAL_TOKENS)


@pytest.mark.parametrize("which", ["small", "released"])
def test_roles_and_special_tokens_are_single_ids_of_the_tokenizer(which: str, request: pytest.FixtureRequest) -> None:
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
