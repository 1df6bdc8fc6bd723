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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import zmq
from vllm.usage.usage_lib import UsageContext
from zmq.utils.monitor import recv_monitor_message

from vllm_omni_ext import __version__
from vllm_omni_ext.coordinator import translate
from vllm_omni_ext.coordinator.keys import Keys
from vllm_omni_ext.coordinator.members import State
from vllm_omni_ext.coordinator.sockets import Socket, connect
from vllm_omni_ext.coordinator.watcher import Watcher
from vllm_omni_ext.errors import OmniError
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.runtime.addresses import endpoint, reach
from vllm_omni_ext.runtime.fleet import About
from vllm_omni_ext.runtime.keeper import Final, Keeper
from vllm_omni_ext.runtime.launcher import Deployment
from vllm_omni_ext.runtime.supervisor import Supervisor
from vllm_omni_ext.topology.agreement import config_hash, model_identity
from vllm_omni_ext.topology.shape import Headless, Plan
from vllm_omni_ext.wire import coordination as wire
from vllm_omni_ext.wire.enrollment import Enrollment
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

ASK_AGAIN_S = 1.0
"""A head that has not answered is asked again after this time."""

PING_S = 5.0
"""How often a head is asked whether it is still the same one."""

LEAVING_TAKES_S = 5.0
"""What leaving may take beyond the time for the requests, and how long a coordinator may say nothing meanwhile."""

MOST_BROKEN_HANDSHAKES = 3
"""Handshakes in a row that the other side breaks off before it is believed that it always will."""

_BROKEN = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_REJECTED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
"""After these, libzmq does not try again."""
_HANDSHAKES = _BROKEN | _REJECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED

REFUSED, FAILED = 2, 1
"""Exit status: the head does not want these replicas; none of them could be kept running."""


class Refused(Final):
    """The head refuses a replica, and says why."""


@dataclass(frozen=True)
class _Place:
    """What a replica of ours is to the head."""

    ticket: str
    joined: Joined

    def member(self, slot: ReplicaId) -> ReplicaId:
        return ReplicaId(slot.stage, self.joined.index)


class Master:
    """The connection to the head; a `Users` of the keeper. Used by one thread at a time.

    Args:
        plan: as the head's, but for the number of replicas.
    """

    def __init__(self, plan: Plan, headless: Headless) -> None:
        host, port = headless.master
        self._plan = plan
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
        """Give up the connection; what was said last is still sent if the head is there."""
        self._context.destroy(linger=int(ASK_AGAIN_S * 1000))

    def stop(self) -> None:
        """Wait for the head no longer; may be called by any thread."""
        self._closing.set()

    def listen(self, slot: ReplicaId) -> Sequence[tuple[str, str]]:
        """Have the head take one replica in; where it connects to.

        Raises:
            Refused: the head does not want it.
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
        deadline = time.monotonic() + limit
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
        raise OmniError(f"no head answers at {self._where} (waited {limit:g} s, startup_timeout_s)")

    def ready(self, slot: ReplicaId, about: About) -> None:
        """Tell the head that a replica is ready."""
        self._started[slot] = Started(ticket=self.places[slot].ticket, pid=about.pid, restarts=about.restarts)
        self._say(self._started[slot])

    def ended(self, slot: ReplicaId, reason: str, *, again: bool) -> None:
        """Tell the head that a replica is gone."""
        place = self._take_back(slot)
        if place is not None:
            self._say(Gone(ticket=place.ticket, reason=reason[:200], again=again))

    def disowned(self) -> list[ReplicaId]:
        """Ask the head whether it still is who these replicas have joined; those that it does not have, who are no
        members from now on. What was said of the others may have been lost and is said again. Silence proves nothing.
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

    def _say(self, message: wire.Message) -> None:
        """Never waits: what is said to a head that is away is lost, and what matters is said again."""
        with contextlib.suppress(zmq.Again):
            self._socket.send(wire.encode(message), zmq.NOBLOCK)

    def _look_at_handshakes(self) -> None:
        """See whether whoever listens there speaks with us; Refused if not."""
        rejected = False
        while self._handshakes.poll(0):
            event = recv_monitor_message(self._handshakes)["event"]
            rejected |= bool(event & _REJECTED)
            self._broken_handshakes = self._broken_handshakes + 1 if event == _BROKEN else 0
        if rejected or self._broken_handshakes >= MOST_BROKEN_HANDSHAKES:
            self.refused = True
            raise Refused(f"what listens at {self._where} is no head, or one with another secret (cluster_secret_file)")

    def _hear(self, wait_s: float) -> Iterator[Any]:
        """Messages of the head, until the first one in which there was something and no other waits."""
        if self._socket.poll(int(wait_s * 1000)):
            while self._socket.poll(0):
                with contextlib.suppress(wire.Malformed):
                    yield FROM_HEAD.decode(self._socket.recv())

    def enrollment(self, slot: ReplicaId) -> Enrollment:
        """What the process of a replica is told about itself."""
        place = self.places[slot]
        joined = place.joined
        return Enrollment(
            stage=slot.stage,
            index=joined.index,
            instance=place.ticket,  # new for every process, and what this one says when it takes leave of it
            parent=os.getpid(),
            events=joined.events,
            model=self._model,
            config_hash=self._hash,
            version=__version__,
            host=self.host,
            secret_file=self._plan.config.cluster_secret_file,
        )


