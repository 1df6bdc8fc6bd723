"""Capabilities of a machine that some tests need. A test without them is skipped here, and fails where CI is set."""

from __future__ import annotations

import functools
import os
import pwd
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable

import pytest

ISOLATED = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
"""Put before a command that shall reach nothing but loopback, nor be reached by anything else."""

NOBODY = "nobody"


def needs(*capabilities: str) -> None:
    """Skip the test that calls this function if a capability is missing; let it fail if CI is set in the environment.

    Args:
        capabilities: keys of `PROBES`, `library NAME` for a module that can be imported, or `program NAME` for one on
            PATH.
    """
    for capability in capabilities:
        if (reason := missing(capability)) is None:
            continue
        if os.environ.get("CI"):
            pytest.fail(f"CI is set, but this machine lacks: {capability} ({reason})", pytrace=False)
        pytest.skip(reason)


@functools.cache
def missing(capability: str) -> str | None:
    """Why this machine lacks a capability; None if the capability is there.

    Raises:
        KeyError: no such capability.
    """
    kind, _, name = capability.partition(" ")
    if kind == "program":
        return None if shutil.which(name) else f"no program {name} here"
    return _library(name) if kind == "library" else PROBES[capability]()


def _library(name: str) -> str | None:
    probe = subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True, text=True)
    return f"no {name} here: {probe.stderr.strip().splitlines()[-1]}" if probe.returncode else None


def _isolation() -> str | None:
    possible = all(map(shutil.which, ("unshare", "ip"))) and not subprocess.run([*ISOLATED, "true"]).returncode
    return None if possible else "no network namespace can be made here"


def _hosts() -> str | None:
    from tests.support.namespace import two_hosts

    try:
        with two_hosts():
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces here: {error}"


def _nobody() -> str | None:
    """Where this user is not root, the stranger is this user, which has no more trust."""
    known = os.geteuid() != 0 or NOBODY in (user.pw_name for user in pwd.getpwall())
    return None if known else f"no user {NOBODY!r} here"


def _ipv6() -> str | None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return "no IPv6 loopback here"
    return None


def _strace() -> str | None:
    if shutil.which("strace") is None:
        return "no strace here"
    failed = subprocess.run(["strace", "-o", os.devnull, "true"], capture_output=True).returncode
    return "strace may not trace processes here" if failed else None


PROBES: dict[str, Callable[[], str | None]] = {
    "isolation": _isolation,
    "two hosts": _hosts,
    "user nobody": _nobody,
    "IPv6": _ipv6,
    "strace": _strace,
}
