"""One engine process of a stage, with vLLM's own loader, loop and client, and without a deployment around it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from vllm_omni_ext.engine.agent import WithAgent
from vllm_omni_ext.runtime.launch.inherit import compute_threads


@asynccontextmanager
async def stage_engine(**arguments: Any) -> AsyncIterator[Any]:
    """vLLM's client of a running engine with these `EngineArgs`; classes that are registered here are known there."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.core_client import AsyncMPClient
    from vllm.v1.engine.utils import bind_engine_zmq_listeners, launch_core_engines
    from vllm.v1.executor import Executor

    common = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 24, "distributed_executor_backend": "uni"}
    config = AsyncEngineArgs(**{**common, **arguments}).create_engine_config()
    scheduling: Any = config.scheduler_config
    scheduling.scheduler_cls = WithAgent(scheduling.scheduler_cls)
    executor, listeners = Executor.get_class(config), bind_engine_zmq_listeners(config, 1)
    with pytest.MonkeyPatch.context() as environment, compute_threads(1):  # an earlier test may have computed with more
        environment.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
        with launch_core_engines(config, executor, True, listeners.addresses) as launched:
            pass
    addresses = {
        "input_address": listeners.inputs[0].address,
        "output_address": listeners.outputs[0].address,
        "input_listener": listeners.inputs[0].socket,
        "output_listener": listeners.outputs[0].socket,
    }
    client = AsyncMPClient(config, executor, True, client_addresses=addresses)
    try:
        yield client
    finally:
        client.shutdown()
        launched.engine_manager.shutdown()
