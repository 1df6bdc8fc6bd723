"""How far a replica's start is, as its process tells the one that has started it: datagrams on a unix socket."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Literal

import msgspec

VARIABLE = "OMNI_LOADING"
"""The environment variable with the socket's path and the replica's name, in this order, with a blank between."""

PATIENCE_S = 0.2
"""How long a report waits for room: the system queues few datagrams."""

Phase = Literal["downloading", "loading", "warming up"]
"""Fetching the checkpoint; reading its weights; everything between the weights and being ready."""


class Loading(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica says of itself.

    Attributes:
        replica: its name, such as `talker/0`.
        loaded, total: bytes of weights; `total` 0: not known.
        folder: where the checkpoint comes to while it is downloaded.
    """

    replica: str
    phase: Phase
    loaded: int = 0
    total: int = 0
    folder: str = ""


def variable(path: str, replica: str) -> dict[str, str]:
    """As an environment variable."""
    return {VARIABLE: f"{path} {replica}"}


def decode(data: bytes) -> Loading:
    """Read one datagram; msgspec.MsgspecError for anything else."""
    return msgspec.msgpack.decode(data, type=Loading)


class Teller:
    """Says how far this process's replica is. Never fails: nobody may be there any more."""

    def __init__(self, path: str, replica: str) -> None:
        self._path, self._replica = path, replica
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(PATIENCE_S)

    @classmethod
    def of_this_process(cls) -> Teller | None:
        """As the environment says; None if nobody wants to know."""
        path, _, replica = os.environ.get(VARIABLE, "").rpartition(" ")
        return cls(path, replica) if path else None

    def say(self, phase: Phase, *, loaded: int = 0, total: int = 0, folder: str = "") -> None:
        """Send one report; it is dropped if nobody takes it in time."""
        report = Loading(replica=self._replica, phase=phase, loaded=loaded, total=total, folder=folder)
        with contextlib.suppress(OSError):
            self._socket.sendto(msgspec.msgpack.encode(report), self._path)

    def close(self) -> None:
        """Say no more."""
        self._socket.close()
