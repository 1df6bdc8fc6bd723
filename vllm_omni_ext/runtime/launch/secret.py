"""Chooses the file with the cluster secret of a deployment that other hosts can join, before any process is started.

Without a configured file, a head (the process that starts the deployment) uses the default file of its user and host,
and creates it if it is missing. A headless node (a process whose replicas join a head) does the same on the head's
host; on another host the file must exist. The file is created atomically, so that two processes that start at the same
time use the same secret.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from vllm_omni_ext.config.overrides import with_settings
from vllm_omni_ext.coordinator.keys import Keys
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.runtime.launch.addresses import is_here, is_loopback
from vllm_omni_ext.topology.plan import Plan

FLAG, WITHOUT = "--omni-cluster-secret-file", "--no-omni-cluster-auth"
PORT = "--omni-master-port PORT"

NAME = "cluster.secret"

_FOLDER = "vllm-omni-ext"
_BYTES = 32
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_INSTEAD = "name another file with --omni-cluster-secret-file"


def with_secret(plan: Plan, *, headless: bool, tell: Callable[[str], None]) -> Plan:
    """Return the plan with the path of its secret file; unchanged without `master_address` or without `cluster_auth`.

    Args:
        headless: the process is a headless node, whose replicas join a head, instead of a head.
        tell: receives lines for the user.

    Raises:
        ConfigError: there is no secret, its default file is not private, or the settings contradict each other.
    """
    cluster = plan.config.cluster
    if not cluster.cluster_auth and cluster.cluster_secret_file is not None:
        raise ConfigError(f"cluster.cluster_auth: there is a cluster_secret_file too; keep {WITHOUT} or {FLAG}")
    if cluster.master_address is None:
        return plan
    if cluster.master_port is None:
        raise ConfigError(f"cluster.master_address: without a port nobody can join; write {PORT} too")
    if not cluster.cluster_auth:
        if not headless:
            tell(
                f"warning: no cluster secret ({WITHOUT}): any process that reaches {cluster.master_address} can join, "
                "see requests and outputs, and send false ones"
            )
        return plan
    if cluster.cluster_secret_file is not None:
        file = Path(os.path.expanduser(cluster.cluster_secret_file))
        if read_by_others(file):
            tell(f"warning: the cluster secret can be read by other users: chmod 600 {file}")
    elif headless and not is_here(cluster.master_address):
        found = find()
        if found is None:
            raise ConfigError(
                f"cluster secret: the head at {cluster.master_address} is on another host, and its secret is not here. "
                f"There: scp {default_file()} THIS_HOST:cluster.secret; here: {FLAG} cluster.secret. "
                f"If the head has none: {WITHOUT}"
            )
        file = found
    else:
        file, made = find_or_make()
        if not headless:
            line = f"cluster secret: {file}{' (made now)' if made else ''}; this user's replicas on this host find it"
            if not is_loopback(cluster.master_address):
                line += f"; other hosts: scp {file} HOST:cluster.secret, and there {FLAG} cluster.secret"
            tell(line)
    Keys.read(str(file))
    return replace(plan, config=with_settings(plan.config, {"cluster_secret_file": str(file)}))


def default_file() -> Path:
    """Return the path `$XDG_STATE_HOME/vllm-omni-ext/cluster.secret`; without the variable `~/.local/state/...`."""
    state_home = os.environ.get("XDG_STATE_HOME", "")
    state = Path(state_home) if os.path.isabs(state_home) else Path.home() / ".local" / "state"
    return state / _FOLDER / NAME


def find() -> Path | None:
    """Return the default secret file; None if it does not exist.

    Raises:
        ConfigError: the file cannot be read, or other users have access to the file or its folder.
    """
    try:
        return _checked(default_file())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"cluster secret: cannot read '{default_file()}': {error.strerror}; {_INSTEAD}") from error


def find_or_make() -> tuple[Path, bool]:
    """Return (default secret file, whether this call has created it).

    Raises:
        ConfigError: the file cannot be created, or other users have access to the file or its folder.
    """
    file = default_file()
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_folder(file.parent)
        made = _make(file)
        return _checked(file), made
    except OSError as error:
        raise ConfigError(f"cluster secret: cannot make '{file}': {error.strerror}; {_INSTEAD}") from error


def read_by_others(file: Path) -> bool:
    """Return whether other users may read a file; False if the file's mode cannot be read."""
    try:
        return bool(file.stat().st_mode & _OTHERS)
    except OSError:
        return False


def _make(file: Path) -> bool:
    """Create the file with a new secret; return False if the file exists already."""
    if os.path.lexists(file):
        return False
    new = file.with_name(f"{NAME}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with open(descriptor, "w", encoding="ascii") as opened:
            opened.write(secrets.token_hex(_BYTES) + "\n")
            opened.flush()
            os.fsync(opened.fileno())
        os.link(new, file)  # fails if another process has created the file meanwhile; then its secret is used
        return True
    except FileExistsError:
        return False
    finally:
        with contextlib.suppress(FileNotFoundError):
            new.unlink()


def _check_folder(folder: Path) -> None:
    about = folder.stat()
    if about.st_uid != os.geteuid():
        raise ConfigError(f"cluster secret: '{folder}' belongs to user {about.st_uid}, not to you; {_INSTEAD}")
    if about.st_mode & _OTHERS_WRITE:
        raise ConfigError(f"cluster secret: others may write into '{folder}': chmod 700 {folder}")


def _checked(file: Path) -> Path:
    """Return the path of a secret file.

    Raises:
        ConfigError: the path is not a file, or other users have access to the file or its folder.
    """
    _check_folder(file.parent)
    about = file.lstat()
    if not stat.S_ISREG(about.st_mode):
        raise ConfigError(f"cluster secret: '{file}' is no regular file; remove it, or {_INSTEAD}")
    if about.st_uid != os.geteuid():
        raise ConfigError(f"cluster secret: '{file}' belongs to user {about.st_uid}, not to you; {_INSTEAD}")
    if about.st_mode & _OTHERS:
        raise ConfigError(
            f"cluster secret: others may read '{file}' (mode {stat.S_IMODE(about.st_mode):04o}): remove it, "
            "the next start makes another; or chmod 600 it if no other user has read it"
        )
    return file
