"""Lets replicas of other processes and hosts join at the head's registration port.

The head is the first process of `vllm serve MODEL --omni`; a headless node is a process whose replicas join a head. A
ticket (a random text in the replica's `Join`) identifies the replica, because its connection may change. The join
server checks the replica, assigns it a name, opens the API servers' listeners for it, and replies with the values with
which the replica starts. After that, the coordinator tracks the replica by its heartbeats. Messages are versioned,
tagged msgpack; no pickle.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from msgspec import Struct

from vllm_omni_ext import __version__
from vllm_omni_ext.coordinator.keys import ZAP_ADDRESS, Keys, listen, zap_reply
from vllm_omni_ext.coordinator.members import Member
from vllm_omni_ext.encoding import MAX_MESSAGE_BYTES, Channel, Count, Malformed, Message, Name, Seconds, Text, encode
from vllm_omni_ext.runtime.client.replica_connections import ReplicaInfo
from vllm_omni_ext.runtime.launch.addresses import endpoint
from vllm_omni_ext.runtime.supervise.api_servers import ApiServers
from vllm_omni_ext.runtime.supervise.coordination import Coordination
from vllm_omni_ext.runtime.supervise.process_watcher import ReplicaSupervisor
from vllm_omni_ext.topology.agreement import config_hash, models_of
from vllm_omni_ext.topology.plan import Plan

MAX_ANSWER_BYTES = 256 * 1024
"""Longest reply of the head in bytes; it contains the addresses of every API server."""


class Join(Message, frozen=True, kw_only=True, tag="join"):
    """Headless node to head: request to add one replica to the deployment.

    The head rejects it if `stage`, `model`, `config_hash` or `version` differ from the head's own (`Expected`).

    Attributes:
        model: identity of the model, see `topology.agreement.model_identity`.
        config_hash: hash of all settings that a stage's replicas share.
        version: version of this package.
        ticket: unique text of this attempt; a repeated `Join` with the same ticket gets the same reply.
        host: the address of the replica's host from which it reaches the head.
        index: the index that the head assigned to the replica last, if any.
    """

    stage: Name
    model: Text
    config_hash: Text
    version: Text
    ticket: Name
    host: Text
    index: Count | None = None


class Present(Message, frozen=True, tag="present"):
    """Headless node to head, sent regularly: the replica with this ticket runs.

    A head that does not have the ticket replies with `Refusal`. `pid` is 0 until the replica is ready.
    """

    ticket: Name
    pid: Count = 0
    restarts: Count = 0


class Gone(Message, frozen=True, tag="gone"):
    """Headless node to head: the replica with this ticket has ended.

    Attributes:
        again: the replica will be restarted, and join with another ticket.
        log: path of the replica's log file on its host; empty without a log file.
    """

    ticket: Name
    reason: str
    again: bool
    log: Text = ""


class Endpoints(Struct, frozen=True):
    """The addresses of one API server to which a replica connects: for requests (`input`) and outputs."""

    input: str
    output: str


class Joined(Message, frozen=True, tag="joined"):
    """Head to headless node: a replica may join, and starts with these values.

    Attributes:
        member: the replica's name and epoch.
        proof: proof for the coordinator that the head has assigned both (`Member.proof`).
        servers: the addresses of each API server, in order of the servers' index.
        events: the coordinator's address for heartbeats.
        views: the coordinator's address from which subscribers receive the states of all replicas.
        interval_s: time between two heartbeats, in seconds.
        drain_s: time that a leaving replica has to finish its requests, in seconds.
    """

    ticket: Name
    member: Member
    proof: Text
    servers: tuple[Endpoints, ...]
    events: str
    views: str
    interval_s: Seconds
    drain_s: Seconds


class Refusal(Message, frozen=True, tag="refused"):
    """Head to headless node: a replica may not join, or was removed from the deployment. `reason` is an error text."""

    ticket: str
    reason: str


ToHead = Join | Present | Gone
FromHead = Joined | Refusal

TO_HEAD: Channel[ToHead] = Channel(msgspec.msgpack.Decoder(ToHead), MAX_MESSAGE_BYTES)
FROM_HEAD: Channel[FromHead] = Channel(msgspec.msgpack.Decoder(FromHead), MAX_ANSWER_BYTES)


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The values of the head that a `Join` must equal.

    Attributes:
        models: identity of the model by stage name (`topology.agreement.models_of`).
        version: version of this package.
        stages: `config_hash` by stage name.
    """

    models: Mapping[str, str]
    version: str
    stages: Mapping[str, str]

    @classmethod
    def of(cls, plan: Plan) -> Expected:
        """Return the values of a plan that a joining replica must have too."""
        stages = {stage.name: config_hash(plan, stage.name) for stage in plan.stages}
        return cls(models=models_of(plan), version=__version__, stages=stages)

    def objection(self, replica: Join) -> str:
        """Return the reason to refuse a replica (another model, version, ...); "" if the replica may join."""
        if replica.stage not in self.stages:
            return f"there is no stage '{replica.stage}'; there are {', '.join(sorted(self.stages)) or 'none'}"
        compared = (
            ("model", replica.model, self.models[replica.stage]),
            ("package version", replica.version, self.version),
            (f"configuration hash of stage '{replica.stage}'", replica.config_hash, self.stages[replica.stage]),
        )
        return "; ".join(f"{field} is '{its}' there and '{ours}' here" for field, its, ours in compared if its != ours)


