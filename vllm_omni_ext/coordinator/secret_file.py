"""The file with the cluster's secret, where the user has named none: one for each user of a host.

It is made by whoever starts first, head or replica, and is used by all that this user starts on this host later. It
appears with its whole content or not at all: two that start at once end up with the same secret.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

from vllm_omni_ext.errors import ConfigError

NAME = "cluster.secret"

_FOLDER = "vllm-omni-ext"
_BYTES = 32
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_INSTEAD = "name another file with --omni-cluster-secret-file"


def default_file() -> Path:
    """`$XDG_STATE_HOME/vllm-omni-ext/cluster.secret`; without the variable it is `~/.local/state/...`."""
    said = os.environ.get("XDG_STATE_HOME", "")
    state = Path(said) if os.path.isabs(said) else Path.home() / ".local" / "state"
    return state / _FOLDER / NAME


def find() -> Path | None:
    """The default file if it is there.

    Raises:
        ConfigError: it is there and cannot be trusted, or cannot be looked at.
    """
    file = default_file()
    try:
        _check_folder(file.parent)
        return _checked(file)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"cluster secret: cannot read '{file}': {error.strerror}; {_INSTEAD}") from error


def find_or_make() -> tuple[Path, bool]:
    """The default file, and whether it was made by this call.

    Raises:
        ConfigError: it cannot be made, or it is there and cannot be trusted.
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
    """Whether other users may read a file that was named; False if it cannot be looked at."""
    try:
        return bool(file.stat().st_mode & _OTHERS)
    except OSError:
        return False


def _make(file: Path) -> bool:
    """Make the file with a new secret; False if there is one."""
    if os.path.lexists(file):
        return False
    new = file.with_name(f"{NAME}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with open(descriptor, "w", encoding="ascii") as opened:
            opened.write(secrets.token_hex(_BYTES) + "\n")
            opened.flush()
            os.fsync(opened.fileno())
        os.link(new, file)  # fails if somebody else has made it meanwhile: then theirs counts
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
    """The file, after a look at who may read it."""
    about = file.lstat()
    if not stat.S_ISREG(about.st_mode):
        raise ConfigError(f"cluster secret: '{file}' is no regular file; remove it, or {_INSTEAD}")
    if about.st_uid != os.geteuid():
        raise ConfigError(f"cluster secret: '{file}' belongs to user {about.st_uid}, not to you; {_INSTEAD}")
    if about.st_mode & _OTHERS:
        raise ConfigError(
            f"cluster secret: others may read '{file}' (mode {stat.S_IMODE(about.st_mode):04o}): remove it, "
            "the next start makes another; or chmod 600 it if nobody has read it"
        )
    return file
