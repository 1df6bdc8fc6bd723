"""Assigns the names of replicas, and starts the coordinator's process. Runs in the head, the server's first process.

The coordinator tracks the states of all replicas by their heartbeats.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import zmq

from vllm_omni_ext.coordinator import server
from vllm_omni_ext.coordinator.keys import Keys, connect
from vllm_omni_ext.coordinator.members import Forget, Leave, Member, State
from vllm_omni_ext.coordinator.membership import Names, Timing
from vllm_omni_ext.coordinator.server import CoordinatorConfig, listening
from vllm_omni_ext.coordinator.watcher import Watcher
from vllm_omni_ext.encoding import MAX_MESSAGE_BYTES, encode
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.lifeline import die_with_parent
from vllm_omni_ext.ports import EVENTS_PORT, VIEWS_PORT
from vllm_omni_ext.runtime.launch.addresses import endpoint
from vllm_omni_ext.titles import name_process
from vllm_omni_ext.topology.plan import Plan

log = logging.getLogger(__name__)

FAREWELL_MS = 200


class Coordination:
    """Assigns the names of all replicas, and starts the coordinator's process, each time with the same addresses.

    Args:
        folder: private directory for the Unix sockets; TCP is used if the head has a `master_address`.
        forgotten: called for every replica that the coordinator has removed, with whether it had missed heartbeats.

    Attributes:
        events: the coordinator's address for messages of replicas.
        views: the coordinator's address at which it publishes the states of all replicas.
        names: the names that are in use.
    """

    def __init__(self, plan: Plan, folder: str, *, forgotten: Callable[[Member, bool], None]) -> None:
        cluster, timeouts = plan.config.cluster, plan.config.timeouts
        host, port = cluster.master_address, cluster.master_port
        if host is not None and port is not None:
            self.events, self.views = endpoint(host, port + EVENTS_PORT), endpoint(host, port + VIEWS_PORT)
        else:
            self.events, self.views = f"ipc://{folder}/events", f"ipc://{folder}/views"
        self.timing = Timing(timeout_s=cluster.heartbeat_timeout_s, drain_s=timeouts.drain_timeout_s)
        key = secrets.token_hex(16)
        self.names = Names(key, (replica.id for replica in plan.replicas()))
        self._config = CoordinatorConfig(
            timing=self.timing,
            key=key,
            events=self.events,
            views=self.views,
            secret_file=cluster.cluster_secret_file,
        )
        self._startup_s = timeouts.startup_timeout_s
        self._keys = Keys.read(cluster.cluster_secret_file)
        self._forgotten = forgotten
        self._control: Connection | None = None
        self._context: zmq.Context[Any] | None = None
        self._events: Any = None
        self.process: Any = None

    def start(self) -> Any:
        """Start or restart the coordinator's process. Return the process once it listens.

        Raises:
            OmniError: the process does not listen; the message contains the reason.
        """
        if self._control is not None:
            self._control.close()
        ours, theirs = get_context("fork").Pipe()
        process = get_context("fork").Process(
            target=_run, name="Coordinator", args=(self._config, theirs, ours, os.getpid()), daemon=True
        )
        process.start()
        theirs.close()
        self._control, self.process = ours, process
        listening(ours, self._startup_s)
        return process

    def connect(self) -> None:
        """Open the connection over which `leave` sends. Called after all processes of the start have been forked."""
        self._context = zmq.Context()
        self._events = connect(self._context, zmq.PUSH, self.events, self._keys, limit=MAX_MESSAGE_BYTES)

    def leave(self, replica: ReplicaId) -> None:
        """Free the name of a replica whose process has ended, and send the coordinator `Leave`."""
        member = self.names.get(replica)
        if member is None:
            return
        self.names.free(member)
        if self._events is None:
            return
        try:
            self._events.send(encode(Leave(member, drain=False, proof=self.names.proof(member))), zmq.NOBLOCK)
        except zmq.Again:
            log.warning("no connection to the coordinator: it removes %s after missing heartbeats", replica)

    def close(self) -> None:
        """End the coordinator's process; a second call does nothing."""
        if self._context is not None:
            self._context.destroy(linger=FAREWELL_MS)
            self._context = None
        if self._control is not None:
            self._control.close()
            self._control = None
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.process = None

    async def follow(self) -> None:
        """Receive the coordinator's views (states of all replicas), and call `forgotten` for removed replicas.

        Runs until the task is cancelled.
        """
        silent: set[Member] = set()
        with contextlib.closing(Watcher(self.views, keys=self._keys)) as watcher:
            async for view, changes in watcher:
                for change in changes:
                    if isinstance(change, Forget):
                        self._forgotten(change.member, change.member in silent)
                silent = {entry.member for entry in view.replicas if entry.state in (State.SUSPECT, State.DOWN)}


def _run(config: CoordinatorConfig, control: Connection, parents_end: Connection, parent: int) -> None:
    """Run the coordinator in a child process of the head, the process of `vllm serve`; it ends when the head ends."""
    parents_end.close()
    die_with_parent(parent)
    name_process("coordinator")
    server.run(config, control)
