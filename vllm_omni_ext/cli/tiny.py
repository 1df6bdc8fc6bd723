"""`vllm-omni-ext tiny ...`: the parser around the tiny checkpoints."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Parse and write a tiny checkpoint; returns the exit status."""
    from vllm_omni_ext.tiny.cli import add_parser, run

    parser = argparse.ArgumentParser(prog="vllm-omni-ext")
    add_parser(parser.add_subparsers(required=True, metavar="COMMAND"))
    return run(parser.parse_args(["tiny", *argv]))
