"""The examples of README.md, as they are written there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]


def blocks(language: str) -> list[str]:
    """Return the code blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)


def at(port: int, text: str) -> str:
    """Return a text of an example with the address of a test's server."""
    return text.replace("localhost:8000", f"127.0.0.1:{port}")


def commands(program: str) -> list[list[str]]:
    """Return the words of the command lines that begin with a program, without comments."""
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith(f"{program} ")]
