"""Calls functions that may crash, each in its own process.

A fork server forks the processes. The first call starts the fork server, which has one thread, none of this process's
open files, and has imported the modules that the functions need. A process answers with a msgpack header and raw bytes;
no part of an answer is unpickled.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_omni_ext.titles import name_process

Result = tuple[npt.NDArray[Any], dict[str, Any]]
"""An array and its metadata."""

Function = Callable[..., Result]
"""Takes bytes and keywords. Must be picklable."""

GRACE_S = 5.0
"""A process has its own timer; this many seconds later the caller kills it in any case."""

FIRST_TO_GO = 1000
"""A process's /proc/self/oom_score_adj: when memory runs out, the kernel kills these processes first."""

CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)
"""Signals with the default action in a process. Handlers of libraries would spend a second on finding symbols."""

MAX_HEADER_BYTES = 16 << 20

PIECE_BYTES = 64 << 20
"""The array of an answer is sent in pieces of this size, so that it is never in memory twice."""


class CallFailed(ValueError):
    """The call raised an error, crashed, or exceeded its time limit."""


class Answer(msgspec.Struct, frozen=True):
    """Header of an answer; the array follows, unless there is an error."""

    error: str = ""
    about: dict[str, Any] = {}
    dtype: str = ""
    shape: tuple[int, ...] = ()


_read_answer = msgspec.msgpack.Decoder(Answer)


class CrashIsolatedCalls:
    """Makes calls in separate processes, from any thread.

    Args:
        preload: modules that the fork server imports, so that calls need not import them.
        timeout_s: wall time of one call.
        memory_bytes: address space that a call may use in addition to its process's own.
    """

    def __init__(self, preload: Sequence[str], *, timeout_s: float, memory_bytes: int) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["__main__", *preload])
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes

    def call(self, function: Function, data: bytes, keywords: dict[str, Any]) -> Result:
        """Call a function with `data` and `keywords` in a new process.

        Raises:
            CallFailed: the call raised an error, crashed, or took too long or too much memory.
        """
        parent_end, child_end = self._context.Pipe()
        with parent_end:
            arguments = (child_end, function, keywords, self._timeout_s, self._memory_bytes)
            process = self._context.Process(target=_answer, args=arguments, daemon=True)
            with child_end:
                process.start()
            since = time.monotonic()
            try:
                parent_end.send_bytes(data)
                if not parent_end.poll(self._timeout_s + GRACE_S):
                    raise TimeoutError
                return _receive(parent_end)
            except (OSError, EOFError, multiprocessing.ProcessError, msgspec.DecodeError) as error:
                if time.monotonic() - since < self._timeout_s:
                    raise CallFailed("its decoder has crashed") from error
                raise CallFailed(f"reading it took longer than {self._timeout_s:g} s") from error
            finally:
                process.kill()  # the answer has arrived, or will never arrive
                process.join()


def _receive(end: Connection) -> Result:
    answer = _read_answer.decode(end.recv_bytes(MAX_HEADER_BYTES))
    if answer.error:
        raise CallFailed(answer.error)
    dtype = np.dtype(answer.dtype)
    if dtype.hasobject:
        raise EOFError("an array of objects")
    array = np.empty(answer.shape, dtype)
    for piece in _pieces(array):
        end.recv_bytes_into(piece)
    return array, answer.about


def _pieces(array: npt.NDArray[Any]) -> list[npt.NDArray[np.uint8]]:
    flat = array.reshape(-1).view(np.uint8)
    return [flat[start : start + PIECE_BYTES] for start in range(0, flat.size, PIECE_BYTES)]


def _answer(end: Connection, function: Function, keywords: dict[str, Any], timeout_s: float, memory_bytes: int) -> None:
    """Body of a process: one call."""
    faulthandler.disable()
    for number in (signal.SIGALRM, *CRASHES):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the caller ends this process
    signal.setitimer(signal.ITIMER_REAL, timeout_s)  # ends this process even if it is stuck in native code
    threading.Thread(target=_end_with_caller, daemon=True).start()
    name_process("video")
    _limit(memory_bytes)
    try:
        array, about = function(end.recv_bytes(), **keywords)
        header = Answer(about=about, dtype=array.dtype.str, shape=array.shape)
    except Exception as error:
        array, header = np.empty(0), Answer(error=str(error) or type(error).__name__)
    end.send_bytes(msgspec.msgpack.encode(header, enc_hook=_plain))
    if not header.error:
        for piece in _pieces(np.ascontiguousarray(array)):
            end.send_bytes(piece.data)


def _end_with_caller() -> None:
    caller = multiprocessing.parent_process()
    if caller is not None:
        caller.join()
    os._exit(0)


def _limit(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # core dumps of crashing files could fill the disk
    if sys.platform != "linux":
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = [pages * resource.getpagesize() + memory_bytes, *resource.getrlimit(resource.RLIMIT_AS)]
    limit = min(limit for limit in limits if limit != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    Path("/proc/self/oom_score_adj").write_text(str(FIRST_TO_GO))


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(type(value).__name__)
