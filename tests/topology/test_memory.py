"""The memory that a replica takes of a device, by its engine arguments."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_omni_ext.plugins.memory import LIBRARY_BYTES, EncoderMemory, StageFacts, WeightPart
from vllm_omni_ext.topology.memory import (
    COMMUNICATION_BYTES,
    CONTEXT_BYTES,
    GIB,
    GRAPH_LAYER_BYTES,
    Need,
    need,
)

MEMORY = StageFacts(
    max_model_len=1000,
    weights=(
        WeightPart(elements=1000, quantizable=True),
        WeightPart(elements=100, split=False),
        WeightPart(elements=0, stored_bytes=40),
    ),
    kv_layers=4,
    kv_heads=2,
    kv_head_dim=8,
    step_elements=10,
    split_step_elements=6,
    vocabulary=80,
    sequence_elements=3,
    graph_layers=4,
    recorded_bytes=5,
)


def of(facts: StageFacts = MEMORY, **args: Any) -> Need:
    return need(facts, args)


@pytest.mark.parametrize(
    ("args", "weights"),
    [
        ({}, 2000 + 200 + 40),
        ({"dtype": "float32"}, 4000 + 400 + 40),
        ({"quantization": "fp8"}, 1000 + 200 + 40),
        ({"quantization": "awq"}, 2000 + 200 + 40),  # the format of the files, not that in vLLM
        ({"tensor_parallel_size": 2}, 1000 + 200 + 20),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 500 + 200 + 10),
        ({"cpu_offload_gb": 1}, 0),
        ({"cpu_offload_gb": 1e300}, 0),
    ],
)
def test_weights(args: dict[str, Any], weights: int) -> None:
    assert of(**args).weights == weights


@pytest.mark.parametrize(
    ("args", "token"),
    [
        ({}, 4 * 2 * 8 * 2 * 2),
        ({"dtype": "float32"}, 4 * 2 * 8 * 2 * 4),
        ({"kv_cache_dtype": "fp8"}, 4 * 2 * 8 * 2),
        ({"kv_cache_dtype": "int8_per_token_head"}, 4 * 2 * (8 + 4) * 2),
        ({"kv_cache_dtype": "int4_per_token_head"}, 4 * 2 * (4 + 4) * 2),
        ({"kv_cache_dtype": "turboquant_4bit_nc"}, 4 * 2 * 8 * 2 * 2),
        ({"tensor_parallel_size": 2}, 4 * 1 * 8 * 2 * 2),
        ({"tensor_parallel_size": 4}, 4 * 1 * 8 * 2 * 2),  # every device has a head of its own at least
        ({"pipeline_parallel_size": 2}, 2 * 2 * 8 * 2 * 2),
    ],
)
def test_kv_cache_of_a_token(args: dict[str, Any], token: int) -> None:
    assert of(**args).kv_token == token


def test_a_kv_cache_in_nvfp4_has_a_scale_for_16_numbers() -> None:
    facts = StageFacts(kv_layers=1, kv_heads=1, kv_head_dim=64)
    assert of(facts, kv_cache_dtype="nvfp4").kv_token == 2 * (32 + 4)


@pytest.mark.parametrize(
    ("args", "tokens"),
    [({}, 1008 + 16), ({"max_model_len": 16}, 32), ({"max_model_len": -1}, 32), ({"block_size": 64}, 1088)],
)
def test_least_kv_cache_is_a_sequence_in_whole_blocks_and_one_block_for_vllm(args: dict[str, Any], tokens: int) -> None:
    assert of(**args).least_kv == tokens * of(**args).kv_token


def test_activations_and_buffers_follow_steps_and_sequences() -> None:
    found = of(max_num_batched_tokens=100, max_num_seqs=7)
    assert found.activations - LIBRARY_BYTES == 100 * 16 * 2 + 7 * 80 * 18
    assert found.buffers == 7 * (3 * 2 + 80 * 33 // 8)
    assert of(max_num_batched_tokens=100, tensor_parallel_size=2).activations - LIBRARY_BYTES == 100 * 13 * 2


ENCODER = EncoderMemory(image_tokens=100, most_images=7, token_bytes=50, split_token_bytes=20, output_elements=3)
WITH_ENCODER = StageFacts(encoder=ENCODER, max_model_len=350)


@pytest.mark.parametrize(
    ("args", "tokens"),
    [
        ({"max_model_len": 50}, 100),
        ({"max_model_len": 250}, 200),
        ({"max_model_len": 5000}, 700),
        ({"max_model_len": 5000, "limit_mm_per_prompt": {"video": 0}}, 100),
        ({"max_model_len": 5000, "limit_mm_per_prompt": {"video": {"count": 0}, "image": 3}}, 100),
        ({"max_model_len": 5000, "limit_mm_per_prompt": {"video": 0, "image": 0}}, 0),
        ({"max_model_len": 5000, "skip_mm_profiling": True}, 700),
        ({"max_model_len": 5000, "language_model_only": True}, 0),
        ({"max_model_len": -1}, 300),  # vLLM may choose the full length
    ],
)
def test_room_for_the_largest_video(args: dict[str, Any], tokens: int) -> None:
    assert of(WITH_ENCODER, **args).activations - LIBRARY_BYTES == tokens * (50 + 20 + 3 * 2)


@pytest.mark.parametrize(
    ("args", "sizes"),
    [
        ({"max_num_seqs": 1}, 2),  # 1, 2
        ({"max_num_seqs": 64}, 3 + 16),  # 1, 2, 4, 8, 16, ... 128
        ({"max_num_seqs": 256}, 51),
        ({"max_num_seqs": 1024}, 51),
        ({"max_num_seqs": 64, "enforce_eager": True}, 0),
    ],
)
def test_graphs_follow_the_captured_sizes(args: dict[str, Any], sizes: int) -> None:
    assert of(**args).graphs == 4 * sizes * GRAPH_LAYER_BYTES + 5


def test_context() -> None:
    assert of().context == CONTEXT_BYTES
    assert of(tensor_parallel_size=2).context == CONTEXT_BYTES + COMMUNICATION_BYTES
    assert CONTEXT_BYTES < GIB
