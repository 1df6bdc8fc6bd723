"""Keeps replicas running: children that share devices, and whose listeners send them requests."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from vllm_omni_ext.errors import OmniError
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.runtime.client.replica_connections import ReplicaInfo
from vllm_omni_ext.runtime.launch.launcher import Deployment
from vllm_omni_ext.runtime.supervise.process_watcher import Child, ChildSupervisor, Final, restarts_of
from vllm_omni_ext.topology.placement import Turns

log = logging.getLogger(__name__)

Addresses = Sequence[tuple[str, str]]
"""Addresses that a replica connects to, for each API server: input, output."""


class ReplicaListener(Protocol):
    """The API servers, local or on the head, that send requests to the replicas."""

    def listen(self, replica: ReplicaId) -> Addresses:
        """Listen for a replica that is going to start; OmniError or OSError if that is impossible."""

    def ready(self, replica: ReplicaId, about: ReplicaInfo) -> None:
        """A replica is ready, and can be used."""

    def ended(self, replica: ReplicaId, reason: str, *, again: bool) -> None:
        """A replica is gone; `again` if it will be restarted."""


class ReplicaSupervisor(ChildSupervisor):
    """Supervises the replicas of a deployment, and other children that are passed to it.

    Args:
        host: this machine's name or address, for status pages.
        tell: receives lines for the user who started the deployment.
        leave: called in the replica supervisor's thread with every replica that has ended.
        given_up: called in the replica supervisor's thread with every replica that is not restarted.
        closing: see `ChildSupervisor`.
    """

    def __init__(
        self,
        deployment: Deployment,
        users: ReplicaListener,
        *,
        host: str,
        tell: Callable[[str], None],
        leave: Callable[[ReplicaId], None] = lambda replica: None,
        given_up: Callable[[ReplicaId], None] = lambda replica: None,
        closing: threading.Event | None = None,
    ) -> None:
        replicas = deployment.plan.replicas()
        super().__init__(Turns({each.id: each.devices for each in replicas}), closing=closing)
        self._deployment = deployment
        self._users = users
        self._host = host
        self._tell = tell
        self._leave = leave
        self._given_up = given_up
        self._restarts = {each.id: restarts_of(deployment.plan.config) for each in replicas}
        self.children = {each.id: self._child(each.id) for each in replicas}

    def watch_replicas(self) -> None:
        """Supervise the replicas that run already."""
        for replica, process in self._deployment.processes().items():
            self.watch(self.children[replica], process)

    def _child(self, replica: ReplicaId) -> Child:
        return Child(
            replica,
            start=partial(self._start_replica, replica),
            wait_ready=partial(self._deployment.wait_for, replica),
            ready=partial(self._replica_ready, replica),
            ended=partial(self._replica_ended, replica),
        )

    def _start_replica(self, replica: ReplicaId) -> Any:
        addresses = self._users.listen(replica)
        if self._closing.is_set():
            raise Final("it is not wanted any more")
        try:
            self._deployment.start_again(replica, addresses)
        except Exception as error:  # raised by vLLM or the system: no memory, no process, a missing file
            log.exception("replica %s cannot be started", replica)
            raise OmniError(f"it cannot be started: {error}") from error
        return self._deployment.processes()[replica]

    def _replica_ready(self, replica: ReplicaId, process: Any) -> None:
        restarts = self._restarts[replica].count
        self._users.ready(replica, ReplicaInfo(host=self._host, pid=process.pid, restarts=restarts))
        self._tell(f"replica {self._deployment.name_of(replica)} is up" + (" again" if restarts else ""))

    def _replica_ended(self, replica: ReplicaId, error: Exception) -> float | None:
        final = isinstance(error, Final)
        pause = None if final else self._restarts[replica].failed(time.monotonic())
        name = self._deployment.name_of(replica)
        log = self._deployment.logs.path(name)
        reason = str(error) if log is None or final else f"{error} (log: {log})"
        self._users.ended(replica, reason, again=pause is not None)
        self._leave(replica)
        tail = self._deployment.logs.tail(name)
        self._deployment.discard(replica)
        then = f"it is started again in {pause:g} s" if pause is not None else "it is not started again"
        if pause is None:
            self._given_up(replica)
            then += "" if final else " (restart_limit)"
        with contextlib.suppress(OSError):  # the output may be closed
            self._tell(f"error: replica {name} is gone: {error}; {then}; {tail}")
        return pause
