"""Progress reports of a starting replica's process to its parent: datagrams on a unix socket."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Literal

import msgspec

VARIABLE = "OMNI_LOADING"
"""The environment variable with the socket's path and the replica's name, separated by a blank."""

SEND_WITHIN_S = 0.2
"""How long sending a report may wait: the system queues few datagrams."""

Phase = Literal["downloading", "loading", "warming up"]
"""Fetching the checkpoint; reading its weights; everything from then until the replica is ready."""


class Loading(msgspec.Struct, frozen=True, kw_only=True):
    """One progress report.

    Attributes:
        replica: the replica's name, such as `talker/0`.
        loaded, total: bytes of weights; `total` is 0 if unknown.
        folder: the folder to which the checkpoint is downloaded.
    """

    replica: str
    phase: Phase
    loaded: int = 0
    total: int = 0
    folder: str = ""


def variable(path: str, replica: str) -> dict[str, str]:
    """Return the environment variable for a replica's process."""
    return {VARIABLE: f"{path} {replica}"}


def decode(data: bytes) -> Loading:
    """Read one datagram; msgspec.MsgspecError for anything else."""
    return msgspec.msgpack.decode(data, type=Loading)


class ProgressSender:
    """Sends the progress of this process's replica. Errors are ignored: the receiver may have ended."""

    def __init__(self, path: str, replica: str) -> None:
        self._path, self._replica = path, replica
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(SEND_WITHIN_S)

    @classmethod
    def of_this_process(cls) -> ProgressSender | None:
        """Return the sender as configured in the environment; None without the variable."""
        path, _, replica = os.environ.get(VARIABLE, "").rpartition(" ")
        return cls(path, replica) if path else None

    def send(self, phase: Phase, *, loaded: int = 0, total: int = 0, folder: str = "") -> None:
        """Send one report; it is dropped if the receiver does not read it within `SEND_WITHIN_S`."""
        report = Loading(replica=self._replica, phase=phase, loaded=loaded, total=total, folder=folder)
        with contextlib.suppress(OSError):
            self._socket.sendto(msgspec.msgpack.encode(report), self._path)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
