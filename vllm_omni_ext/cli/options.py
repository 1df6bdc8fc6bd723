"""Parses and checks values of command-line options that several commands have."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from urllib.parse import urlsplit

from vllm_omni_ext.errors import ConfigError

KEY_VARIABLE = "VLLM_API_KEY"
"""Environment variable with the API key of a server that this machine starts."""


def key_of_environment(*, started: bool) -> str | None:
    """Return the API key for requests to a server; None if the environment has none.

    Args:
        started: this command starts the server, with the key in `KEY_VARIABLE`.
    """
    return (started and os.environ.get(KEY_VARIABLE)) or os.environ.get("OPENAI_API_KEY")


def count(text: str) -> int:
    """Parse an integer that is 0 or more."""
    return _at_least(0, text)


def positive(text: str) -> int:
    """Parse an integer that is 1 or more."""
    return _at_least(1, text)


def _at_least(least: int, text: str) -> int:
    value = int(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"must be {least} or more, got {text}")
    return value


def not_negative(text: str) -> float:
    """Parse a finite number that is 0 or more."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be 0 or more, got {text}")
    return value


def more_than_0(text: str) -> float:
    """Parse a finite number that is more than 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be more than 0, got {text}")
    return value


def check_output(flag: str, file: Path | None) -> None:
    """Raise ConfigError if a file cannot be written. Called before runs, which can take hours."""
    if file is None:
        return
    if file.is_dir():
        raise ConfigError(f"{flag} {file}: is a folder; name a file in it")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"{flag} {file}: cannot be written")


def check_url(url: str) -> None:
    """Raise ConfigError if a value of `--url` is not the http or https URL of a host."""
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna")  # ValueError, as of the port: malformed
        _ = parts.port
        valid = parts.scheme in ("http", "https") and bool(host) and url.isprintable() and " " not in url
    except ValueError:
        valid = False
    if not valid:
        raise ConfigError(f"--url: must begin with http:// or https://, and name a host, got '{url}'")
