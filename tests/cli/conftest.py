"""A checkpoint directory with a config only: enough for a plan."""

from __future__ import annotations

import copy
import functools
import json
import os
import pickle
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from vllm_omni_ext.cli import model as model_facts
from vllm_omni_ext.model_plugins.qwen3_omni import facts
from vllm_omni_ext.patching import seams

read_config, described = model_facts.get_config, facts.described


@pytest.fixture(scope="session", autouse=True)
def configs_are_read_once() -> Iterator[None]:
    """Each test makes plans of the same checkpoints, and checks the same vLLM. Transformers' configs and tensors, and
    the fingerprints, take longer than all the rest.
    """
    known: dict[str, Any] = {}
    tensors: dict[bytes, Any] = {}

    def read(*args: Any, **kwargs: Any) -> Any:
        asked = repr((args, kwargs))
        if asked not in known:
            known[asked] = read_config(*args, **kwargs)
        return copy.deepcopy(known[asked])

    def describe(*args: Any) -> Any:
        if (asked := pickle.dumps(args)) not in tensors:
            tensors[asked] = described(*args)
        return dict(tensors[asked])

    with (
        mock.patch.object(model_facts, "get_config", read),
        mock.patch.object(facts, "described", describe),
        mock.patch.object(seams, "fingerprint", functools.cache(seams.fingerprint)),
    ):
        yield


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Commands that run in this process may change the environment of later tests."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of a directory whose config.json has small sizes of every stage."""
    text = {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512}
    config = {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "model_type": "qwen3_omni_moe",
        "thinker_config": {"text_config": text},
        "talker_config": {
            "text_config": {**text, "shared_expert_intermediate_size": 32},
            "num_code_groups": 4,
            "spatial_merge_size": 2,
        },
    }
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(path)
