"""A process that reaches the ports of a deployment and has everything but its secret."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pwd
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from vllm_omni_ext.coordinator.members import Leave, Member
from vllm_omni_ext.encoding import encode

ENGINE = (0).to_bytes(2, "little")
"""Identity of vLLM's engines."""

NOBODY = "nobody"
PATIENCE_S = 60.0


def as_nobody(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a process of the user `nobody`; of this user where that is not allowed.

    The process is forked after the imports, since that user may not be able to read this Python, and from a process
    with one thread: a fork of this one could wait for a lock that another of its threads has.
    """
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    try:
        assert ours.poll(PATIENCE_S), "the process sends nothing"
        return ours.recv()
    finally:
        process.kill()
        process.join()
        ours.close()


def _run(pipe: Any, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    if os.geteuid() == 0:
        user = pwd.getpwnam(NOBODY)
        os.setgroups([])
        os.setgid(user.pw_gid)
        os.setuid(user.pw_uid)
    pipe.send(function(*arguments))


def ask(addresses: Sequence[str], messages: Sequence[bytes], wait_s: float) -> list[Any]:
    """Send all messages to all addresses, also as an engine; returns everything received.

    A port that refuses the handshake leaves the socket without a peer: sending to it would block from then on.
    """
    heard: list[Any] = []
    with zmq.Context() as context:
        context.sockopts.update({zmq.LINGER: 0})
        poller, sockets = zmq.Poller(), []
        for address in addresses:
            for kind in (zmq.DEALER, zmq.SUB, zmq.PUSH, zmq.PULL):
                socket = context.socket(kind)
                sockets.append(socket)
                if kind == zmq.SUB:
                    socket.subscribe(b"")
                if kind == zmq.DEALER:
                    socket.setsockopt(zmq.IDENTITY, ENGINE)
                socket.connect(address)
                if kind in (zmq.DEALER, zmq.PUSH):
                    with contextlib.suppress(zmq.Again):
                        for message in messages:
                            socket.send(message, zmq.NOBLOCK)
                if kind != zmq.PUSH:
                    poller.register(socket, zmq.POLLIN)
        deadline = time.monotonic() + wait_s
        while (left := deadline - time.monotonic()) > 0:
            heard.extend(socket.recv_multipart() for socket, _ in poller.poll(left * 1000))
        for socket in sockets:
            socket.close()
    return heard


def leaves(replicas: Sequence[str], epochs: Sequence[int]) -> list[bytes]:
    """Messages that each of these replicas leaves, now and after its requests."""
    names = [name.split("/") for name in replicas]
    return [
        encode(Leave(member=Member(stage, int(index), epoch), drain=drain))
        for stage, index in names
        for epoch in epochs
        for drain in (True, False)
    ]
