"""The hardware on which replicas run, and the defaults of a replica on a CPU machine. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from vllm_omni_ext.config.disaggregation import stage_path
from vllm_omni_ext.config.schema import OmniConfig, ReplicasConfig
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.plugins.memory import StageFacts
from vllm_omni_ext.plugins.spec import StageSpec
from vllm_omni_ext.topology.memory import GIB, gib, need

_WORDS = re.compile(r"cuda:(\d{1,9}(?:\.\d+)?)(GiB|MiB)(?:x(\d{1,4}))?")
_UNITS = {"GiB": 1 << 30, "MiB": 1 << 20}

MAX_NUM_SEQS = 16
"""Default of `max_num_seqs` on a CPU machine."""

SMALL_CACHE_BYTES = 32 << 20
"""Smallest KV cache in bytes that `cpu_defaults` computes from the model's sizes: enough for many short sequences."""

SPARE_TOKENS = 512
"""Tokens of a KV cache in addition to one sequence of full length: vLLM keeps a block for itself and rounds up."""

SMALLEST_CACHE_BYTES = 16 << 20
"""Smallest default of `kv_cache_memory_bytes`, also for a stage without a KV cache. Without that argument, the engine
would claim most of the memory when it starts."""

THREADS = "OMP_NUM_THREADS"
"""Environment variable with the number of OpenMP threads of a replica."""

CACHE_SPACE = "VLLM_CPU_KVCACHE_SPACE"
"""Environment variable that replaces vLLM's `kv_cache_memory_bytes` on a CPU machine, in GiB."""

VARIABLES = (THREADS, CACHE_SPACE)

CACHE_PART_OF_MEMORY = 0.5
"""Fraction of the host's memory that all KV caches together may take by default."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The hardware of a host that runs replicas.

    Attributes:
        device_count: number of CUDA devices.
        cpu_count: number of cores that this process may use.
        memory_bytes: memory of the host, not of its devices.
        device_bytes: memory of each CUDA device as NVML reports it; empty if not known.
        variables: environment variables of this process in `VARIABLES`, without empty ones; replicas inherit them.
    """

    platform: Literal["cpu", "cuda"]
    device_count: int
    cpu_count: int
    memory_bytes: int
    device_bytes: tuple[int, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict, hash=False)


def parse_machine(text: str, here: Machine) -> Machine:
    """Return the machine that the value of `--machine` describes.

    Args:
        text: `cuda:SIZExCOUNT` with the size of each device as `nvidia-smi` shows it, in GiB or MiB, and the number of
            devices (1 if left out); or `cpu`.
        here: this machine; the result has its cores and host memory.

    Raises:
        ConfigError: the text has neither form.
    """
    if text == "cpu":
        return replace(here, platform="cpu", device_count=0, device_bytes=())
    found = _WORDS.fullmatch(text)
    if found is None or not (count := int(found[3] or 1)) or not float(found[1]):
        raise ConfigError(f"--machine {text}: write cuda:SIZExCOUNT, e.g. cuda:80GiBx2 or cuda:81559MiB, or cpu")
    size = int(float(found[1]) * _UNITS[found[2]])
    return replace(here, platform="cuda", device_count=count, device_bytes=(size,) * count)


