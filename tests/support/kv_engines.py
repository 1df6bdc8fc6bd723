"""Prefill, decode and plain engines of the tiny thinker, forked from this process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
import uuid
from collections.abc import Mapping
from typing import Any

import psutil
import torch

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_omni_ext.config.schema import OUTGOING
from vllm_omni_ext.disaggregation.parameters import (
    KEY,
    TransferSettings,
    decode_transfer,
    engine_fields,
    environment,
    new_transfer_id,
    prefill_sampling,
    prefill_transfer,
)
from vllm_omni_ext.runtime.launch.engine_args import _config_classes

PLAIN = "plain"
ROWS = {OUTGOING: {"hidden_states": {"name": "shared_memory"}}}
"""The edge over which a replica's worker would send hidden states."""
CACHE_BYTES, MAX_LEN = 32 << 20, 2304
BACK_WITHIN_S = 30.0
"""For machines that other programs keep busy."""


class Engine:
    """One engine process and its client."""

    def __init__(self, model: str, role: str, settings: TransferSettings, **args: Any) -> None:
        torch.set_num_threads(1)
        self.role = role
        fields: Mapping[str, Any] = {} if role == PLAIN else engine_fields(role, settings)
        os.environ.update(environment(settings))
        before = set(psutil.Process().children())
        values = {name: _config_classes()[name](**value) for name, value in fields.items()}
        config = AsyncEngineArgs(
            model=model,
            dtype="float32",
            enforce_eager=True,
            max_num_seqs=16,
            max_model_len=MAX_LEN,
            kv_cache_memory_bytes=CACHE_BYTES,
            worker_cls="tests.support.kv_probe.ProbeWorker",
            scheduler_cls="tests.support.kv_probe.probe_scheduler",
            distributed_executor_backend="uni",
            **{"enable_prefix_caching": False, "additional_config": ROWS, **values, **args},
        ).create_engine_config()
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # vLLM's CPU platform has just set spawn
        self.llm = AsyncLLM.from_vllm_config(config)
        self.processes = sorted(set(psutil.Process().children()) - before, key=lambda each: each.pid)

    async def ask(self, what: str, *args: Any) -> Any:
        """Call a method of the worker."""
        return (await self.llm.collective_rpc(what, args=args))[0]

    async def run(self, prompt: Any, params: SamplingParams, transfer: dict[str, Any] | None = None) -> Any:
        """Return the last output of a request."""
        if transfer is not None:
            params = params.clone()
            params.extra_args = {**(params.extra_args or {}), KEY: transfer}
        return [output async for output in self.llm.generate(prompt, params, uuid.uuid4().hex)][-1]

    async def reject(self, transfer: dict[str, Any]) -> None:
        """Refuse to fetch these blocks, as a decode replica does."""
        await self.llm.notify_kv_transfer_request_rejected(uuid.uuid4().hex, transfer)

    def signal(self, number: int) -> None:
        for process in self.processes:
            process.send_signal(number)

    async def empty(self, within_s: float = BACK_WITHIN_S) -> float:
        """Seconds until no block is in use and no request is held; AssertionError if that takes too long."""
        since = time.monotonic()
        while (held := (await self.ask("used_blocks"), await self.ask("held_requests"))) != (0, 0):
            assert time.monotonic() - since < within_s, f"{self.role} still holds {held} (blocks, requests)"
            await asyncio.sleep(0.1)
        return time.monotonic() - since

    def close(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self.signal(signal.SIGCONT)
        self.llm.shutdown()


async def prefill(engine: Engine, prompt: Any) -> dict[str, Any] | None:
    """Prefill a prompt; returns the transfer parameters for decode."""
    output = await engine.run(prompt, SamplingParams(**prefill_sampling()), prefill_transfer(new_transfer_id()))
    return decode_transfer(output.kv_transfer_params)
