"""The talker's lean layers against vLLM's own, inside a running engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, SamplingParams

from tests.processes.conftest import MAX_LEN, STEP_TOKENS
from tests.support.eager_probe import EXTENSION
from tests.support.media import image, openai_messages
from vllm_omni_ext.ids import ReplicaId

pytestmark = pytest.mark.engine

TALKER = ReplicaId("talker", 0)
CLOSE = 1e-4
SHORT = [{"role": "user", "content": "Tell me about the blue cat"}]
LONG = [{"role": "user", "content": "word " * 300}]
PICTURE = openai_messages(
    [
        {
            "role": "user",
            "content": [{"type": "image", "image": image(96, 64, seed=2)}, {"type": "text", "text": "What?"}],
        }
    ]
)


def rpc(omni: Any, method: str) -> Any:
    return omni._run(omni._omni.orchestrator.replicas[TALKER].client.collective_rpc_async(method))[0]


def test_hidden_states_are_those_of_the_stock_layers(real_vocab: Path) -> None:
    overrides = {"talker": {"engine": {"worker_extension_cls": EXTENSION, "max_num_batched_tokens": STEP_TOKENS}}}
    sampling = {
        "thinker": SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
        "talker": SamplingParams(temperature=0, max_tokens=6, min_tokens=6),
    }
    with LLM(str(real_vocab), omni=True, max_model_len=MAX_LEN, stage_overrides=overrides) as omni:
        omni.chat(SHORT, sampling, use_tqdm=False)
        rpc(omni, "compare_layers")
        outputs = omni.chat([SHORT, LONG, PICTURE], sampling, use_tqdm=False)
        seen = rpc(omni, "layer_differences")
    assert [output.error for output in outputs] == [None] * 3
    sizes = [tokens for tokens, _ in seen["steps"]]
    assert min(sizes) <= 3 < STEP_TOKENS <= max(sizes)  # steps of single tokens, and a prefill in pieces
    assert seen["three_axes"]
    assert max(difference for _, difference in seen["steps"]) < CLOSE
