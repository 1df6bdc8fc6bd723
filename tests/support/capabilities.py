"""What a machine must have for some tests. Without it a test is skipped here, and fails where CI is set.

A capability is missing where `missing` gives a reason. `.ci/run` sets CI: a proof that did not run there is no proof.
"""

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
        capabilities: keys of `PROBES`, or `library NAME` for a module that can be imported.
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
    return _library(name) if kind == "library" else PROBES[capability]()


def _library(name: str) -> str | None:
    probe = subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True, text=True)
    return f"no {name} here: {probe.stderr.strip().splitlines()[-1]}" if probe.returncode else None


def _isolation() -> str | None:
    if not all(map(shutil.which, ("unshare", "ip"))) or subprocess.run([*ISOLATED, "true"]).returncode:
        return "no network namespace can be made here"
    return None


def _hosts() -> str | None:
    from tests.support.namespace import two_hosts

    try:
        with two_hosts():
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces here: {error}"


def _nobody() -> str | None:
    if os.geteuid() != 0:
        return None  # the stranger is then this user, who is not trusted more
    try:
        pwd.getpwnam(NOBODY)
    except KeyError:
        return f"no user {NOBODY!r} here"
    return None


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
    if subprocess.run(["strace", "-o", os.devnull, "true"], capture_output=True).returncode:
        return "strace may not look into processes here"
    return None


PROBES: dict[str, Callable[[], str | None]] = {
    "isolation": _isolation,
    "two hosts": _hosts,
    "user nobody": _nobody,
    "IPv6": _ipv6,
    "strace": _strace,
}
