"""Defaults of a replica on a CPU machine, where several engines share the memory and a few cores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_omni_ext.config.disaggregation import stage_path
from vllm_omni_ext.config.schema import ReplicasConfig
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.plugins.memory import ModelFacts
from vllm_omni_ext.plugins.spec import StageSpec
from vllm_omni_ext.topology.budget import gib
from vllm_omni_ext.topology.shape import Machine

MAX_NUM_SEQS = 16
"""Sequences a replica runs at once."""

SMALL_CACHE_BYTES = 32 << 20
"""Minimum KV cache when the size is computed: enough for many short sequences instead of a long one."""

SPARE_TOKENS = 512
"""Room in addition to one sequence of full length: vLLM keeps a block for itself and rounds up to whole blocks."""

SMALLEST_CACHE_BYTES = 16 << 20
"""For a stage without a KV cache: an explicit size keeps the engine from claiming most of the memory at start."""

THREADS = "OMP_NUM_THREADS"
"""Environment variable with the compute threads of a replica."""

CACHE_PART_OF_MEMORY = 0.5
"""Part of the memory that all KV caches together may take by default."""


def engine_defaults(spec: StageSpec, facts: ModelFacts, machine: Machine, replicas: int) -> dict[str, Any]:
    """`EngineArgs` of a replica that the user did not set.

    Args:
        replicas: number of replicas of all stages.

    The cache holds one sequence of full length if the facts are known and half of the memory, divided by all replicas,
    suffices; otherwise `max_model_len` is lowered to the length that fits.
    """
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_num_seqs": MAX_NUM_SEQS,
        "kv_cache_memory_bytes": max(spec.cpu_kv_bytes, SMALLEST_CACHE_BYTES),
    }
    length = facts.max_model_len.get(spec.model_stage)
    token_bytes = facts.kv_bytes_per_token.get(spec.model_stage)
    if spec.cpu_kv_bytes and length and token_bytes:
        limit = max(spec.cpu_kv_bytes, int(machine.memory_bytes * CACHE_PART_OF_MEMORY) // replicas)
        needed = (length + SPARE_TOKENS) * token_bytes
        defaults["kv_cache_memory_bytes"] = min(max(SMALL_CACHE_BYTES, needed), limit)
        if needed > limit:
            defaults["max_model_len"] = limit // token_bytes - SPARE_TOKENS
    return defaults


def environment(stage: ReplicasConfig, machine: Machine, replicas: int) -> dict[str, str]:
    """Environment of a replica: a single process without worker processes, no pinning, its part of the cores."""
    threads = stage.cpu_threads or max(1, machine.cpu_count // replicas)
    return {
        THREADS: str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }


def check_devices(name: str, stage: ReplicasConfig) -> None:
    """Refuse devices on a machine without any."""
    if stage.devices is not None:
        raise ConfigError(f"{stage_path(name)}.devices: this machine has no CUDA device; remove it")


def check_engines(stages: Mapping[str, Mapping[str, Any]], replicas: Mapping[str, int], machine: Machine) -> None:
    """Refuse settings that no CPU machine, or not this one, supports.

    Args:
        stages: the engine arguments that the user gave, by stage.
        replicas: number of replicas of each stage on this host.

    Raises:
        ConfigError: sleep mode, or KV caches that are larger than the memory.
    """
    for name, args in stages.items():
        if args.get("enable_sleep_mode"):
            raise ConfigError(
                f"enable_sleep_mode: stage '{name}' is on a CPU, where vLLM has no sleep mode; leave it out"
            )
    sizes = {name: args.get("kv_cache_memory_bytes") for name, args in stages.items()}
    asked = sum(size * replicas[name] for name, size in sizes.items() if isinstance(size, int))
    if asked > machine.memory_bytes:
        named = ", ".join(name for name, size in sizes.items() if size is not None and replicas[name])
        raise ConfigError(
            f"kv_cache_memory_bytes: {gib(asked)} GiB of KV cache for {named}, and this machine has "
            f"{gib(machine.memory_bytes)} GiB of memory; give less, or leave it out"
        )
