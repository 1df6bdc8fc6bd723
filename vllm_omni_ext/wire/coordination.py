"""Messages between coordinator, replicas and API servers. msgpack, tagged, versioned; never pickle.

What is between versions: a field may be added if it has a default, and readers ignore fields they do not know, so both
sides of such a change understand each other. Every other change needs another `PROTOCOL`, and a message of another
protocol is refused with a text that names both.
"""

from __future__ import annotations

from typing import Annotated, Generic, TypeVar

import msgspec
from msgspec import Meta, Struct

from vllm_omni_ext.errors import OmniError

PROTOCOL = 1

MAX_MESSAGE_BYTES = 4096
"""Of a message from a replica."""

MAX_REPLY_BYTES = 16 * 1024
"""Of an answer to it, which may quote what it and the coordinator said."""

MAX_VIEW_BYTES = 16 * 1024 * 1024
"""Of a view: a few hundred bytes for each replica."""

Text = Annotated[str, Meta(max_length=512)]
Name = Annotated[str, Meta(min_length=1, max_length=128)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Epoch = Annotated[int, Meta(ge=0, le=2**62)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]


class Malformed(OmniError):
    """Bytes that are no message of this kind.

    Attributes:
        protocol: the sender's, if it is that which differs.
    """

    def __init__(self, message: str, *, protocol: int | None = None) -> None:
        super().__init__(message)
        self.protocol = protocol


class _Versioned(Struct, frozen=True, kw_only=True):
    protocol: int = 0


class Message(Struct, frozen=True, kw_only=True):
    """What all messages have."""

    protocol: int = PROTOCOL


class Bearer(Struct, frozen=True):
    """A replica's name and epoch."""

    stage: Name
    index: Count
    epoch: Epoch


class Load(Struct, frozen=True):
    """How busy a replica is; `report` is the coordinator's number for it, 0 on the way there."""

    waiting: Count
    running: Count
    kv_usage: Share
    report: Count = 0


class Register(Message, frozen=True, tag="register"):
    """Replica to coordinator: it wants to join; `index` and `epoch` are what it was or would like to be."""

    instance: Name
    stage: Name
    model: Text
    config_hash: Text
    version: Text
    address: Text = ""
    index: Count | None = None
    epoch: Epoch | None = None


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    """Replica to coordinator: it lives. `proof`: its instance."""

    member: Bearer
    load: Load
    proof: Text = ""


class Leave(Message, frozen=True, tag="leave"):
    """Replica to coordinator: it ends, after its requests (`drain`) or now. `proof`: its instance, or the warrant."""

    member: Bearer
    drain: bool
    proof: Text = ""


class Admitted(Message, frozen=True, tag="admitted"):
    """Coordinator to replica: who it is and how often it shall send heartbeats."""

    member: Bearer
    interval_s: Seconds


class Refused(Message, frozen=True, tag="refused"):
    """Coordinator to replica: why it may not join."""

    reason: str


class NotYet(Message, frozen=True, tag="not_yet"):
    """Coordinator to replica: ask again a little later."""


class RegisterAgain(Message, frozen=True, tag="register_again"):
    """Coordinator to replica: this member is unknown."""

    member: Bearer


class Released(Message, frozen=True, tag="released"):
    """Coordinator to replica: nothing more is expected of this member."""

    member: Bearer


class Standing(Struct, frozen=True):
    """One replica in a view; `state` is a value of `coordinator.members.State`."""

    member: Bearer
    state: Name
    load: Load | None = None
    address: Text = ""


class Published(Message, frozen=True, tag="view"):
    """Coordinator to API servers: all replicas."""

    generation: Epoch
    settled: bool
    timeout_s: Seconds
    replicas: tuple[Standing, ...]
    dropped: Count = 0


ToCoordinator = Register | Heartbeat | Leave
ToReplica = Admitted | Refused | NotYet | RegisterAgain | Released

Kind = TypeVar("Kind")


class Channel(Generic[Kind]):
    """Messages of one direction.

    Args:
        limit: longest message, in bytes.
    """

    def __init__(self, decoder: msgspec.msgpack.Decoder[Kind], limit: int) -> None:
        self._decoder = decoder
        self.limit = limit

    def decode(self, data: bytes) -> Kind:
        """Read one message; `Malformed` for anything else."""
        if len(data) > self.limit:
            raise Malformed(f"a message of {len(data)} bytes; the longest allowed has {self.limit}")
        try:
            protocol = _versions.decode(data).protocol
            if protocol != PROTOCOL:
                raise Malformed(f"protocol {protocol} there and {PROTOCOL} here", protocol=protocol)
            return self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Malformed(str(error)) from error


_versions = msgspec.msgpack.Decoder(_Versioned)
_encoder = msgspec.msgpack.Encoder()

TO_COORDINATOR: Channel[ToCoordinator] = Channel(msgspec.msgpack.Decoder(ToCoordinator), MAX_MESSAGE_BYTES)
TO_REPLICA: Channel[ToReplica] = Channel(msgspec.msgpack.Decoder(ToReplica), MAX_REPLY_BYTES)
VIEWS: Channel[Published] = Channel(msgspec.msgpack.Decoder(Published), MAX_VIEW_BYTES)


def encode(message: Message) -> bytes:
    """One message as bytes."""
    return _encoder.encode(message)