def run_headless(plan: Plan, headless: Headless, args: Namespace) -> int:
    """Join the head, stay until a signal or until no replica is left, take leave. Returns the exit status."""
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
        master = Master(plan, headless)
        deployment = Deployment(
            plan,
            clients=0,
            usage=UsageContext.OPENAI_API_SERVER,
            tell=tell,
            enroll=master.enrollment,
            host=master.host,
        )
        with deployment, Crew(deployment, master, leaving) as crew:
            leaving.wait()
            return crew.status
    except OmniError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED


def tell(line: str) -> None:
    """Say something to the person who started this."""
    print(line, flush=True)


class Crew:
    """The replicas of this process, from joining to leaving."""

    def __init__(self, deployment: Deployment, master: Master, leaving: threading.Event) -> None:
        self._deployment = deployment
        self._master = master
        self._leaving = leaving
        self.status = 0
        self._slots = [replica.id for replica in deployment.plan.replicas()]
        self._lost: set[ReplicaId] = set()
        self._supervisor: Supervisor[ReplicaId] = Supervisor({}, self._ended)
        self._keeper = Keeper(
            deployment,
            master,
            host=master.host,
            tell=tell,
            watch=self._supervisor.watch,
            given_up=self._given_up,
        )

    def __enter__(self) -> Crew:
        for slot in self._slots:
            self._keeper.start(slot)
        self._keeper.do(self._ping)
        return self

    def __exit__(self, *exc: object) -> None:
        self._master.stop()
        self._keeper.close()  # its thread stays: the replicas it has started end with it
        self._supervisor.stop()
        places = dict(self._master.places)
        if places and not self._lost.issuperset(self._slots):
            asyncio.run(take_leave(places, self._master.keys))
        self._deployment.end()
        self._keeper.join()
        self._master.close()

    def _ended(self, slot: ReplicaId, exitcode: int | None) -> None:
        self._keeper.ended(slot, exitcode)

    def _given_up(self, slot: ReplicaId) -> None:
        self._lost.add(slot)
        if self._lost.issuperset(self._slots):
            self.status = REFUSED if self._master.refused else FAILED
            self._leaving.set()

    def _ping(self) -> None:
        """See whether the head still has the replicas, or is another one; those that it has not begin again."""
        self._keeper.after(PING_S, self._ping)
        processes = self._deployment.processes()
        for slot in self._master.disowned():
            tell(f"the head does not have {slot} any more, or is another one: it joins anew")
            if slot in processes:
                processes[slot].kill()


async def take_leave(places: dict[ReplicaId, _Place], keys: Keys | None) -> None:
    """Ask the coordinator to send these replicas nothing more, and wait until they have finished what they have."""
    joined = next(iter(places.values())).joined
    ours = {place.member(slot): place.ticket for slot, place in places.items()}
    watcher = Watcher(joined.views, keys=keys)
    context: zmq.Context[Any] = zmq.Context()
    events = connect(context, zmq.DEALER, joined.events, keys, limit=wire.MAX_REPLY_BYTES)
    try:
        async with asyncio.timeout(joined.drain_s + LEAVING_TAKES_S):
            while True:
                async with asyncio.timeout(LEAVING_TAKES_S):
                    view, _ = await anext(watcher)
                here = [entry for entry in view.replicas if entry.member.id in ours]
                if not here and view.settled:  # a coordinator that is new may not have heard of them yet
                    return
                for entry in here:
                    if entry.state is not State.DRAINING:
                        proof = ours[entry.member.id]
                        leave = wire.Leave(member=translate.bearer(entry.member), drain=True, proof=proof)
                        with contextlib.suppress(zmq.Again):
                            events.send(wire.encode(leave), zmq.NOBLOCK)
    except TimeoutError:
        tell("leaving without the coordinator's consent: it does not answer, or requests take too long")
    finally:
        watcher.close()
        context.destroy(linger=0)
