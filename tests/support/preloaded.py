"""Starts commands of this package from a process that has imported vLLM already: each start saves 8 s of a core.

A command runs in a fork of that process, with the environment, folder and output that a new process would have. A
command that is neither `vllm ...` nor pytest, or whose environment differs in variables that modules may read while
they are imported, is started in the usual way. A suite of pytest has a fork server of its own, which is a fork as well.
Servers in forks do not warm up the processors of media, and do not write configs into errors: both take a second.

    with preloaded.ForkServer() as server:
        process = server.start([".venv/bin/vllm", "serve", MODEL, "--omni"], log)
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from types import TracebackType
from typing import Any
from unittest import mock

import pytest
import setproctitle

from examples.server import Program, command
from tests.support.namespace import isolate

ROOT = Path(__file__).parents[2]
MODULES = (
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.cli.serve",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm_omni_ext.cli.serve",
    "vllm_omni_ext.serving.app",
)
"""Modules that the commands import."""

CHANGE = "VLLM_OMNI_TEST_CHANGE"
"""Variable with `module:function`, which a command in a fork calls first: all its processes are changed by it."""

FREE = ("PYTEST_CURRENT_TEST", "PYTHONPATH", "TMPDIR", "XDG_STATE_HOME", "VLLM_API_KEY", CHANGE)
"""Variables that may differ from command to command: nothing reads them while modules are imported."""

LIBRARIES = (
    "AITER_SITUV2_A4W4",
    "LD_LIBRARY_PATH",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "TILELANG_CLEANUP_TEMP_FILES",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCHINDUCTOR_COMPILE_THREADS",
    "TRITON_CACHE_AUTOTUNING",
    "VLLM_WORKER_MULTIPROC_METHOD",
)
"""Variables that vLLM and others set in a process when they are imported or start an engine; not for commands."""

MESSAGE_BYTES = 1 << 16
PYTEST = [sys.executable, "-m", "pytest"]

_inherited: tuple[socket.socket, int] | None = None
"""In a suite that runs in a fork: the connection to its fork server, and that server's process id."""


