"""`vllm serve MODEL --omni --headless`: replicas of one stage that join a head, on this host or another."""

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
from vllm_omni_ext.coordinator.keys import Keys
from vllm_omni_ext.coordinator.members import Leave, State
from vllm_omni_ext.coordinator.sockets import Socket, connect
from vllm_omni_ext.coordinator.watcher import Watcher
from vllm_omni_ext.errors import OmniError
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.runtime.client.replica_connections import ReplicaInfo
from vllm_omni_ext.runtime.launch.addresses import endpoint, reach
from vllm_omni_ext.runtime.launch.launcher import Deployment
from vllm_omni_ext.runtime.supervise.process_watcher import Final
from vllm_omni_ext.runtime.supervise.replica_supervisor import ReplicaSupervisor
from vllm_omni_ext.topology.agreement import config_hash, model_identity
from vllm_omni_ext.topology.plan import Headless, Plan
from vllm_omni_ext.wire.coordination import MAX_REPLY_BYTES, Malformed, Message, encode
from vllm_omni_ext.wire.joining import (
    FROM_HEAD,
    MAX_ANSWER_BYTES,
    Gone,
    Join,
    Joined,
    Ping,
    Pong,
    Refusal,
    Started,
)
from vllm_omni_ext.wire.replica_identity import ReplicaIdentity

ASK_AGAIN_S = 1.0
"""Interval of repeated messages to a head that has not answered."""

PING_S = 5.0
"""Interval of the checks that the head is still the same one."""

WAITING_S = 10.0
"""Interval of the lines about a head that has not answered yet."""

LEAVING_TAKES_S = 5.0
"""Time that leaving may take beyond the drain time, and for which the coordinator may be silent meanwhile."""

LONGEST_PATH = 512
"""Longest path of a log file that is sent, in characters."""

MOST_BROKEN_HANDSHAKES = 3
"""Handshakes in a row that the other side breaks off before it counts as incompatible."""

_BROKEN = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_REJECTED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
"""After these, libzmq does not try again."""
_HANDSHAKES = _BROKEN | _REJECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED

REFUSED, FAILED = 2, 1
"""Exit status: the head refuses these replicas; no replica could be kept running."""


class Refused(Final):
    """The head refuses a replica; the message contains the reason."""


@dataclass(frozen=True)
class _Place:
    """One of these replicas at the head: its ticket, and the head's answer."""

    ticket: str
    joined: Joined

    def member(self, slot: ReplicaId) -> ReplicaId:
        return ReplicaId(slot.stage, self.joined.index)


