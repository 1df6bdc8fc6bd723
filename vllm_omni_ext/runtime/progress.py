"""What the person who starts a deployment sees of it: one line a stage."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console

from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.topology.shape import Plan


class Progress:
    """Says which stages are ready.

    Args:
        tell: takes one line.
        clock: seconds since the command began.
    """

    def __init__(self, plan: Plan, tell: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._tell = tell
        self._clock = clock
        self._pending = {stage.name: {replica.id for replica in stage.replicas} for stage in plan.stages}

    def starting(self, logs: str) -> None:
        """All replicas have been started; `logs` says where they write."""
        here = ((stage, len(replicas)) for stage, replicas in self._pending.items() if replicas)
        stages = ", ".join(f"{stage} ({_count(replicas)})" for stage, replicas in here)
        self._tell(f"starting {stages}; logs {logs}")

    def ready(self, replica: ReplicaId) -> None:
        """A replica is ready; the last one of a stage makes a line."""
        pending = self._pending[replica.stage]
        pending.discard(replica)
        if not pending:
            self._tell(f"{replica.stage} ready after {self._clock():.1f} s")


def _count(replicas: int) -> str:
    return "1 replica" if replicas == 1 else f"{replicas} replicas"


@contextlib.contextmanager
def spinner(text: str) -> Iterator[None]:
    """A moving sign while the block runs, on a terminal; nothing elsewhere."""
    console = Console()
    if not console.is_terminal:
        yield
        return
    with console.status(text):
        yield