class Started:
    """A command that runs in a fork; has the used part of `subprocess.Popen`."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._words = connection.makefile("r")
        self.pid = int(self._words.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Exit status, or None while the command runs."""
        if self.returncode is None and select.select([self._connection], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for the end; returns the exit status.

        Raises:
            subprocess.TimeoutExpired: the command runs for longer.
        """
        if self.returncode is None:
            if timeout_s is not None and not select.select([self._connection], [], [], timeout_s)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout_s)
            self.returncode = int(self._words.readline() or -signal.SIGKILL)
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send the process a signal, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)


class ForkServer:
    """The process with the modules. Use as a context manager; the process starts with the first command.

    Commands that run in forks have the environment of the fork server's beginning, but for `FREE`.
    """

    def __init__(self) -> None:
        self._control: socket.socket | None = None
        self._environment = dict(os.environ)

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._control is not None:
            self._control.close()
            os.waitpid(self._pid, 0)

    def start(self, words: Sequence[str], log: Path, *, isolated: bool = False) -> Started | None:
        """Start a command in a session of its own; None: this command needs a new process.

        Args:
            words: `vllm` and its arguments, or `PYTEST` and those of pytest.
            isolated: the command and its processes reach nothing but loopback, and nothing reaches them.
        """
        suite = list(words[: len(PYTEST)]) == PYTEST
        if not suite and (list(words[:1]) != command()[:1] or len(command()) > 1):
            return None
        environment = self.environment()
        if CHANGE in environment:  # variables that another test has left do not matter to a changed command
            environment = _fixed(self._environment) | {name: environment[name] for name in FREE if name in environment}
        if _fixed(environment) != _fixed(self._environment):
            return None
        if any((path / "sitecustomize.py").exists() for path in _search_path()):
            return None
        if self._control is None:
            self._begin()
        assert self._control is not None
        ours, theirs = socket.socketpair()
        if suite:
            environment = for_a_suite(environment)
        message = {"words": list(words), "environment": environment, "folder": os.getcwd(), "isolated": isolated}
        with theirs, log.open("wb") as output:
            socket.send_fds(self._control, [json.dumps(message).encode()], [theirs.fileno(), output.fileno()])
        return Started(ours)

    def environment(self) -> dict[str, str]:
        """Return the variables of a command: those of this process, without those that libraries have set since."""
        ours = {name: value for name, value in os.environ.items() if name not in LIBRARIES}
        return ours | {name: self._environment[name] for name in LIBRARIES if name in self._environment}

    def _begin(self) -> None:
        if _inherited is not None:
            self._control, self._pid = _inherited
            return
        self._control, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with theirs:
            self._pid = subprocess.Popen(
                [sys.executable, "-m", "tests.support.preloaded", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                cwd=ROOT,
            ).pid


current: ForkServer | None = None
"""That of the surrounding `starts`."""


@contextlib.contextmanager
def starts() -> Iterator[None]:
    """Inside the block, `Program.start` starts commands in forks where that is possible."""
    start_anew = Program.start
    with ForkServer() as server, mock.patch.object(sys.modules[__name__], "current", server):

        def start(program: Program) -> None:
            program._process = server.start(program.words, program.log)  # type: ignore[assignment]
            if program._process is None:
                assert CHANGE not in os.environ, "the change would not be made: no fork can run this command"
                start_anew(program)

        with mock.patch.object(Program, "start", start):
            yield


def for_a_suite(variables: Mapping[str, str]) -> dict[str, str]:
    """Leave out the variables that pytest and its plugins set for themselves."""
    return {name: value for name, value in variables.items() if not name.startswith("PYTEST_")}


def _search_path() -> list[Path]:
    return [Path(folder) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]


def _fixed(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in FREE}


def next_command(control: socket.socket) -> dict[str, Any]:
    """Fork for every requested command, and report its end. Returns in a fork, with its command.

    The process ends when its connection is closed; it does not free all modules first, which takes Python seconds.
    """
    running: dict[int, tuple[int, socket.socket]] = {}
    with selectors.DefaultSelector() as events:
        events.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in events.select():
                if key.fileobj is not control:
                    events.unregister(key.fileobj)
                    _report(*running.pop(key.fd), key.fd)
                    continue
                data, files, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 2)
                if not data:
                    os._exit(0)
                pid = os.fork()
                if pid == 0:
                    return {**json.loads(data), "output": files[1]}
                os.close(files[1])
                asked = socket.socket(fileno=files[0])
                asked.sendall(f"{pid}\n".encode())
                end = os.pidfd_open(pid)
                running[end] = pid, asked
                events.register(end, selectors.EVENT_READ)


def _report(pid: int, asked: socket.socket, end: int) -> None:
    os.close(end)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with asked, contextlib.suppress(OSError):
        asked.sendall(f"{status}\n".encode())


def become(words: Sequence[str], environment: Mapping[str, str], folder: str, output: int, isolated: bool) -> None:
    """Make this process equal to a new one; `output` is a file descriptor."""
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:0] = [str(path) for path in _search_path() if str(path) not in sys.path]
    sys.argv = list(words)
    if isolated:
        isolate()


def run(control: socket.socket) -> None:
    """Be a fork server, and in its forks a command."""
    become(**next_command(control))
    if sys.argv[: len(PYTEST)] == PYTEST:
        _run_suite(sys.argv[len(PYTEST) :])
        return
    if change := os.environ.get(CHANGE):
        resolve_name(change)()
    from vllm_omni_ext.cli.main import vllm_main

    vllm_main()


def _run_suite(arguments: list[str]) -> None:
    """Run pytest; the servers that it starts are forks of a fork that is made here."""
    from tests.support import preloaded  # not this module, which is `__main__`

    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        run(theirs)
        return
    theirs.close()
    preloaded._inherited = ours, pid
    sys.exit(pytest.main(arguments))


def main() -> None:
    """Import, and run commands."""
    control = socket.socket(fileno=int(sys.argv[1]))
    setproctitle.getproctitle()  # finds the command line, which it cannot when `become` has changed the environment
    for name in MODULES:
        import_module(name)
    for name in import_module("vllm_omni_ext.runtime.launch.inherit").LATE_IMPORTS:
        import_module(name)
    import_module("transformers").PreTrainedConfig.__repr__ = object.__repr__
    resolve_name("vllm.renderers.base:BaseRenderer")._warmup_mm_processor = lambda *args, **kwargs: None
    sys.stdout.flush()  # output of modules, here and in C
    ctypes.CDLL(None).fflush(None)
    gc.freeze()  # garbage collection in a fork would copy all pages of the modules
    atexit.register(gc.unfreeze)  # extension modules need their objects back
    run(control)


if __name__ == "__main__":
    main()
