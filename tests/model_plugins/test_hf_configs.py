"""The configuration overrides of the talker and code2wav stages."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from transformers import AutoConfig, PretrainedConfig

from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.model_plugins.qwen3_omni import hf_configs
from vllm_omni_ext.model_plugins.qwen3_omni.family import FAMILY
from vllm_omni_ext.plugin import register
from vllm_omni_ext.plugins.registry import model_classes

OVERRIDES = pytest.mark.parametrize("override", [hf_configs.talker, hf_configs.code2wav])


@OVERRIDES
def test_vllms_dummy_configuration_passes_through_in_other_processes_too(override) -> None:
    dummy = PretrainedConfig(architectures=[""], model_type="dummy_qwen3_omni_moe")
    assert pickle.loads(pickle.dumps(override))(dummy) is dummy
    assert (dummy.architectures, dummy.model_type) == ([""], "dummy_qwen3_omni_moe")


@OVERRIDES
def test_a_checkpoint_without_sound_is_refused(tiny: Path, override) -> None:
    config = AutoConfig.from_pretrained(tiny)
    config.enable_audio_output = False
    with pytest.raises(ConfigError, match="no sound output"):
        override(config)


def test_each_stage_gets_its_part_of_the_config(tiny: Path) -> None:
    whole = AutoConfig.from_pretrained(tiny)
    part = hf_configs.talker(whole)
    assert part.architectures == ["Qwen3OmniTalker"]
    assert part.thinker_vocab_size == whole.thinker_config.text_config.vocab_size
    assert part.tts_pad_token_id == whole.tts_pad_token_id
    assert part.get_text_config() is part.text_config
    part = hf_configs.code2wav(whole)
    assert pickle.loads(pickle.dumps(part)).architectures == part.architectures == ["Qwen3OmniCode2Wav"]
    assert part.vocab_size == part.codebook_size


def test_both_architectures_are_registered_once_and_lazily() -> None:
    from vllm.model_executor.models import ModelRegistry

    register()
    register()
    assert set(model_classes(FAMILY)) == {"Qwen3OmniTalker", "Qwen3OmniCode2Wav"}
    assert set(model_classes(FAMILY)) <= set(ModelRegistry.get_supported_archs())
