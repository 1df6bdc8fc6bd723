"""Network namespaces that stand for hosts: processes in them reach each other by real addresses only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
"""Of setns(2) and unshare(2)."""


def isolate() -> None:
    """Give this process a network of its own with only loopback, as `capabilities.ISOLATED` does for a command."""
    user, group = os.getuid(), os.getgid()
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUSER | CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


@dataclass(frozen=True)
class Host:
    """A network namespace, kept by a process that sleeps in it, with one address."""

    pid: int
    address: str

    @property
    def words(self) -> list[str]:
        """Prefix of a command that runs there."""
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net", "--"]

    def add_address(self, address: str) -> str:
        """Give the host one more address on the wire, and return it."""
        _run(self, "address", "add", f"{address}/24", "dev", "wire0")
        return address

    def call(self, function: Callable[[], T]) -> T:
        """Call a function in a thread that is there."""
        with ThreadPoolExecutor(1, initializer=self._enter) as thread:
            return thread.submit(function).result()

    def _enter(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/proc/{self.pid}/ns/net") as file:
            if libc.setns(file.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts with a wire between them; OSError or CalledProcessError if that is not allowed here."""
    with contextlib.ExitStack() as stack:
        hosts = [Host(stack.enter_context(_sleeper()), address) for address in ("10.77.0.1", "10.77.0.2")]
        first, second = hosts
        _run(first, "link", "add", "wire0", "type", "veth", "peer", "name", "wire0", "netns", str(second.pid))
        for host in hosts:
            _run(host, "address", "add", f"{host.address}/24", "dev", "wire0")
            for device in ("lo", "wire0"):
                _run(host, "link", "set", device, "up")
        yield first, second


@contextlib.contextmanager
def _sleeper() -> Iterator[int]:
    words = ["unshare", "--net", "sh", "-c", "echo; exec sleep infinity"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise PermissionError("no network namespaces here")
        yield process.pid
    finally:
        process.kill()
        process.communicate()


def _run(host: Host, *words: str) -> None:
    subprocess.run([*host.words, "ip", *words], check=True, capture_output=True)