QUEUED_ANSWERS = 64
"""Most replies that are queued for a process that does not receive them."""

MAX_FRAME_BYTES = 16 * MAX_MESSAGE_BYTES
"""libzmq disconnects a peer that sends a longer frame, before the frame is in memory."""

WITHHELD = "it does not belong to this deployment; the reason is in the head's log"
"""Error text that is sent instead of the reason if the head has no secret: the reason would help an attacker."""

REPORT_S = 60.0
"""Seconds after which the reason for the end of a replica that has left is not reported any more.

A replica whose engine fails with an exception leaves before its process ends."""

LOG_EVERY_S = 1.0
"""Seconds in which at most one refusal is logged, so that a flood of messages does not fill the disk."""

log = logging.getLogger(__name__)


@dataclass
class _Entry:
    """One replica that has joined.

    Attributes:
        answer: the reply to the replica's `Join`, which is sent again for a repeated `Join`.
        ready: the replica has reported that it is ready.
        present: a `Present` has arrived since the join, or since the last check of it.
    """

    member: Member
    host: str
    answer: Joined
    ready: bool = False
    present: bool = False


class Refusals:
    """Logs refused replicas, and chooses the error text for each.

    Args:
        with_reason: the text is the reason; otherwise `WITHHELD`.
    """

    def __init__(self, *, with_reason: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._with_reason = with_reason
        self._clock = clock
        self._logged = -math.inf
        self._unlogged = 0

    def words(self, subject: str, reason: str) -> str:
        """Log that `subject` was refused, and return the text for the reply."""
        now = self._clock()
        if now < self._logged + LOG_EVERY_S:
            self._unlogged += 1
        else:
            more = f" (and {self._unlogged} other refusals)" if self._unlogged else ""
            log.warning("refused %.200s: %.1000s%s", subject, reason, more)
            self._logged, self._unlogged = now, 0
        return reason if self._with_reason else WITHHELD


class JoinServer:
    """Receives the messages of headless nodes, whose replicas join this head, and replies.

    Runs in the thread of the replica supervisor until `close`.

    Args:
        expected: the values that joining replicas must have.
        tell: receives a line for the operator for every replica that joins, leaves or ends.
    """

    def __init__(
        self,
        plan: Plan,
        expected: Expected,
        coordination: Coordination,
        replica_supervisor: ReplicaSupervisor,
        servers: ApiServers,
        *,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        cluster = plan.config.cluster
        assert cluster.master_address is not None and cluster.master_port is not None
        self._plan = plan
        self._host = cluster.master_address
        self._coordination = coordination
        self._replica_supervisor = replica_supervisor
        self._servers = servers
        self._tell = tell
        self._expected = expected
        self._planned = {replica.id for replica in plan.replicas()}
        self._entries: dict[str, _Entry] = {}
        self._left: dict[str, _Entry] = {}
        """Replicas that have left within `REPORT_S`, by ticket."""
        self.dropped = 0
        self._keys = Keys.read(cluster.cluster_secret_file)
        self._refusals = Refusals(with_reason=self._keys is not None)
        self._context = zmq.asyncio.Context()
        bind: Callable[..., Any] = partial(listen, self._context, limit=MAX_FRAME_BYTES, queued=QUEUED_ANSWERS)
        try:
            self._zap = bind(zmq.REP, ZAP_ADDRESS, None)
            self._socket = bind(zmq.ROUTER, endpoint(cluster.master_address, cluster.master_port), self._keys)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._tasks = [replica_supervisor.spawn(work()) for work in (self._serve_handshakes, self._serve)]

    def close(self) -> None:
        """Close the sockets once the current message is processed. The replica supervisor's thread must still run."""
        for task in self._tasks:
            task.cancel()
        closed = threading.Event()
        self._replica_supervisor.do(partial(self._context.destroy, linger=0))
        self._replica_supervisor.do(closed.set)
        closed.wait()

    def forgotten(self, member: Member, *, silent: bool) -> None:
        """Remove a replica that the coordinator has removed. Called in the replica supervisor's thread.

        Args:
            silent: the replica was removed because of missing heartbeats.
        """
        for ticket, entry in tuple(self._entries.items()):
            if entry.member == member:
                del self._entries[ticket]
                self._coordination.leave(member.id)  # its process may still run: its heartbeats are ignored from now on
                if silent:
                    self._tell(f"error: replica {member.id} of {entry.host} is gone: no heartbeat came for too long")
                else:
                    self._tell(f"replica {member.id} of {entry.host} has left")
                    self._left[ticket] = entry
                    self._replica_supervisor.after(REPORT_S, partial(self._left.pop, ticket, None))
        if member.id not in self._planned and all(entry.member.id != member.id for entry in self._entries.values()):
            self._servers.forgotten(member.id)

    async def _serve_handshakes(self) -> None:
        while True:
            await self._zap.send_multipart(zap_reply(await self._zap.recv_multipart(), self._keys))

    async def _serve(self) -> None:
        while True:
            sender, *frames = await self._socket.recv_multipart()
            if (answer := self._answer(frames)) is not None:
                await self._socket.send_multipart([sender, encode(answer)], zmq.NOBLOCK)
            await asyncio.sleep(0)  # lets the supervisor's other tasks run, also in a flood of messages

    def _answer(self, frames: list[bytes]) -> Message | None:
        try:
            if len(frames) != 1:
                raise Malformed(f"{len(frames)} frames")
            message = TO_HEAD.decode(frames[0])
        except Malformed as error:
            self.dropped += 1
            if self.dropped & (self.dropped - 1) == 0:  # at powers of two: a flood must not fill the disk
                log.warning("dropped %d malformed registrations; the last: %.200s", self.dropped, error)
            return None if error.protocol is None else Refusal(ticket="", reason=str(error))
        try:
            return self._decide(message)
        except Exception:  # a bug here must not end the join server
            log.exception("no decision about a %s message", type(message).__name__)
            return None

    def _decide(self, message: ToHead) -> Message | None:
        match message:
            case Join():
                return self._join(message)
            case Present(ticket=ticket) if ticket not in self._entries:
                return Refusal(ticket=ticket, reason="this replica has not joined, or was given up")
            case Present(ticket=ticket):
                self._entries[ticket].present = True
                if message.pid and not self._entries[ticket].ready:
                    self._ready(self._entries[ticket], message)
            case Gone(ticket=ticket) if ticket in self._entries:
                self._end(ticket, message.reason, again=message.again, log_file=message.log)
            case Gone(ticket=ticket) if ticket in self._left:
                self._tell_end(self._left.pop(ticket), message.reason, again=message.again, log_file=message.log)
        return None

    def _ready(self, entry: _Entry, message: Present) -> None:
        entry.ready = True
        replica, about = entry.member.id, ReplicaInfo(host=entry.host, pid=message.pid, restarts=message.restarts)
        self._servers.ready(replica, about)
        verb = "is up again" if message.restarts else "has joined"
        self._tell(f"replica {replica} of {entry.host} {verb} (process {message.pid})")

    def _end(self, ticket: str, reason: str, *, again: bool, log_file: str = "") -> None:
        entry = self._entries.pop(ticket)
        replica = entry.member.id
        self._servers.ended(replica, reason, again=False)  # its node may leave instead; a next process joins itself
        self._tell_end(entry, reason, again=again, log_file=log_file)
        self._coordination.leave(replica)

    def _tell_end(self, entry: _Entry, reason: str, *, again: bool, log_file: str) -> None:
        then = f"it is {'' if again else 'not '}started again there"
        log_text = f"; its log there: {log_file}" if log_file else ""
        self._tell(f"error: replica {entry.member.id} of {entry.host} is gone: {reason}; {then}{log_text}")

    def _join(self, message: Join) -> Joined | Refusal:
        if message.ticket in self._entries:
            return self._entries[message.ticket].answer
        objection = self._expected.objection(message)
        if objection:
            words = self._refusals.words(f"a replica of '{message.stage}' on {message.host}", objection)
            return Refusal(ticket=message.ticket, reason=words)
        names = self._coordination.names
        member = names.give_free(message.stage, message.index)
        if member is None:
            return Refusal(ticket=message.ticket, reason=f"stage '{message.stage}' is full")
        try:
            addresses = self._servers.listen(member.id, self._host)
        except OSError as error:
            names.free(member)
            self._servers.ended(member.id, str(error), again=False)
            return Refusal(ticket=message.ticket, reason=f"the head cannot listen at {self._host}: {error}")
        answer = Joined(
            ticket=message.ticket,
            member=member,
            proof=names.proof(member),
            servers=tuple(Endpoints(*pair) for pair in addresses),
            events=self._coordination.events,
            views=self._coordination.views,
            interval_s=self._coordination.timing.interval_s,
            drain_s=self._coordination.timing.drain_s,
        )
        self._entries[message.ticket] = _Entry(member, message.host, answer)
        self._expire_later(message.ticket)
        return answer

    def _expire_later(self, ticket: str) -> None:
        self._replica_supervisor.after(self._plan.config.timeouts.startup_timeout_s, partial(self._expire, ticket))

    def _expire(self, ticket: str) -> None:
        """Remove a starting replica if its host sends no `Present`. The host that sends it limits the start itself."""
        entry = self._entries.get(ticket)
        if entry is None or entry.ready:
            return
        if entry.present:
            entry.present = False
            self._expire_later(ticket)
        else:
            self._end(ticket, "its host has sent nothing while it starts (timeouts.startup_timeout_s)", again=False)
