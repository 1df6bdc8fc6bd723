"""Notices when a process ends. vLLM's own clients cannot: a killed engine is silent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping
from multiprocessing import connection
from typing import Any, Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)


class Supervisor(Generic[Name]):
    """Waits (without polling) for any of several processes to end, in a thread of its own.

    Args:
        processes: process by name.
        ended: called in that thread with the name and exit code of each process that ends before `stop`.
    """

    def __init__(self, processes: Mapping[Name, Any], ended: Callable[[Name, int | None], None]) -> None:
        self._processes = dict(processes)
        self._ended = ended
        self._wake, self._waker = connection.Pipe(duplex=False)
        self._thread = threading.Thread(target=self._watch, name="omni-supervisor", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        watched: dict[Any, Name] = {process.sentinel: name for name, process in self._processes.items()}
        while watched:
            ready = connection.wait([*watched, self._wake])
            if self._wake in ready:
                return
            for sentinel in ready:
                name = watched.pop(sentinel)
                process = self._processes[name]
                process.join()
                self._ended(name, process.exitcode)

    def stop(self) -> None:
        """Stop watching; call it before ending the processes on purpose."""
        self._waker.send_bytes(b"stop")
        self._thread.join()
        self._wake.close()
        self._waker.close()
