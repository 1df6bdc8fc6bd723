"""Measures text-only answers a second of our server and of stock vLLM with the same flags, one after the other.

python benchmarks/gpu_text.py MODEL [--tiny] [--fp8] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # run as a file, from anywhere

import aiohttp

from examples.server import Server, command

STOCK = Path(__file__).with_name("stock.py")
MODEL = "model"
AT_ONCE = 32
ROUNDS = 8
TOKENS = 128
CACHE_BYTES = 4 << 30
PATIENCE_S = 300.0


def flags(*, tiny: bool) -> list[str]:
    """Return the flags of both servers, so that their engines have the same KV cache and batch size."""
    common = ["--served-model-name", MODEL, "--max-model-len", "2048", "--max-num-seqs", str(AT_ONCE)]
    released = ["--load-format", "dummy", "--kv-cache-memory-bytes", str(CACHE_BYTES), "--dtype", "bfloat16"]
    return common if tiny else [*common, *released]


async def answers(url: str, count: int, at_once: int, tokens: int) -> float:
    """Request `count` answers of `tokens` tokens, `at_once` at a time; return the seconds until all are complete."""
    places = asyncio.Semaphore(at_once)
    body: dict[str, Any] = {
        "model": MODEL,
        "modalities": ["text"],
        "messages": [{"role": "user", "content": "Tell me about the blue cat in the moon"}],
        "temperature": 0,
        "ignore_eos": True,
        "max_completion_tokens": tokens,
    }

    async def one(session: aiohttp.ClientSession) -> None:
        async with places, session.post(f"{url}/chat/completions", json=body) as reply:
            answer = await reply.json()
            if reply.status != 200 or answer["usage"]["completion_tokens"] != tokens:
                raise RuntimeError(f"status {reply.status}: {answer}")

    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        began = time.perf_counter()
        await asyncio.gather(*(one(session) for _ in range(count)))
        return time.perf_counter() - began


def server_of(model: str, words: Sequence[str], given: Sequence[str], log: Path) -> Server:
    """Return a server that is not started yet.

    Args:
        words: command of a stock server, which gets no flag --omni; empty: our server.
        given: flags of `vllm serve`.
    """
    server = Server(model, log, given)
    if words:
        server.words = [*words, *(word for word in server.words[len(command()) :] if word != "--omni")]
    return server


def words_of(model: str, words: Sequence[str], given: Sequence[str]) -> list[str]:
    """Return the command line of the server that `server_of` makes from the same arguments."""
    return server_of(model, words, given, Path("log")).words


def measure(words: Sequence[str], model: str, given: Sequence[str], args: argparse.Namespace) -> float:
    """Start a server (see `server_of`), and return its text-only answers a second."""
    with (
        tempfile.TemporaryDirectory(prefix="omni-bench-") as folder,
        server_of(model, words, given, Path(folder, "server.log")) as server,
    ):
        asyncio.run(answers(server.base_url, args.at_once, args.at_once, args.tokens))
        count = args.at_once * args.rounds
        return count / asyncio.run(answers(server.base_url, count, args.at_once, args.tokens))


def main() -> None:
    """Run this benchmark from the command line, and print its results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory or hub id")
    parser.add_argument("--tiny", action="store_true", help="a tiny checkpoint, with weights, and few short answers")
    parser.add_argument("--fp8", action="store_true", help="weights in FP8, in both servers")
    parser.add_argument("--json", type=Path, help="file that takes the figures")
    args = parser.parse_args()
    args.at_once, args.rounds, args.tokens = (2, 1, 8) if args.tiny else (AT_ONCE, ROUNDS, TOKENS)
    given = [*flags(tiny=args.tiny), *(["--quantization", "fp8"] if args.fp8 else [])]
    ours = measure((), args.model, given, args)
    stock = measure((sys.executable, str(STOCK)), args.model, given, args)
    print(f"ours {ours:.2f} answers/s, stock vLLM {stock:.2f}, ours / stock {ours / stock:.3f}")
    if args.json is not None:
        args.json.write_text(json.dumps({"ours_per_s": ours, "stock_per_s": stock, "ratio": ours / stock}))


if __name__ == "__main__":
    main()
