"""`vllm-omni-ext tiny`: write a tiny random checkpoint for tests and demonstrations."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_omni_ext.tiny.bagel import write_bagel
from vllm_omni_ext.tiny.qwen3_omni import write_qwen3_omni

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: Subparsers) -> None:
    """Add the `tiny` command; the caller's parser calls `run` with the parsed arguments (also in `args.run`)."""
    tiny = subparsers.add_parser("tiny", help="write a tiny random checkpoint that Transformers and vLLM load")
    models = tiny.add_subparsers(dest="tiny_model", required=True, metavar="MODEL")
    parser = models.add_parser("qwen3-omni", help="thinker, talker and code2wav in about a million parameters")
    parser.add_argument("directory", type=Path, metavar="DIR", help="where to write; created if needed")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of all weights (default: 0)")
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--real-vocab", action="store_true", help="released token ids, 16 x 2048 codes, 24 kHz; 25 million parameters"
    )
    size.add_argument(
        "--released",
        "--released-shape",
        dest="released_shape",
        action="store_true",
        help="configuration and tokenizer of Qwen3-Omni-30B-A3B, no weights: for `plan` and `--load-format dummy`",
    )
    parser.set_defaults(write=_qwen3_omni)
    parser = models.add_parser("bagel", help="both expert sets, ViT and autoencoder in about a million parameters")
    parser.add_argument("directory", type=Path, metavar="DIR", help="where to write; created if needed")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of all weights (default: 0)")
    parser.set_defaults(write=_bagel)
    tiny.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint and print where it is. Returns the exit status."""
    print(args.write(args))
    return 0


def _qwen3_omni(args: argparse.Namespace) -> Path:
    return write_qwen3_omni(
        args.directory, seed=args.seed, real_vocab=args.real_vocab, released_shape=args.released_shape
    )


def _bagel(args: argparse.Namespace) -> Path:
    return write_bagel(args.directory, seed=args.seed)
