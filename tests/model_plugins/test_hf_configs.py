"""The configuration overrides of the talker and code2wav stages, alone and through vLLM's own `ModelConfig`."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from transformers import AutoConfig, PretrainedConfig

from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.model_plugins.qwen3_omni import hf_configs
from vllm_omni_ext.model_plugins.qwen3_omni.family import FAMILY
from vllm_omni_ext.model_plugins.qwen3_omni.tiny.qwen3_omni import write_qwen3_omni
from vllm_omni_ext.plugin import register
from vllm_omni_ext.plugins.registry import model_classes


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_omni(tmp_path_factory.mktemp("checkpoint"), seed=0)


@pytest.mark.parametrize("override", [hf_configs.talker, hf_configs.code2wav])
def test_other_configurations_pass_through(override) -> None:
    dummy = PretrainedConfig(architectures=[""], model_type="dummy_qwen3_omni_moe")
    assert override(dummy) is dummy
    assert (dummy.architectures, dummy.model_type) == ([""], "dummy_qwen3_omni_moe")


@pytest.mark.parametrize("override", [hf_configs.talker, hf_configs.code2wav])
def test_can_be_sent_to_other_processes(override) -> None:
    assert pickle.loads(pickle.dumps(override)) is override


@pytest.mark.parametrize("override", [hf_configs.talker, hf_configs.code2wav])
def test_a_checkpoint_without_sound_is_refused(tiny: Path, override) -> None:
    config = AutoConfig.from_pretrained(tiny)
    config.enable_audio_output = False
    with pytest.raises(ConfigError, match="no sound output"):
        override(config)


def test_talker_part(tiny: Path) -> None:
    whole = AutoConfig.from_pretrained(tiny)
    part = hf_configs.talker(whole)
    assert part.architectures == [hf_configs.TALKER_ARCHITECTURE]
    assert part.thinker_vocab_size == whole.thinker_config.text_config.vocab_size
    assert part.tts_pad_token_id == whole.tts_pad_token_id
    assert part.get_text_config() is part.text_config


def test_code2wav_part(tiny: Path) -> None:
    part = hf_configs.code2wav(AutoConfig.from_pretrained(tiny))
    assert part.architectures == [hf_configs.CODE2WAV_ARCHITECTURE]
    assert part.vocab_size == part.codebook_size
    assert pickle.loads(pickle.dumps(part)).architectures == part.architectures


def test_both_architectures_are_registered_once_and_lazily() -> None:
    from vllm.model_executor.models import ModelRegistry

    register()
    register()
    assert set(model_classes(FAMILY)) == {hf_configs.TALKER_ARCHITECTURE, hf_configs.CODE2WAV_ARCHITECTURE}
    assert set(model_classes(FAMILY)) <= set(ModelRegistry.get_supported_archs())


@pytest.mark.engine
def test_vllm_takes_the_sizes_of_the_talker(tiny: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        model=str(tiny),
        hf_overrides=hf_configs.talker,
        skip_tokenizer_init=True,
        enable_prompt_embeds=True,
        dtype="float32",
    )
    model = arguments.create_model_config()
    text = AutoConfig.from_pretrained(tiny).talker_config.text_config
    assert model.architecture == hf_configs.TALKER_ARCHITECTURE
    assert model.runner_type == "generate"
    assert model.uses_mrope
    assert model.is_moe
    assert model.get_vocab_size() == text.vocab_size
    assert model.get_hidden_size() == text.hidden_size
    assert model.hf_text_config.num_hidden_layers == text.num_hidden_layers
    assert model.model_arch_config.total_num_kv_heads == text.num_key_value_heads
    assert model.max_model_len == text.max_position_embeddings


@pytest.mark.engine
def test_vllm_takes_code2wav_for_a_pooling_model_without_attention(tiny: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        model=str(tiny),
        hf_overrides=hf_configs.code2wav,
        runner="pooling",
        skip_tokenizer_init=True,
        max_model_len=4096 * 16,
        dtype="float32",
    )
    model = arguments.create_model_config()
    assert model.architecture == hf_configs.CODE2WAV_ARCHITECTURE
    assert model.runner_type == "pooling"
    assert model.is_attention_free
    assert model.max_model_len == 4096 * 16
    assert not model.is_multimodal_model