class HeadClient:
    """The connection to the head; a `ReplicaListener` of the replica supervisor. Used by one thread at a time.

    Args:
        plan: same as the head's, except for the number of replicas.
        tell: receives a line for the operator every `WAITING_S` seconds while the head does not answer.
    """

    def __init__(self, plan: Plan, headless: Headless, *, tell: Callable[[str], None] = lambda line: None) -> None:
        host, port = headless.head
        self._plan = plan
        self._tell = tell
        self.log_of: Callable[[ReplicaId], Path | None] = lambda replica: None
        """Returns a replica's log file."""
        self._where = f"{host}:{port}"
        self.host = headless.replica_address or reach(host, port)
        self._hash = config_hash(plan, headless.stage)
        self._model = model_identity(plan.model)
        self.keys = Keys.read(plan.config.cluster_secret_file)
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket: Socket = connect(
            self._context, zmq.DEALER, endpoint(host, port), self.keys, limit=MAX_ANSWER_BYTES, watched=_HANDSHAKES
        )
        self._handshakes: Socket = self._socket.get_monitor_socket()
        self._broken_handshakes = 0
        self.places: dict[ReplicaId, _Place] = {}
        self._started: dict[ReplicaId, Started] = {}
        self.refused = False
        self._wishes: dict[ReplicaId, int] = {}
        self._closing = threading.Event()

    def close(self) -> None:
        """Close the connection; the last messages are still sent if the head is reachable."""
        self._context.destroy(linger=int(ASK_AGAIN_S * 1000))

    def stop(self) -> None:
        """Stop waiting for the head; may be called by any thread."""
        self._closing.set()

    def listen(self, slot: ReplicaId) -> Sequence[tuple[str, str]]:
        """Have the head accept one replica. Returns the addresses it connects to.

        Raises:
            Refused: the head refuses it.
            OmniError: no head has answered in time.
        """
        ticket = secrets.token_hex(16)
        wish = Join(
            ticket=ticket,
            stage=slot.stage,
            model=self._model,
            config_hash=self._hash,
            version=__version__,
            host=self.host,
            index=self._wishes.get(slot),
        )
        limit = self._plan.config.startup_timeout_s
        began = told = time.monotonic()
        deadline = began + limit
        while time.monotonic() < deadline and not self._closing.is_set():
            self._socket.poll(int(ASK_AGAIN_S * 1000), zmq.POLLOUT)
            self._say(wish)
            self._look_at_handshakes()
            for answer in self._hear(ASK_AGAIN_S):
                match answer:
                    case Refusal(ticket=asked, reason=reason) if asked in (ticket, ""):
                        self.refused = True
                        raise Refused(f"the head at {self._where} refuses this replica: {reason}")
                    case Joined(ticket=asked) if asked == ticket:
                        self.places[slot] = _Place(ticket, answer)
                        self._wishes[slot] = answer.index
                        return [(server.input, server.output) for server in answer.servers]
            if (now := time.monotonic()) - told >= WAITING_S:
                told = now
                self._tell(f"waiting for the head at {self._where}: no answer for {now - began:.0f} s (of {limit:g} s)")
        raise OmniError(f"no head answers at {self._where} (waited {limit:g} s, startup_timeout_s)")

    def ready(self, slot: ReplicaId, about: ReplicaInfo) -> None:
        """Report to the head that a replica is ready."""
        self._started[slot] = Started(ticket=self.places[slot].ticket, pid=about.pid, restarts=about.restarts)
        self._say(self._started[slot])

    def ended(self, slot: ReplicaId, reason: str, *, again: bool) -> None:
        """Report to the head that a replica is gone."""
        place = self._take_back(slot)
        if place is not None:
            log = self.log_of(self.name_of(slot))
            said = Gone(ticket=place.ticket, reason=reason[:200], again=again, log=str(log or "")[:LONGEST_PATH])
            self._say(said)

    def name_of(self, slot: ReplicaId) -> ReplicaId:
        """The name that the head gave a replica last; its name here before it has joined."""
        return ReplicaId(slot.stage, self._wishes.get(slot, slot.index))

    def disowned(self) -> list[ReplicaId]:
        """Check that the head is the one that these replicas have joined. Returns the replicas that it does not have.

        Those are no members from now on. Earlier messages about the remaining replicas may have been lost and are sent
        again. A missing answer has no effect.
        """
        slots = {place.ticket: slot for slot, place in self.places.items()}
        for message in (*self._started.values(), Ping()):
            self._say(message)
        gone: set[ReplicaId] = set()
        for said in self._hear(ASK_AGAIN_S):
            match said:
                case Pong(deployment=head):
                    gone.update(slot for slot, place in self.places.items() if place.joined.deployment != head)
                case Refusal(ticket=ticket) if ticket in slots:
                    gone.add(slots[ticket])
        for slot in gone:
            self._take_back(slot)
        return sorted(gone)

    def _take_back(self, slot: ReplicaId) -> _Place | None:
        self._started.pop(slot, None)
        return self.places.pop(slot, None)

    def _say(self, message: Message) -> None:
        """Send without waiting: messages to an unreachable head are dropped, and the important ones are sent again."""
        with contextlib.suppress(zmq.Again):
            self._socket.send(encode(message), zmq.NOBLOCK)

    def _look_at_handshakes(self) -> None:
        """Raise Refused if the peer at the head's address does not complete the handshake."""
        rejected = False
        while self._handshakes.poll(0):
            event = recv_monitor_message(self._handshakes)["event"]
            rejected |= bool(event & _REJECTED)
            self._broken_handshakes = self._broken_handshakes + 1 if event == _BROKEN else 0
        if rejected or self._broken_handshakes >= MOST_BROKEN_HANDSHAKES:
            self.refused = True
            raise Refused(f"what listens at {self._where} is no head, or one with another secret (cluster_secret_file)")

    def _hear(self, wait_s: float) -> Iterator[Any]:
        """Yield messages of the head: all that are queued once one arrives within `wait_s` seconds."""
        if self._socket.poll(int(wait_s * 1000)):
            while self._socket.poll(0):
                with contextlib.suppress(Malformed):
                    yield FROM_HEAD.decode(self._socket.recv())

    def identity(self, slot: ReplicaId) -> ReplicaIdentity:
        """The identity that the process of a replica reports to the coordinator."""
        place = self.places[slot]
        joined = place.joined
        return ReplicaIdentity(
            stage=slot.stage,
            index=joined.index,
            instance=place.ticket,  # new for every process; this node also names it when the replica disconnects
            parent=os.getpid(),
            events=joined.events,
            model=self._model,
            config_hash=self._hash,
            version=__version__,
            host=self.host,
            secret_file=self._plan.config.cluster_secret_file,
            ports=self._plan.config.ports,
        )


