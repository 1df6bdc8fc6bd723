"""Runs `vllm serve MODEL --omni --headless`: starts replicas of one stage that join a head on this host or another.

The head is the first process of a `vllm serve MODEL --omni` without `--headless`. It starts the API servers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
from vllm.usage.usage_lib import UsageContext
from zmq.utils.monitor import recv_monitor_message

from vllm_omni_ext import __version__
from vllm_omni_ext.coordinator.keys import Keys, Socket, connect
from vllm_omni_ext.coordinator.members import Leave, State
from vllm_omni_ext.coordinator.watcher import Watcher
from vllm_omni_ext.encoding import MAX_MESSAGE_BYTES, Malformed, Message, encode
from vllm_omni_ext.engine.replica_identity import ReplicaIdentity
from vllm_omni_ext.errors import OmniError
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.runtime.client.replica_connections import ReplicaInfo
from vllm_omni_ext.runtime.launch.addresses import endpoint, reach
from vllm_omni_ext.runtime.launch.launcher import Deployment
from vllm_omni_ext.runtime.launch.progress import print_status
from vllm_omni_ext.runtime.supervise.joining import (
    FROM_HEAD,
    MAX_ANSWER_BYTES,
    FromHead,
    Gone,
    Join,
    Joined,
    Present,
    Refusal,
)
from vllm_omni_ext.runtime.supervise.process_watcher import Final, ReplicaSupervisor
from vllm_omni_ext.topology.agreement import config_hash, models_of
from vllm_omni_ext.topology.plan import Headless, Plan

RETRY_S = 1.0
"""Seconds after which a message that the head has not answered is sent again."""

PRESENT_S = 5.0
"""Interval of the `Present` messages in seconds. A head that does not have the replica answers them with `Refusal`."""

WAITING_S = 10.0
"""Interval in seconds of the lines for the operator while the head has not answered."""

LEAVING_TAKES_S = 5.0
"""Seconds that leaving may take after the drain time; also the longest wait for a view while leaving."""

LONGEST_PATH = 512
"""Most characters of a log file's path that are sent to the head (`Gone.log`)."""

MOST_BROKEN_HANDSHAKES = 3
"""Failed handshakes in a row after which the process at the head's address is considered incompatible."""

_BROKEN = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_REJECTED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
"""Events of ZeroMQ's handshake after which libzmq does not try to connect again."""
_HANDSHAKES = _BROKEN | _REJECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED

REFUSED, FAILED = 2, 1
"""Exit statuses if no replica is left: 2 if the head has refused a replica, 1 for another reason."""


class Refused(Final):
    """The head refuses a replica; the message contains the reason."""


@dataclass
class _Place:
    """A local replica that is registered at the head.

    Attributes:
        joined: the head's reply.
        present: the message that confirms regularly that the replica runs.
    """

    joined: Joined
    present: Present


