"""Measures the start of a server and its first ten spoken answers, which are requested one after the other.

The first answer should be as fast as the tenth. A slower one shows a compilation or a selection that is missing from
the server's start. If the server refuses its configuration, the exit status is 3 and the reason is printed.

    python benchmarks/gpu_start.py MODEL [--json FILE] [--all-frames] [-- flags of vllm serve]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from gpu_parts import REFUSED_STATUS
from spoken import Answer, Lengths
from spoken_http import MODEL, over_http

from examples.server import Server, ServerFailed

T = TypeVar("T")

ANSWERS = 10
LENGTHS = Lengths(text=8, frames=12)

WRONG_CONFIGURATION = 2
"""Exit status of `vllm serve --omni` when it has refused its configuration in one line and started nothing."""


def split(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the words of a command line before `--`, and those after it, which are flags for `vllm serve`.

    argparse does not accept flags of another program after its own options.
    """
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def measured(model: str, flags: Sequence[str], measure: Callable[[Server], T]) -> T | None:
    """Start a server, call `measure`, end the server and print its log.

    Returns:
        The result of `measure`; None if the server has refused its configuration.
    """
    with tempfile.TemporaryDirectory(prefix="omni-bench-") as folder:
        server = Server(model, Path(folder, "server.log"), ["--served-model-name", MODEL, *flags])
        try:
            with server:
                return measure(server)
        except ServerFailed:
            if server.status() != WRONG_CONFIGURATION:
                raise
            return None
        finally:
            print(server.log.read_text(errors="replace"), flush=True)


def spoken_answers(server: Server, lengths: Lengths) -> tuple[float, list[Answer]]:
    """Return (seconds of the server's start, ten answers that were requested one after the other)."""
    with over_http(server, lengths) as (ask, runner):
        return server.startup_s, [runner.run(ask(seed)) for seed in range(ANSWERS)]


def main() -> int:
    """Run this benchmark from the command line, and print its results; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory or hub id")
    parser.add_argument("--json", type=Path, help="file that takes the figures")
    parser.add_argument("--all-frames", action="store_true", help="the talker drops no frame (Qwen2.5-Omni)")
    ours, flags = split(sys.argv[1:])
    args = parser.parse_args(ours)
    lengths = replace(LENGTHS, dropped=0) if args.all_frames else LENGTHS
    found = measured(args.model, flags, partial(spoken_answers, lengths=lengths))
    if found is None:
        return REFUSED_STATUS
    ready_s, answers = found
    firsts = [answer.first_s for answer in answers]
    figures = {"ready_s": ready_s, "first_sound_s": firsts, "answer_s": [each.whole_s for each in answers]}
    print(f"ready after {ready_s:.1f} s; first sound {firsts[0] * 1e3:.0f} ms, tenth {firsts[-1] * 1e3:.0f} ms")
    if args.json is not None:
        args.json.write_text(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
