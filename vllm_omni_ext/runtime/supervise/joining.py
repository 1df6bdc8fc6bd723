"""Messages between the head and headless nodes, whose replicas join the head. Tagged msgpack, versioned; no pickle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from msgspec import Struct

from vllm_omni_ext.coordinator.members import Member
from vllm_omni_ext.encoding import MAX_MESSAGE_BYTES, Channel, Count, Message, Name, Seconds, Text
from vllm_omni_ext.topology.agreement import config_hash, model_identity
from vllm_omni_ext.topology.plan import Plan

MAX_ANSWER_BYTES = 256 * 1024
"""Longest reply; it contains the addresses of every API server."""


class Join(Message, frozen=True, kw_only=True, tag="join"):
    """Request of one replica to join. `Expected` compares the first four fields with those of the head.

    Attributes:
        config_hash: covers all settings that a stage's replicas share.
        ticket: unique text of this attempt; a repeated request with the same ticket gets the same reply.
        host: the address of the replica's host from which it reaches the head.
        index: the index that the replica had before, if any.
    """

    stage: Name
    model: Text
    config_hash: Text
    version: Text
    ticket: Name
    host: Text
    index: Count | None = None


class Present(Message, frozen=True, tag="present"):
    """The replica that joined with this ticket has not ended. Sent repeatedly; a head without this ticket refuses it.

    `pid` is 0 until the replica is ready.
    """

    ticket: Name
    pid: Count = 0
    restarts: Count = 0


class Gone(Message, frozen=True, tag="gone"):
    """The replica that joined with this ticket has ended; `again` if it will be restarted.

    `log` is the path of its log file on its host; empty if it has none.
    """

    ticket: Name
    reason: str
    again: bool
    log: Text = ""


class Endpoints(Struct, frozen=True):
    """Addresses of one API server to which a replica connects."""

    input: str
    output: str


class Joined(Message, frozen=True, tag="joined"):
    """The values with which a joining replica starts.

    Attributes:
        member: the replica's name and epoch; `proof` is the head's proof of both for the coordinator.
        servers: the addresses of each API server, in order of their index.
        events: the coordinator's address for replicas.
        views: the coordinator's address for subscribers.
        interval_s: time between two heartbeats.
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
    """Why the replica may not join, or is no longer a member."""

    ticket: str
    reason: str


ToHead = Join | Present | Gone
FromHead = Joined | Refusal

TO_HEAD: Channel[ToHead] = Channel(msgspec.msgpack.Decoder(ToHead), MAX_MESSAGE_BYTES)
FROM_HEAD: Channel[FromHead] = Channel(msgspec.msgpack.Decoder(FromHead), MAX_ANSWER_BYTES)


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Values that every replica must have. `stages`: config hash by stage name."""

    model: str
    version: str
    stages: Mapping[str, str]

    @classmethod
    def of(cls, plan: Plan) -> Expected:
        """The values of a plan."""
        from vllm_omni_ext import __version__

        stages = {stage.name: config_hash(plan, stage.name) for stage in plan.stages}
        return cls(model=model_identity(plan.model), version=__version__, stages=stages)

    def objection(self, replica: Join) -> str:
        """The reason to refuse a replica; empty if it may join."""
        if replica.stage not in self.stages:
            return f"there is no stage '{replica.stage}'; there are {', '.join(sorted(self.stages)) or 'none'}"
        compared = (
            ("model", replica.model, self.model),
            ("package version", replica.version, self.version),
            (f"configuration hash of stage '{replica.stage}'", replica.config_hash, self.stages[replica.stage]),
        )
        return "; ".join(f"{field} is '{its}' there and '{ours}' here" for field, its, ours in compared if its != ours)
