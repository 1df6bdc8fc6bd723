"""Notices when a process ends. vLLM's own clients cannot: a killed engine is silent."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Hashable, Mapping
from multiprocessing import connection
from typing import Any, Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)

_LOOK = b"look"
"""Sent for every item of the queue."""


class Supervisor(Generic[Name]):
    """Waits (without polling) for any of several processes to end, in a thread of its own.

    Args:
        processes: process by name.
        ended: called in that thread with the name and exit code of each process that ends before `stop`.
    """

    def __init__(self, processes: Mapping[Name, Any], ended: Callable[[Name, int | None], None]) -> None:
        self._ended = ended
        self._new: queue.SimpleQueue[tuple[Name, Any] | None] = queue.SimpleQueue()
        self._wake, self._waker = connection.Pipe(duplex=False)
        for name, process in processes.items():
            self._new.put((name, process))
        for _ in processes:
            self._waker.send_bytes(_LOOK)
        self._thread = threading.Thread(target=self._run, name="omni-supervisor", daemon=True)
        self._thread.start()

    def watch(self, name: Name, process: Any) -> None:
        """Watch one more process; one that has ended already is reported at once."""
        self._new.put((name, process))
        self._waker.send_bytes(_LOOK)

    def _run(self) -> None:
        watched: dict[Any, tuple[Name, Any]] = {}
        while True:
            ready = connection.wait([*watched, self._wake])
            if self._wake in ready:
                self._wake.recv_bytes()
                new = self._new.get()
                if new is None:
                    return
                watched[new[1].sentinel] = new
                continue
            for sentinel in ready:
                name, process = watched.pop(sentinel)
                process.join()
                self._ended(name, process.exitcode)

    def stop(self) -> None:
        """Stop watching; call it before ending the processes on purpose."""
        self._new.put(None)
        self._waker.send_bytes(_LOOK)
        self._thread.join()
        self._wake.close()
        self._waker.close()