def cpu_defaults(
    spec: StageSpec, facts: StageFacts, machine: Machine, processes: int, parallel: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the default `EngineArgs` fields of a replica on a CPU machine.

    If the model's sizes are known, the KV cache has room for one sequence of full length, but at most the process's
    share of half of the memory. If that is too little, `max_model_len` is lowered to the length that fits.

    Args:
        facts: sizes of the stage in the checkpoint.
        processes: number of processes that compute on this machine: one for each rank of each replica of all stages.
        parallel: the fields `tensor_parallel_size` and `pipeline_parallel_size` of the stage, if set.
    """
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_num_seqs": MAX_NUM_SEQS,
        "kv_cache_memory_bytes": max(spec.cpu_kv_bytes, SMALLEST_CACHE_BYTES),
    }
    token_bytes = need(facts, {**parallel, "dtype": defaults["dtype"]}).kv_token
    if spec.cpu_kv_bytes and facts.max_model_len and token_bytes:
        limit = max(spec.cpu_kv_bytes, int(machine.memory_bytes * CACHE_PART_OF_MEMORY) // processes)
        needed = (facts.max_model_len + SPARE_TOKENS) * token_bytes
        defaults["kv_cache_memory_bytes"] = min(max(SMALL_CACHE_BYTES, needed), limit)
        if needed > limit:
            defaults["max_model_len"] = limit // token_bytes - SPARE_TOKENS
    return defaults


def cpu_environment(path: str, stage: ReplicasConfig, machine: Machine, processes: int) -> dict[str, str]:
    """Return environment variables of a replica on a CPU machine, with those that the user has set for the stage.

    They make vLLM run the worker in the engine's process, with threads for the process's share of the cores, which are
    not pinned to cores.

    Args:
        path: path of the stage in the configuration.
        processes: see `cpu_defaults`.

    Raises:
        ConfigError: the user has set a `THREADS` without a number.
    """
    threads = stage.cpu_threads or machine.variables.get(THREADS) or max(1, machine.cpu_count // processes)
    env = {THREADS: str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    env |= stage.env
    if not number_of_threads(env):
        where = f"{path}.env." if THREADS in stage.env else ""
        raise ConfigError(f"{where}{THREADS}: must be an integer >= 1, got {env[THREADS]!r}")
    return env


def number_of_threads(env: Mapping[str, str]) -> int:
    """Return the number of threads in environment variables; 1 without `THREADS`, 0 if its value is no number.

    The value may be a list of numbers for nested levels of parallelism. The first one counts.
    """
    first = env.get(THREADS, "1").partition(",")[0].strip()
    return int(first) if re.fullmatch(r"[0-9]{1,6}", first) else 0


def chosen_environment(stage: ReplicasConfig) -> dict[str, str]:
    """Return environment variables that keys of a stage set, also if the environment has other values."""
    return {} if stage.cpu_threads is None else {THREADS: str(stage.cpu_threads)}


def _check_variables(path: str, stage: ReplicasConfig, user: Mapping[str, Any], inherited: Mapping[str, str]) -> None:
    """Refuse environment variables of a stage's replicas that replace a key of the stage on a CPU machine.

    Args:
        path: path of the stage in the configuration.
        user: the engine arguments that the user has set.
        inherited: `Machine.variables`. `THREADS` is not refused there: the key overrides it.

    Raises:
        ConfigError: a variable and a key are set; the error names both.
    """
    if stage.cpu_threads is not None and THREADS in stage.env:
        raise ConfigError(f"{path}.env.{THREADS}: {path}.cpu_threads says the same; keep one of the two")
    for where, variables in (("", inherited), (f"{path}.env.", stage.env)):
        if variables.get(CACHE_SPACE) and "kv_cache_memory_bytes" in user:
            key = "engine.kv_cache_memory_bytes" if stage.kv_cache_bytes is None else "kv_cache_bytes"
            raise ConfigError(f"{where}{CACHE_SPACE}: {path}.{key} says the same; keep one of the two")


def check_cpu(
    stages: Sequence[StageSpec],
    config: OmniConfig,
    user: Mapping[str, Mapping[str, Any]],
    machine: Machine,
    processes: Mapping[str, int],
) -> None:
    """Check the settings that a CPU machine does not support, and the sum of the KV caches.

    Args:
        user: the engine arguments that the user has set, by stage.
        processes: number of processes that compute on this machine, by stage.

    Raises:
        ConfigError: devices, sleep mode, variables that replace keys, or KV caches that are larger than the memory.
    """
    for name, args in user.items():
        _check_variables(stage_path(name), config.stage(name), args, machine.variables)
        if config.stage(name).replicas and config.stage(name).devices is not None:
            raise ConfigError(f"{stage_path(name)}.devices: this machine has no CUDA device; remove it")
    for name, args in user.items():
        if args.get("enable_sleep_mode"):
            raise ConfigError(
                f"enable_sleep_mode: stage '{name}' is on a CPU, where vLLM has no sleep mode; leave it out"
            )
    sizes: dict[str, tuple[str, int]] = {}
    for spec in stages:
        name, of_user = spec.name, user[spec.name].get("kv_cache_memory_bytes")
        space = config.stage(name).env.get(CACHE_SPACE) or machine.variables.get(CACHE_SPACE)
        if space and not re.fullmatch(r"[0-9]{1,9}", space):
            raise ConfigError(f"{CACHE_SPACE}: must be a number of GiB, an integer, got {space!r}")
        if space and spec.cpu_kv_bytes:
            sizes[name] = CACHE_SPACE, int(space) * GIB * processes[name]
        elif isinstance(of_user, int):
            sizes[name] = "kv_cache_memory_bytes", of_user * processes[name]
    asked = {name: found for name, found in sizes.items() if found[1]}
    if (total := sum(size for _, size in asked.values())) > machine.memory_bytes:
        setting = next(iter(asked.values()))[0]
        raise ConfigError(
            f"{setting}: {gib(total)} GiB of KV cache for {', '.join(asked)}, and this machine has "
            f"{gib(machine.memory_bytes)} GiB of memory; give less, or leave it out"
        )
