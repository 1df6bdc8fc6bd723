"""Replicas of other hosts join here: the head's registration port.

A ticket identifies a replica, because its connection may break and be made again. The join server gives the replica a
name, makes the API servers listen for it, and answers with the addresses it must connect to. After that, the
coordinator tracks the replica by its heartbeats.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import zmq

from vllm_omni_ext.coordinator.keys import ZAP_ADDRESS, Keys, answer_handshake
from vllm_omni_ext.coordinator.membership import MAX_REPLICAS
from vllm_omni_ext.coordinator.refusals import Refusals
from vllm_omni_ext.coordinator.sockets import Socket, listen
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.runtime.client.replica_connections import ReplicaInfo
from vllm_omni_ext.runtime.launch.addresses import endpoint
from vllm_omni_ext.runtime.supervise.coordination import Coordination
from vllm_omni_ext.runtime.supervise.replica_supervisor import Addresses, ReplicaSupervisor
from vllm_omni_ext.topology.plan import Plan
from vllm_omni_ext.wire.coordination import MAX_MESSAGE_BYTES, Malformed, Message, encode
from vllm_omni_ext.wire.joining import TO_HEAD, Endpoints, Gone, Join, Joined, Ping, Pong, Refusal, Started, ToHead

QUEUED_ANSWERS = 64
"""Answers queued for a process that does not read."""

UNDECIDED = 1024
"""Messages queued for a decision. Further ones are dropped; their senders repeat them."""

NEVER_READ = 16 * MAX_MESSAGE_BYTES
"""libzmq disconnects a peer that sends more than this in one frame, before the frame is in memory."""

log = logging.getLogger(__name__)


class ReplicaListener(Protocol):
    """The API servers."""

    def listen(self, replica: ReplicaId, host: str | None = None) -> Addresses:
        """Make all API servers listen for a replica."""

    def ready(self, replica: ReplicaId, about: ReplicaInfo) -> None:
        """The replica can be used."""

    def ended(self, replica: ReplicaId, reason: str, *, again: bool) -> None:
        """The replica is gone."""


@dataclass
class _Entry:
    """One replica that has joined. `ready`: it has reported that it is ready."""

    replica: ReplicaId
    host: str
    answer: Joined
    ready: bool = False


class JoinServer:
    """Owns the socket in its own thread; all decisions are made in the replica supervisor's thread.

    Args:
        tell: receives a line for the operator for every replica that joins, leaves or ends.
    """

    def __init__(
        self,
        plan: Plan,
        coordination: Coordination,
        replica_supervisor: ReplicaSupervisor,
        users: ReplicaListener,
        *,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        config = plan.config
        assert config.master_address is not None and config.master_port is not None
        self._plan = plan
        self._host = config.master_address
        self._coordination = coordination
        self._replica_supervisor = replica_supervisor
        self._users = users
        self._tell = tell
        self._deployment = uuid.uuid4().hex
        self._entries: dict[str, _Entry] = {}
        self.dropped = 0
        self._keys = Keys.read(config.cluster_secret_file)
        self._refusals = Refusals(log, with_reason=self._keys is not None)
        self._context: zmq.Context[Any] = zmq.Context()
        try:
            self._zap = listen(self._context, zmq.REP, ZAP_ADDRESS, None, limit=NEVER_READ, queued=QUEUED_ANSWERS)
            self._socket: Socket = listen(
                self._context,
                zmq.ROUTER,
                endpoint(config.master_address, config.master_port),
                self._keys,
                limit=NEVER_READ,
                queued=QUEUED_ANSWERS,
            )
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._answers: queue.SimpleQueue[tuple[bytes, Message] | None] = queue.SimpleQueue()
        self._undecided: queue.SimpleQueue[tuple[bytes, ToHead]] = queue.SimpleQueue()
        self._wake, self._waker = os.pipe()
        self._waking = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="omni-join-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the socket; later decisions of the replica supervisor are not sent."""
        self._put(None)
        self._thread.join()
        with self._waking:
            self._closed = True
            os.close(self._wake)
            os.close(self._waker)

    def forgotten(self, replica: ReplicaId, *, silent: bool = False) -> None:
        """Remove the entry of a replica whose name the coordinator has freed; `silent`: after missing heartbeats.
        Called in the replica supervisor's thread.

        An entry that is not ready is kept: it belongs to a newer replica that was given the same name.
        """
        gone = [ticket for ticket, entry in self._entries.items() if entry.replica == replica and entry.ready]
        for ticket in gone:
            host = self._entries.pop(ticket).host
            if silent:
                self._tell(f"error: replica {replica} of {host} is gone: nothing was heard of it for too long")
            else:
                self._tell(f"replica {replica} of {host} has left")

    # -- the socket's thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._zap, self._socket, self._wake):
            poller.register(source, select.POLLIN if source is self._wake else zmq.POLLIN)
        try:
            while True:
                ready = {source for source, _ in poller.poll()}
                if self._zap in ready:
                    answer_handshake(self._zap, self._keys)
                if self._socket in ready:
                    sender, *frames = self._socket.recv_multipart()
                    self._take(sender, frames)
                if self._wake in ready:
                    os.read(self._wake, 1)
                    answer = self._answers.get()
                    if answer is None:
                        return
                    self._socket.send_multipart([answer[0], encode(answer[1])], zmq.NOBLOCK)
        finally:
            self._context.destroy(linger=0)

    def _take(self, sender: bytes, frames: list[bytes]) -> None:
        try:
            if len(frames) != 1:
                raise Malformed(f"{len(frames)} frames")
            message = TO_HEAD.decode(frames[0])
        except Malformed as error:
            self.dropped += 1
            if self.dropped & (self.dropped - 1) == 0:  # at powers of two: a flood must not fill the disk
                log.warning("dropped %d malformed registrations; the last: %.200s", self.dropped, error)
            if error.protocol is not None:
                refusal = encode(Refusal(ticket="", reason=str(error)))
                self._socket.send_multipart([sender, refusal], zmq.NOBLOCK)
            return
        if isinstance(message, Ping):
            self._socket.send_multipart([sender, encode(Pong(deployment=self._deployment))], zmq.NOBLOCK)
        else:
            self._ask(sender, message)

    def _ask(self, sender: bytes, message: ToHead) -> None:
        if self._undecided.qsize() < UNDECIDED:
            self._undecided.put((sender, message))
            self._replica_supervisor.do(self._decide_next)

    def _answer(self, sender: bytes, message: Message) -> None:
        self._put((sender, message))

    def _put(self, answer: tuple[bytes, Message] | None) -> None:
        with self._waking:
            if not self._closed:
                self._answers.put(answer)
                os.write(self._waker, b".")

    # -- the replica supervisor's thread -------------------------------------------------------------------------

    def _decide_next(self) -> None:
        sender, message = self._undecided.get()
        match message:
            case Join():
                self._answer(sender, self._join(message))
            case Started(ticket=ticket):
                entry = self._entries.get(ticket)
                if entry is None:
                    self._answer(sender, Refusal(ticket=ticket, reason="this replica has not joined, or was given up"))
                elif not entry.ready:
                    entry.ready = True
                    about = ReplicaInfo(host=entry.host, pid=message.pid, restarts=message.restarts)
                    self._users.ready(entry.replica, about)
                    how = "is up again" if message.restarts else "has joined"
                    self._tell(f"replica {entry.replica} of {entry.host} {how} (process {message.pid})")
            case Gone(ticket=ticket) if ticket in self._entries:
                self._end(ticket, message.reason, again=message.again, log_file=message.log)

    def _end(self, ticket: str, reason: str, *, again: bool, log_file: str = "") -> None:
        entry = self._entries.pop(ticket)
        self._users.ended(entry.replica, reason, again=again)
        then = f"it is {'' if again else 'not '}started again there" + (
            f"; its log there: {log_file}" if log_file else ""
        )
        self._tell(f"error: replica {entry.replica} of {entry.host} is gone: {reason}; {then}")
        self._coordination.leave(entry.replica)

    def _join(self, message: Join) -> Joined | Refusal:
        if message.ticket in self._entries:
            return self._entries[message.ticket].answer
        objection = self._coordination.expected.objection(message)
        if objection:
            words = self._refusals.words(f"a replica of '{message.stage}' on {message.host}", objection)
            return Refusal(ticket=message.ticket, reason=words)
        replica = self._name(message)
        if replica is None:
            return Refusal(ticket=message.ticket, reason=f"stage '{message.stage}' is full")
        self._coordination.leave(replica)  # a replica without entry here that still has the name is being ended
        try:
            addresses = self._users.listen(replica, self._host)
        except OSError as error:
            self._users.ended(replica, str(error), again=False)
            return Refusal(ticket=message.ticket, reason=f"the head cannot listen at {self._host}: {error}")
        answer = Joined(
            ticket=message.ticket,
            deployment=self._deployment,
            index=replica.index,
            servers=tuple(Endpoints(*pair) for pair in addresses),
            events=self._coordination.events,
            views=self._coordination.views,
            drain_s=self._plan.config.drain_timeout_s,
        )
        self._entries[message.ticket] = _Entry(replica, message.host, answer)
        self._replica_supervisor.after(self._plan.config.startup_timeout_s, lambda: self._expire(message.ticket))
        return answer

    def _name(self, message: Join) -> ReplicaId | None:
        taken = {entry.replica for entry in self._entries.values()}
        taken |= {replica.id for replica in self._plan.stage(message.stage).replicas}
        wishes = () if message.index is None else (message.index,)
        names = (ReplicaId(message.stage, index) for index in (*wishes, *range(MAX_REPLICAS)))
        return next((name for name in names if name not in taken and name.index < MAX_REPLICAS), None)

    def _expire(self, ticket: str) -> None:
        entry = self._entries.get(ticket)
        if entry is not None and not entry.ready:
            self._end(ticket, "it has not become ready in time (startup_timeout_s)", again=False)
