"""Reads each video in its own process, because some damaged files crash the process that decodes them.

Every loader in vLLM's registry is replaced by a loader of the same name that runs the original in another process.
Thus `--media-io-kwargs` and VLLM_VIDEO_LOADER_BACKEND keep their effect.

The processes are forked by a fork server, which is a fork of the API server (`start_fork_server`): a new process would
import vLLM for 5 to 10 s. The fork server has one thread and none of the API server's open files. A process sends a
msgpack header and raw bytes, so the API server unpickles no data.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import io
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from vllm.multimodal.video import VIDEO_LOADER_REGISTRY

from vllm_omni_ext.serving.limits import references
from vllm_omni_ext.titles import name_process

Video = tuple[npt.NDArray[Any], dict[str, Any]]
"""Frames as [frames, height, width, 3] uint8, and their metadata in the format of vLLM's loaders."""

TIMEOUT_S = 120.0
"""Limit of the wall time for one video, in seconds.

OpenCV decodes every frame up to the last sampled one, at 400 to 1200 frames/s for 720p on two cores. The limit is
enough for half an hour of video. An endless file occupies one of vLLM's eight media threads for this time."""

GRACE_S = 5.0
"""Seconds after TIMEOUT_S at which the API server kills a video process that its own timer has not ended."""

MEMORY_BYTES = 8 << 30
"""Limit of the address space of a video process in bytes, in addition to its size at the start.

It includes all sampled frames: vLLM samples up to 768 frames for some models, each of 6 MB at 1080p."""

FIRST_TO_GO = 1000
"""Value for /proc/self/oom_score_adj: when memory runs out, the kernel kills the video processes first."""

CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)
"""Signals whose default action is restored in a video process: libraries' handlers take a second to look up symbols."""

FFMPEG_BACKENDS = ("torchcodec", "pynvvideocodec")
"""Decoders besides OpenCV that read containers with FFmpeg; they have no option for FFmpeg's protocols."""

MAX_HEADER_BYTES = 16 << 20

PIECE_BYTES = 64 << 20
"""Bytes of each piece in which an array is sent, so that no process holds two copies of the whole array."""

PRELOADED = ["__main__", __name__]
"""Modules that the fork server imports before it forks. A fork of this process has imported all but the first."""


class ReadFailed(ValueError):
    """The loader of a video raised an error, crashed, or exceeded its time or memory limit."""


class Answer(msgspec.Struct, frozen=True):
    """Header that a video process sends before the array of frames.

    Attributes:
        error: message of the loader's error; no array is sent then. "": the video was read.
        about: metadata of the video.
        dtype, shape: of the array.
    """

    error: str = ""
    about: dict[str, Any] = {}
    dtype: str = ""
    shape: tuple[int, ...] = ()


_read_answer = msgspec.msgpack.Decoder(Answer)


def start_fork_server() -> None:
    """Start multiprocessing's fork server as a fork of this process, which has one thread and has imported vLLM.

    Without this call, or when the fork server has ended, multiprocessing starts it as a new process at the next video.
    """
    multiprocessing.forkserver.set_forkserver_preload(PRELOADED)
    start, track = multiprocessing.util.spawnv_passfds, multiprocessing.resource_tracker.ensure_running
    multiprocessing.util.spawnv_passfds = _fork
    multiprocessing.resource_tracker.ensure_running = lambda: None  # its process is started at the first video
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        multiprocessing.util.spawnv_passfds, multiprocessing.resource_tracker.ensure_running = start, track


def _fork(path: Any, args: Sequence[Any], passfds: Sequence[int]) -> int:
    """Run a Python program, the last of `args`, in a fork with some of this process's open files."""
    if pid := os.fork():
        return pid
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        name_process("video-fork-server")
        for descriptor in {*map(int, os.listdir("/dev/fd"))} - {0, 1, 2, *passfds}:
            with contextlib.suppress(OSError):  # that of the folder is closed already
                os.close(descriptor)
        with contextlib.suppress(SystemExit):  # the API server has ended
            exec(args[-1], {})
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


@contextlib.contextmanager
def install() -> Iterator[None]:
    """Make this process read each video in a separate process, inside the `with` block."""
    stock = dict(VIDEO_LOADER_REGISTRY.name2class)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    for name, loader in stock.items():
        load = staticmethod(functools.partial(_load, context, name, loader))
        _register(name, type(loader.__name__, (loader,), {"load_bytes": load}))
    try:
        yield
    finally:
        for name, loader in stock.items():
            _register(name, loader)


def _register(name: str, loader: type) -> None:
    VIDEO_LOADER_REGISTRY.register(name, requires_gpu=VIDEO_LOADER_REGISTRY.backend_requires_gpu(name))(loader)


def _load(context: Any, name: str, stock: Any, data: bytes, **options: Any) -> Video:
    """Return the video as vLLM's loader `stock` reads it, in a separate process; GPU loaders run in this process.

    Raises:
        ReadFailed: the video cannot be read.
    """
    names = (name, options.get("backend", name))
    if str(options.get("device", "cpu")) != "cpu" or any(map(VIDEO_LOADER_REGISTRY.backend_requires_gpu, names)):
        return _read(name, stock, data, options)  # GPU memory must belong to this process
    ours, theirs = context.Pipe()
    with ours:
        arguments = (theirs, name, stock, options, TIMEOUT_S, MEMORY_BYTES)
        process = context.Process(target=_answer, args=arguments, daemon=True)
        with theirs:
            process.start()
        since = time.monotonic()
        try:
            ours.send_bytes(data)
            if not ours.poll(TIMEOUT_S + GRACE_S):
                raise TimeoutError
            return _receive(ours)
        except (OSError, EOFError, multiprocessing.ProcessError, msgspec.DecodeError) as error:
            if time.monotonic() - since < TIMEOUT_S:
                raise ReadFailed("its decoder has crashed") from error
            raise ReadFailed(f"reading it took longer than {TIMEOUT_S:g} s") from error
        finally:
            process.kill()  # the answer has arrived, or will never arrive
            process.join()


def _receive(end: Connection) -> Video:
    answer = _read_answer.decode(end.recv_bytes(MAX_HEADER_BYTES))
    if answer.error:
        raise ReadFailed(answer.error)
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


def _read(name: str, stock: Any, data: bytes, options: dict[str, Any]) -> Video:
    if options.get("backend", name) in FFMPEG_BACKENDS:
        references.opened(io.BytesIO(data)).close()
    found: Video = stock().load_bytes(data, **options)
    return found


def _answer(
    end: Connection, name: str, stock: Any, options: dict[str, Any], timeout_s: float, memory_bytes: int
) -> None:
    """Main function of a video process: receive the bytes of one video, and send its frames."""
    faulthandler.disable()
    for number in (signal.SIGALRM, *CRASHES):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the caller ends this process
    signal.setitimer(signal.ITIMER_REAL, timeout_s)  # ends this process even if it is stuck in native code
    threading.Thread(target=_end_with_caller, daemon=True).start()
    name_process("video")
    _limit(memory_bytes)
    references.refuse_in_opencv()
    try:
        array, about = _read(name, stock, end.recv_bytes(), options)
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
