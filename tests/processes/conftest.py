"""Real engines on tiny checkpoints, shared by all tests of a session."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from examples.server import Server
from tests.support.cluster import LENGTH, MODEL
from tests.support.oracle import Golden, Oracle, one_thread
from vllm_omni_ext.model_plugins.bagel.checkpoint import load_bagel
from vllm_omni_ext.model_plugins.bagel.model import Bagel
from vllm_omni_ext.model_plugins.bagel.tiny.bagel import write_bagel
from vllm_omni_ext.model_plugins.qwen3_omni.tiny import config
from vllm_omni_ext.model_plugins.qwen3_omni.tiny.qwen3_omni import write_qwen3_omni

MAX_LEN = 2048
STEP_TOKENS = 128  # prompts longer than this are prefilled in chunks


@pytest.fixture(scope="session", autouse=True)
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder of the tests for files that a user's deployments keep: the secret that their first start makes."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session")
def real_vocab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A tiny checkpoint with the released vocabulary and code books."""
    folder = tmp_path_factory.mktemp("real_vocab")
    yield write_qwen3_omni(folder / "model", seed=0, real_vocab=True)
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def divisible(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint whose heads and experts can be divided by two."""
    small = config.SMALL
    even = replace(
        small,
        audio={**small.audio, "encoder_attention_heads": 2},
        vision={**small.vision, "num_heads": 2},
        thinker={**small.thinker, "moe_intermediate_size": 64},
        talker={**small.talker, "moe_intermediate_size": 64},
    )
    with mock.patch.object(config, "SMALL", even):
        return write_qwen3_omni(tmp_path_factory.mktemp("divisible") / "model", seed=0)


@pytest.fixture(scope="session")
def bagel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint of BAGEL's."""
    return write_bagel(tmp_path_factory.mktemp("bagel") / "model")


@pytest.fixture(scope="session")
def bagel_model(bagel: Path) -> Bagel:
    """The same in this process, to compare with."""
    with one_thread():
        return load_bagel(bagel)


@pytest.fixture(scope="session")
def expected(oracle: Oracle) -> dict[str, Golden]:
    """The answers of Transformers to all cases of the parity tests."""
    from tests.processes.test_parity import CASES, golden

    return {name: golden(oracle, case) for name, case in CASES.items()}


@pytest.fixture(scope="session")
def omni(tiny: Path) -> Iterator[Any]:
    """The tiny checkpoint through `LLM(omni=True)`."""
    from vllm import LLM

    llm = LLM(str(tiny), omni=True, max_model_len=MAX_LEN, max_num_batched_tokens=STEP_TOKENS)
    yield llm
    llm.close()


@pytest.fixture(scope="session")
def plain_server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One replica a stage and one API server, with a tool parser. The last test of `test_http.py` stops it."""
    flags = ["--served-model-name", MODEL, "tts-1", *LENGTH[2:]]
    flags += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    with Server(tiny, tmp_path_factory.mktemp("plain") / "server.log", flags) as server:
        yield server


@pytest.fixture(scope="session")
def twofold(tiny: Path) -> Iterator[Any]:
    """The same with two replicas a stage, each stage with another policy."""
    from vllm import LLM

    policies = {"thinker": "least-queue-length", "talker": "round-robin", "code2wav": "random"}
    two = {stage: {"replicas": 2, "lb_policy": policy} for stage, policy in policies.items()}
    size = {"max_model_len": MAX_LEN, "max_num_batched_tokens": STEP_TOKENS}
    with LLM(str(tiny), omni=True, stage_overrides=two, **size) as omni:
        yield omni
