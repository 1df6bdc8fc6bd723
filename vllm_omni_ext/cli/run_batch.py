"""`vllm-omni-ext run-batch -i FILE -o FILE`: send the requests of a file to a server, and write the answers."""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import IO

import httpx

from vllm_omni_ext.batch.lines import PRIORITY_HEADER, Done, Line, Result, read_done, read_lines
from vllm_omni_ext.batch.running import CONNECT_S, NotFetched, Sender, run
from vllm_omni_ext.cli.options import check_output, check_url, key_of_environment, positive
from vllm_omni_ext.errors import ConfigError, OmniError
from vllm_omni_ext.evaluation.servers import served

CONCURRENCY, ATTEMPTS = 32, 10
AGAIN = "run the same command again to continue"

SHORT = {"-oma": "--omni-master-address", "-omp": "--omni-master-port", "-ora": "--omni-replica-address"}
"""Short flags of `vllm serve` that begin like one of this command."""


def main(argv: Sequence[str]) -> int:
    """Send the requests of a file that have no answer in the output; the exit status is 1 if a request has an error."""
    args, flags = _arguments(argv)
    key = args.api_key or key_of_environment(started=bool(args.model))
    with args.output_file.open("ab") as output:
        try:
            fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"-o {args.output_file}: another process writes to it") from None
        done = read_done(args.output_file)
        output.truncate(done.size)
        if args.model and args.api_key:
            flags = [*flags, "--api-key", args.api_key]
        if args.model:
            print(f"starting vllm serve {args.model} --omni", file=sys.stderr)
        server = served(args.model, f"vllm serve {args.model}", flags) if args.model else nullcontext(args.url)
        with server as url:
            return asyncio.run(_run(args, url, key, done, output))


def _arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return (arguments of this command, flags for `vllm serve`)."""
    parser = argparse.ArgumentParser(
        prog="vllm-omni-ext run-batch",
        usage="vllm-omni-ext run-batch -i FILE -o FILE (--url URL | MODEL [flags of vllm serve]) [options]",
        description=main.__doc__,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--model", metavar="MODEL", help="start `vllm serve MODEL --omni`, and stop it at the end; or as the first word"
    )
    add("-i", "--input-file", type=_path, required=True, metavar="FILE", help="requests, JSONL; see docs/batch.md")
    add("-o", "--output-file", type=_path, required=True, metavar="FILE", help="answers; answered lines are skipped")
    add("--url", help="a server that runs")
    add("--concurrency", type=positive, default=CONCURRENCY, metavar="N", help=f"at a time (default: {CONCURRENCY})")
    add("--attempts", type=positive, default=ATTEMPTS, metavar="N", help=f"of a line (default: {ATTEMPTS})")
    add("--priority", type=int, metavar="N", help="vLLM's priority of all lines, over 0 is later than live requests")
    add(
        "--api-key",
        metavar="KEY",
        help="of the server (default: with MODEL VLLM_API_KEY of the environment, else OPENAI_API_KEY)",
    )
    words = list(argv)
    if words and not words[0].startswith("-"):
        words.insert(0, "--model")
    for word in words:
        if (short := word.partition("=")[0]) in SHORT:  # argparse would read -omp as -o mp
            parser.error(f"{short}: write {SHORT[short]}")
    args, flags = parser.parse_known_args(words)
    if (args.model is None) == (args.url is None):
        parser.error("write either --url URL, or the MODEL that is to be served")
    if flags and args.model is None:
        parser.error(f"unrecognized arguments: {' '.join(flags)}; flags of vllm serve need a MODEL")
    if not args.input_file.is_file():
        raise ConfigError(f"-i {args.input_file}: there is no such file")
    check_output("-o", args.output_file)
    if args.url is not None:
        check_url(args.url)
    return args, flags


def _path(text: str) -> Path:
    if "://" in text:
        raise argparse.ArgumentTypeError(f"must be a file of this machine, got {text}")
    return Path(text)


async def _run(args: argparse.Namespace, url: str, key: str | None, done: Done, output: IO[bytes]) -> int:
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    if args.priority is not None:
        headers[PRIORITY_HEADER] = str(args.priority)
    with args.input_file.open("rb") as source:
        total = sum(bool(line.strip()) for line in source)
    errors, console = 0, Console(stderr=True)
    limits = httpx.Limits(max_connections=None)
    timeout = httpx.Timeout(None, connect=CONNECT_S)
    base = url.rstrip("/").removesuffix("/v1")
    async with httpx.AsyncClient(base_url=base, timeout=timeout, limits=limits) as client:
        fetcher = httpx.AsyncClient(follow_redirects=True, timeout=CONNECT_S)
        with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=console) as progress:
            task = progress.add_task("batch", total=total, completed=done.count)

            def write(result: Result) -> None:
                nonlocal errors
                errors += not result.answered
                output.write(result.encoded())
                output.flush()
                progress.advance(task)

            async def fetch(address: str) -> bytes:
                try:
                    found = await fetcher.get(address)
                    return found.raise_for_status().content
                except (httpx.HTTPError, httpx.InvalidURL, ValueError) as err:
                    raise NotFetched(f"{address:.200}: could not be fetched: {err}") from None

            sender = Sender(client, fetch, headers=headers, attempts=args.attempts)
            try:
                async with fetcher:
                    await run(_left(args.input_file, done), sender, write, asyncio.Semaphore(args.concurrency))
            except OmniError as err:
                raise OmniError(f"{err}; {AGAIN}") from None
    if errors:
        console.print(f"{errors} lines have an error: see {args.output_file}", style="red")
    return int(bool(errors))


def _left(path: Path, done: Done) -> Iterator[Line]:
    with path.open("rb") as source:
        for line in read_lines(source):
            if not done.has(line):
                yield line
