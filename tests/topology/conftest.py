"""A pipeline of three stages and two machines."""

from __future__ import annotations

import pytest

from vllm_omni_ext.plugins.spec import EdgeSpec, PipelineSpec, StageSpec
from vllm_omni_ext.topology.machine import Machine

GIB = 1 << 30


@pytest.fixture
def pipeline() -> PipelineSpec:
    return PipelineSpec(
        name="speech",
        stages=(
            StageSpec(
                name="thinker", splittable=True, engine={"worker_cls": "pkg.W"}, cpu_kv_bytes=256 << 20, gpu_share=0.6
            ),
            StageSpec(
                name="talker",
                accepts="chunks",
                engine={"enable_prefix_caching": False},
                engine_defaults={"max_num_seqs": 7},
                cpu_kv_bytes=128 << 20,
                defaults={"temperature": 0.9, "max_tokens": 4096},
                gpu_share=0.2,
            ),
            StageSpec(name="code2wav", accepts="parts", engine={"runner": "pooling"}, gpu_share=0.1),
        ),
        edges=(
            EdgeSpec("thinker", "talker", "tokens", name="words", chunks=(1, 5)),
            EdgeSpec("thinker", "talker", "tensors"),
            EdgeSpec("talker", "code2wav", "tokens"),
        ),
        frontend="thinker",
        modalities=("text", "audio"),
    )


@pytest.fixture
def cpu() -> Machine:
    return Machine(platform="cpu", device_count=0, cpu_count=8, memory_bytes=24 * GIB)


@pytest.fixture
def four_gpus() -> Machine:
    return Machine(platform="cuda", device_count=4, cpu_count=64, memory_bytes=512 * GIB)