class HeadClient:
    """Registers local replicas at the head, and sends the head their events, which it receives as a `ReplicaListener`.

    Used by one thread at a time. Arguments `slot` are local ids of replicas. The head assigns other ids, by which the
    API servers and the log files name the replicas.

    Args:
        plan: same as the head's, except for the number of replicas.
        tell: receives a line for the operator every `WAITING_S` seconds while the head does not answer.

    Attributes:
        places: the registered replicas, by local id.
        refused: the head has refused a replica.
    """

    def __init__(self, plan: Plan, headless: Headless, *, tell: Callable[[str], None] = lambda line: None) -> None:
        host, port = headless.head
        self._plan = plan
        self._tell = tell
        self.log_of: Callable[[ReplicaId], Path | None] = lambda replica: None
        """Function that returns the log file of a replica; set by `HeadlessNode`."""
        self._where = f"{host}:{port}"
        self.host = headless.replica_address or reach(host, port)
        self._hash = config_hash(plan, headless.stage)
        self._model = models_of(plan)[headless.stage]
        self.keys = Keys.read(plan.config.cluster.cluster_secret_file)
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket: Socket = connect(
            self._context, zmq.DEALER, endpoint(host, port), self.keys, limit=MAX_ANSWER_BYTES, watched=_HANDSHAKES
        )
        self._handshakes: Socket = self._socket.get_monitor_socket()
        self._broken_handshakes = 0
        self.places: dict[ReplicaId, _Place] = {}
        self._names: dict[ReplicaId, ReplicaId] = {}
        """Id that the head has assigned last, by local id."""
        self.refused = False
        self._closing = threading.Event()

    def close(self) -> None:
        """Close the connection; queued messages are still sent if the head is reachable within 1 s."""
        self._context.destroy(linger=int(RETRY_S * 1000))

    def stop(self) -> None:
        """Stop waiting for the head; any thread may call this."""
        self._closing.set()

    def listen(self, slot: ReplicaId) -> Sequence[tuple[str, str]]:
        """Register one replica at the head, and wait for the reply.

        Returns:
            The addresses (input, output) of each API server to which the replica connects.

        Raises:
            Refused: the head refuses the replica.
            OmniError: no head has answered in time.
        """
        ticket = secrets.token_hex(16)
        join = Join(
            ticket=ticket,
            stage=slot.stage,
            model=self._model,
            config_hash=self._hash,
            version=__version__,
            host=self.host,
            index=self._names[slot].index if slot in self._names else None,
        )
        limit = self._plan.config.timeouts.startup_timeout_s
        began = reported = time.monotonic()
        deadline = began + limit
        while time.monotonic() < deadline and not self._closing.is_set():
            self._socket.poll(int(RETRY_S * 1000), zmq.POLLOUT)
            self._send(join)
            self._check_handshakes()
            for answer in self._receive(RETRY_S):
                match answer:
                    case Refusal(ticket=answered, reason=reason) if answered in (ticket, ""):
                        self.refused = True
                        raise Refused(f"the head at {self._where} refuses this replica: {reason}")
                    case Joined(ticket=answered) if answered == ticket:
                        self.places[slot] = _Place(answer, Present(ticket=ticket))
                        self._names[slot] = answer.member.id
                        return [(server.input, server.output) for server in answer.servers]
            if (now := time.monotonic()) - reported >= WAITING_S:
                reported = now
                self._tell(f"waiting for the head at {self._where}: no answer for {now - began:.0f} s (of {limit:g} s)")
        raise OmniError(f"no head answers at {self._where} (waited {limit:g} s, timeouts.startup_timeout_s)")

    def ready(self, slot: ReplicaId, about: ReplicaInfo) -> None:
        """Report to the head that a replica is ready."""
        place = self.places[slot]
        place.present = Present(ticket=place.joined.ticket, pid=about.pid, restarts=about.restarts)
        self._send(place.present)

    def ended(self, slot: ReplicaId, reason: str, *, again: bool) -> None:
        """Report to the head that a replica has ended; `again`: this process will restart it."""
        if (place := self.places.pop(slot, None)) is not None:
            log = str(self.log_of(self.name_of(slot)) or "")
            self._send(Gone(ticket=place.joined.ticket, reason=reason[:200], again=again, log=log[:LONGEST_PATH]))

    def name_of(self, slot: ReplicaId) -> ReplicaId:
        """Return the id that the head has assigned to a replica last; the local id before the replica has joined."""
        return self._names.get(slot, slot)

    def unknown_to_head(self) -> list[ReplicaId]:
        """Report all replicas of this process to the head; drop and return those that the head rejects.

        A head rejects replicas that it has removed. A restarted head rejects all replicas of the head before it.
        """
        for place in self.places.values():
            self._send(place.present)
        refused = {message.ticket for message in self._receive(RETRY_S) if isinstance(message, Refusal)}
        unknown = sorted(slot for slot, place in self.places.items() if place.joined.ticket in refused)
        for slot in unknown:
            del self.places[slot]
        return unknown

    def _send(self, message: Message) -> None:
        """Send a message if the head is reachable, else drop the message. `Join` and `Present` are sent again later."""
        with contextlib.suppress(zmq.Again):
            self._socket.send(encode(message), zmq.NOBLOCK)

    def _check_handshakes(self) -> None:
        """Raise Refused if ZeroMQ's handshake with the head's address fails, e.g. because the secrets differ."""
        rejected = False
        while self._handshakes.poll(0):
            event = recv_monitor_message(self._handshakes)["event"]
            rejected |= bool(event & _REJECTED)
            self._broken_handshakes = self._broken_handshakes + 1 if event == _BROKEN else 0
        if rejected or self._broken_handshakes >= MOST_BROKEN_HANDSHAKES:
            self.refused = True
            raise Refused(
                f"what listens at {self._where} is no head, or one with another secret (cluster.cluster_secret_file)"
            )

    def _receive(self, wait_s: float) -> Iterator[FromHead]:
        """Wait at most `wait_s` seconds for a message of the head, then yield all messages that have arrived."""
        if self._socket.poll(int(wait_s * 1000)):
            while self._socket.poll(0):
                with contextlib.suppress(Malformed):
                    yield FROM_HEAD.decode(self._socket.recv())

    def identity(self, slot: ReplicaId) -> ReplicaIdentity:
        """Return the identity that a replica's process gets in its environment: id, and values for its heartbeats."""
        joined = self.places[slot].joined
        return ReplicaIdentity(
            stage=slot.stage,
            index=joined.member.index,
            epoch=joined.member.epoch,
            proof=joined.proof,
            parent=os.getpid(),
            events=joined.events,
            interval_s=joined.interval_s,
            host=self.host,
            secret_file=self._plan.config.cluster.cluster_secret_file,
            ports=self._plan.config.cluster.ports,
        )