def run_headless(plan: Plan, headless: Headless, args: Namespace) -> int:
    """Join the head, serve until a signal or until no replica is left, and disconnect. Returns the exit status."""
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
        with deployment, HeadlessNode(deployment, head, leaving) as crew:
            leaving.wait()
            return crew.status
    except OmniError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED


def print_status(line: str) -> None:
    """Print a line for the user."""
    print(line, flush=True)


class HeadlessNode:
    """The replicas of this process, from joining to leaving."""

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
        self._replica_supervisor.do(self._ping)
        return self

    def __exit__(self, *exc: object) -> None:
        self._head.stop()
        self._replica_supervisor.close()  # its thread stays, because the replicas it has started end with it
        places = dict(self._head.places)
        if places and not self._lost.issuperset(self._slots):
            asyncio.run(take_leave(places, self._head.keys))
        self._deployment.end()
        self._replica_supervisor.join()
        self._head.close()

    def _given_up(self, slot: ReplicaId) -> None:
        self._lost.add(slot)
        if self._lost.issuperset(self._slots):
            self.status = REFUSED if self._head.refused else FAILED
            self._leaving.set()

    def _ping(self) -> None:
        """Check that the head is the same and has the replicas; restart the replicas that it does not have."""
        self._replica_supervisor.after(PING_S, self._ping)
        processes = self._deployment.processes()
        for slot in self._head.disowned():
            print_status(
                f"the head does not have {self._head.name_of(slot)} any more, or is another one: it joins anew"
            )
            if slot in processes:
                processes[slot].kill()


async def take_leave(places: dict[ReplicaId, _Place], keys: Keys | None) -> None:
    """Have the coordinator drain these replicas, and wait until they have finished their requests."""
    joined = next(iter(places.values())).joined
    ours = {place.member(slot): place.ticket for slot, place in places.items()}
    watcher = Watcher(joined.views, keys=keys)
    context: zmq.Context[Any] = zmq.Context()
    events = connect(context, zmq.DEALER, joined.events, keys, limit=MAX_REPLY_BYTES)
    try:
        async with asyncio.timeout(joined.drain_s + LEAVING_TAKES_S):
            while True:
                async with asyncio.timeout(LEAVING_TAKES_S):
                    view, _ = await anext(watcher)
                here = [entry for entry in view.replicas if entry.member.id in ours]
                if not here and view.settled:  # a new coordinator may not have received their heartbeats yet
                    return
                for entry in here:
                    if entry.state is not State.DRAINING:
                        proof = ours[entry.member.id]
                        leave = Leave(entry.member, proof=proof)
                        with contextlib.suppress(zmq.Again):
                            events.send(encode(leave), zmq.NOBLOCK)
    except TimeoutError:
        print_status("leaving without the coordinator's consent: it does not answer, or requests take too long")
    finally:
        watcher.close()
        context.destroy(linger=0)
