"""Calls of functions that may crash, each in a process of its own.

The API server has threads and must not be forked once requests arrive. So it forks a helper before: one thread, no
file but its socket, nothing to do but to fork again. For each call the helper gets one end of a socket pair, which goes
to a child that was forked ahead: it reads the call there, answers there and ends. Whatever happens to the child, the
caller sees an answer or the end of the connection. What passes is a msgpack header behind its length, then raw bytes;
nothing is unpickled.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import resource
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_omni_ext.titles import name_process

Function = Callable[..., tuple[npt.NDArray[Any], dict[str, Any]]]
"""Takes bytes and keywords; gives an array and what there is to say about it."""

GRACE_S = 5.0
"""A child is ended by its own timer; this much later the caller stops waiting for it in any case."""

FIRST_TO_GO = 1000
"""What a child writes into /proc/self/oom_score_adj: where memory runs out, it is ended before everything else."""

CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)
"""An ordinary end of a child. Handlers that libraries of the parent have set would look for symbols for a second."""

_Header = TypeVar("_Header", "Call", "Answer")

LENGTH = struct.Struct("<Q")

log = logging.getLogger(__name__)


class CallFailed(ValueError):
    """A call that raised, crashed or did not end in time."""


class Call(msgspec.Struct, frozen=True):
    """Header of a call; `size` bytes follow."""

    function: str
    keywords: dict[str, Any]
    size: int


class Answer(msgspec.Struct, frozen=True):
    """Header of an answer; unless there is an error, the array follows."""

    error: str = ""
    about: dict[str, Any] = {}
    dtype: str = ""
    shape: tuple[int, ...] = ()


class Offshoot:
    """The helper process, and calls through it from any thread.

    Args:
        functions: what may be called, by name.
        timeout_s: wall time of one call.
        memory_bytes: address space that a call may take, on top of what the process has.
    """

    def __init__(self, functions: Mapping[str, Function], *, timeout_s: float, memory_bytes: int) -> None:
        self._functions = functions
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self._start()

    def call(self, function: str, data: bytes, keywords: dict[str, Any]) -> tuple[npt.NDArray[Any], dict[str, Any]]:
        """Call a function in a process of its own.

        Raises:
            CallFailed: it raised, crashed, or took too long or too much memory.
        """
        ours, theirs = socket.socketpair()
        since = time.monotonic()
        with ours:
            with theirs:
                self._hand_over(theirs)
            ours.settimeout(self._timeout_s + GRACE_S)
            try:
                _send(ours, Call(function, keywords, len(data)), data)
                answer = _receive(ours, Answer)
                if answer.error:
                    raise CallFailed(answer.error)
                result = np.empty(answer.shape, np.dtype(answer.dtype))
                if result.size:
                    _fill(ours, result)
            except (OSError, EOFError) as error:
                if time.monotonic() - since < self._timeout_s:
                    raise CallFailed("its decoder has crashed") from error
                raise CallFailed(f"reading it took longer than {self._timeout_s:g} s") from error
        return result, answer.about

    def close(self) -> None:
        """End the helper; calls that are under way still end."""
        with self._lock:
            self._control.close()
            os.waitpid(self.pid, 0)
        gc.unfreeze()

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        gc.freeze()  # a collection writes into every object, and a page that is written to exists twice from then on
        self.pid = os.fork()
        if self.pid == 0:
            self._helper(theirs)
        theirs.close()

    def _hand_over(self, end: socket.socket) -> None:
        with self._lock:
            try:
                socket.send_fds(self._control, [b"."], [end.fileno()])
            except (BrokenPipeError, ConnectionResetError):
                log.warning("The process that video is read in has ended; starting another one")
                self._control.close()
                os.waitpid(self.pid, 0)
                self._start()
                socket.send_fds(self._control, [b"."], [end.fileno()])

    # -- in the helper, and in the children below it -------------------------------------------------------------

    def _helper(self, control: socket.socket) -> NoReturn:
        try:
            _let_go_of_all_but(control)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # sent to the whole group: the parent decides when to end
            faulthandler.disable()
            for number in (signal.SIGTERM, *CRASHES):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for children
            name_process("video")
            while True:
                spare, theirs = socket.socketpair()
                if os.fork() == 0:  # ahead of the next call: copying the tables of a large process takes its time
                    control.close()
                    spare.close()
                    self._child(theirs)
                theirs.close()
                with spare:
                    ends = socket.recv_fds(control, 1, 1)[1]
                    if not ends:
                        break
                    socket.send_fds(spare, [b"."], ends)
                    os.close(ends[0])
        except Exception:
            log.exception("The process that video is read in cannot go on")
        finally:
            os._exit(0)

    def _child(self, helper: socket.socket) -> NoReturn:
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends this process also where no Python runs
            _limit(self._memory_bytes)
            ends = socket.recv_fds(helper, 1, 1)[1]
            if not ends:
                raise EOFError
            end = socket.socket(fileno=ends[0])
            signal.setitimer(signal.ITIMER_REAL, self._timeout_s)
            call = _receive(end, Call)
            data = bytearray(call.size)
            _fill(end, data)
            try:
                array, about = self._functions[call.function](bytes(data), **call.keywords)
            except Exception as error:
                _send(end, Answer(error=str(error) or type(error).__name__))
            else:
                array = np.ascontiguousarray(array)
                _send(end, Answer(about=about, dtype=array.dtype.str, shape=array.shape), array)
        except (OSError, EOFError) as error:
            log.debug("Nobody waits for this process: %r", error)
        except Exception:
            log.exception("A call in a process of its own has failed")
        finally:
            os._exit(0)


def _let_go_of_all_but(control: socket.socket) -> None:
    """Files of the parent, its listening socket among them, must not stay open here.

    Their numbers stay taken: what else came with the fork may still write to one, or close it.
    """
    null = os.open(os.devnull, os.O_RDWR)
    keep = {0, 1, 2, control.fileno(), null}
    for number in {int(name) for name in os.listdir("/dev/fd")} - keep:
        os.dup2(null, number, inheritable=False)


def _limit(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # who sends a file that crashes could fill the disk
    if sys.platform != "linux":
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = [pages * resource.getpagesize() + memory_bytes, *resource.getrlimit(resource.RLIMIT_AS)]
    limit = min(limit for limit in limits if limit != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    Path("/proc/self/oom_score_adj").write_text(str(FIRST_TO_GO))


def _send(end: socket.socket, header: Call | Answer, data: Any = b"") -> None:
    encoded = msgspec.msgpack.encode(header, enc_hook=_plain)
    end.sendall(LENGTH.pack(len(encoded)) + encoded)
    if len(data):
        end.sendall(data)


def _receive(end: socket.socket, kind: type[_Header]) -> _Header:
    length = bytearray(LENGTH.size)
    _fill(end, length)
    encoded = bytearray(*LENGTH.unpack(length))
    _fill(end, encoded)
    return msgspec.msgpack.decode(encoded, type=kind)


def _fill(end: socket.socket, target: Any) -> None:
    """Read until the buffer is full; EOFError if the other end has closed before."""
    view = memoryview(target).cast("B")
    while view:
        count = end.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(type(value).__name__)