def run_headless(plan: Plan, headless: Headless, args: Namespace) -> int:
    """Start replicas that join the head, run until a signal arrives or no replica is left, and leave.

    Returns:
        The exit status of the process.
    """
    leaving = threading.Event()
    interrupted = []

    def stop(*_: Any) -> None:
        interrupted.append(True)
        leaving.set()
        if len(interrupted) > 1:
            raise SystemExit(FAILED)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    try:
        head = HeadClient(plan, headless, tell=print_status)
        deployment = Deployment(
            plan,
            clients=0,
            usage=UsageContext.OPENAI_API_SERVER,
            tell=print_status,
            identity_of=head.identity,
            host=head.host,
            name_of=head.name_of,
        )
        with deployment, HeadlessNode(deployment, head, leaving) as node:
            leaving.wait()
            return node.status
    except OmniError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED


class HeadlessNode:
    """Starts the replicas of this process, which join the head. On exit, drains and ends the replicas."""

    def __init__(self, deployment: Deployment, head: HeadClient, leaving: threading.Event) -> None:
        self._deployment = deployment
        self._head = head
        self._leaving = leaving
        self.status = 0
        head.log_of = deployment.logs.path
        self._slots = [replica.id for replica in deployment.plan.replicas()]
        self._lost: set[ReplicaId] = set()
        self._replica_supervisor = ReplicaSupervisor(
            deployment, head, host=head.host, tell=print_status, given_up=self._given_up
        )

    def __enter__(self) -> HeadlessNode:
        for slot in self._slots:
            self._replica_supervisor.start(self._replica_supervisor.children[slot])
        self._replica_supervisor.do(self._check_head)
        return self

    def __exit__(self, *exc: object) -> None:
        self._head.stop()
        self._replica_supervisor.close()  # its thread continues, because the replicas that it has started end with it
        joined = [place.joined for place in self._head.places.values()]
        if joined and not self._lost.issuperset(self._slots):
            asyncio.run(drain_and_wait(joined, self._head.keys))
        self._deployment.end()
        self._replica_supervisor.join()
        self._head.close()

    def _given_up(self, slot: ReplicaId) -> None:
        self._lost.add(slot)
        if self._lost.issuperset(self._slots):
            self.status = REFUSED if self._head.refused else FAILED
            self._leaving.set()

    def _check_head(self) -> None:
        """End the replicas that the head has removed, so that they are restarted and join again.

        Calls itself again every `PRESENT_S` seconds.
        """
        if self._leaving.is_set():
            return
        self._replica_supervisor.after(PRESENT_S, self._check_head)
        processes = self._deployment.processes()
        for slot in self._head.unknown_to_head():
            name = self._head.name_of(slot)
            print_status(f"the head does not have {name} any more, or is another one: it joins again")
            if slot in processes:
                processes[slot].kill()


async def drain_and_wait(joined: Sequence[Joined], keys: Keys | None) -> None:
    """Send the coordinator `Leave` for these replicas, and wait until their requests have ended.

    Args:
        joined: the head's replies to the replicas, at least one.
        keys: CURVE keys of the coordinator's sockets, if there is a secret.
    """
    ours = {each.member: each.proof for each in joined}
    watcher = Watcher(joined[0].views, keys=keys)
    context: zmq.Context[Any] = zmq.Context()
    events = connect(context, zmq.PUSH, joined[0].events, keys, limit=MAX_MESSAGE_BYTES)
    try:
        async with asyncio.timeout(joined[0].drain_s + LEAVING_TAKES_S):
            while True:
                async with asyncio.timeout(LEAVING_TAKES_S):
                    view, _ = await anext(watcher)
                left = [entry for entry in view.replicas if entry.member in ours]
                if not left and view.settled:  # else a restarted coordinator may lack heartbeats of these replicas
                    return
                for entry in left:
                    if entry.state is not State.DRAINING:
                        with contextlib.suppress(zmq.Again):
                            events.send(encode(Leave(entry.member, proof=ours[entry.member])), zmq.NOBLOCK)
    except TimeoutError:
        print_status("drain timed out, exiting: the coordinator does not answer, or requests take too long")
    finally:
        watcher.close()
        context.destroy(linger=0)
