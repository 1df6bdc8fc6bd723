"""Sets process titles, which every user of the machine can read with `ps` and in /proc/*/cmdline."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

PROGRAM = "vllm-omni"
SECRET_FLAGS = ("api-key", "hf-token")
HIDDEN = "***"


def name_process(name: str, words: Sequence[str] = ()) -> None:
    """Replace this process's command line, which `ps` shows, by `vllm-omni NAME WORDS`. Forked processes inherit it.

    Args:
        name: role of the process, e.g. `head` or `talker/0`.
        words: arguments of the process, shown without secrets.
    """
    with contextlib.suppress(ImportError):  # vLLM requires setproctitle, but also works without
        import setproctitle

        setproctitle.setproctitle(" ".join([PROGRAM, name, *without_secrets(words)]))


def without_secrets(words: Iterable[str]) -> list[str]:
    """Return the arguments with `***` instead of the values of `SECRET_FLAGS`, also of abbreviated flags."""
    shown: list[str] = []
    secret = False
    for word in words:
        if word.startswith("-"):
            flag, equals, _ = word.partition("=")
            secret = _is_secret(flag)
            shown.append(f"{flag}={HIDDEN}" if secret and equals else word)
            continue
        shown.append(HIDDEN if secret else word)
    return shown


def _is_secret(flag: str) -> bool:
    """Return whether argparse may read a flag as one of `SECRET_FLAGS`."""
    name = flag.lstrip("-").replace("_", "-")
    return flag.startswith("--") and bool(name) and any(secret.startswith(name) for secret in SECRET_FLAGS)
