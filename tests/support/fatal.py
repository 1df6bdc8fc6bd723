"""A change for all processes of a server (see `preloaded.CHANGE`): some requests end the engine that runs them.

A request whose id contains `fatal-STAGE` ends the process of each replica of that stage, in the step that would run it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support import preloaded

HERE = "tests.support.fatal"


def install() -> None:
    """Change vLLM's executor in this process and in all that it starts."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    from vllm_omni_ext.engine.replica_identity import ReplicaIdentity

    execute = UniProcExecutor.execute_model

    def execute_model(executor: UniProcExecutor, scheduler_output: Any, *args: Any, **keywords: Any) -> Any:
        identity = ReplicaIdentity.read()
        if identity is not None:
            mark = f"fatal-{identity.stage}"
            if any(mark in req_id for req_id in scheduler_output.num_scheduled_tokens):
                os.kill(os.getpid(), signal.SIGKILL)
        return execute(executor, scheduler_output, *args, **keywords)

    UniProcExecutor.execute_model = execute_model  # type: ignore[method-assign]


@contextmanager
def installed() -> Iterator[None]:
    """Inside the block, servers start with the change."""
    os.environ[preloaded.CHANGE] = f"{HERE}:{install.__name__}"
    try:
        yield
    finally:
        os.environ.pop(preloaded.CHANGE, None)  # blocks may be nested
