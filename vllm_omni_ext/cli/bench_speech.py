"""`vllm-omni-ext bench speech`: measures the times of a server's spoken answers under load, at the client."""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from vllm_omni_ext import __version__
from vllm_omni_ext.cli.options import check_output, check_url, count, more_than_0, not_negative, positive
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.loadtest.answers import Answer, Clock
from vllm_omni_ext.loadtest.client import Api, Request, connections, measured, only_model
from vllm_omni_ext.loadtest.figures import figures
from vllm_omni_ext.loadtest.http import Chat, Speech
from vllm_omni_ext.loadtest.realtime import TURN_DETECTION, Realtime, read_turn
from vllm_omni_ext.loadtest.report import as_json, table
from vllm_omni_ext.loadtest.schedule import arrivals, closed_loop, open_loop

URL = "http://127.0.0.1:8000/v1"
APIS = ("chat", "speech", "realtime")
PROMPTS = (
    "Why is the sky blue? Answer in two sentences.",
    "Give me a short recipe for pancakes.",
    "What is the difference between a violin and a viola?",
    "Tell me one fact about the Moon.",
    "How does a bicycle stay upright?",
    "Describe a walk along the sea.",
    "What should I pack for a weekend in the mountains?",
    "Explain in simple words how a radio works.",
)


def main(argv: Sequence[str]) -> int:
    """Send spoken requests to a server and print times at the client; the exit status is 1 if any request failed."""
    args = _arguments(argv)
    answers = asyncio.run(_run(args))
    found = figures(answers)
    if args.json:
        args.json.write_bytes(as_json(_settings(args), found, answers))
    Console().print(table(found, f"{args.api}, {_load(args)}"))
    _print_failures("failed", answers)
    return int(bool(found.failures))


def _print_failures(what: str, answers: Iterable[Answer]) -> None:
    for line in dict.fromkeys(f"{each.failure}: {each.detail}" for each in answers if each.failure is not None):
        print(f"{what}: {line}", file=sys.stderr)


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="vllm-omni-ext bench speech", description=main.__doc__)
    parser.add_argument("--url", default=URL, help=f"the server's OpenAI API (default: {URL})")
    parser.add_argument("--api", choices=APIS, default="chat", help="default: chat")
    parser.add_argument("--model", help="name of the model (default: the first that the server lists)")
    load = parser.add_mutually_exclusive_group(required=True)
    load.add_argument("--concurrency", type=positive, metavar="N", help="closed loop: N requests at a time")
    load.add_argument(
        "--rate", type=more_than_0, metavar="R", help="open loop: R requests a second, at random times (Poisson)"
    )
    parser.add_argument("--requests", type=positive, default=32, metavar="N", help="measured requests (default: 32)")
    parser.add_argument("--warmup", type=count, default=1, metavar="N", help="requests before them (default: 1)")
    parser.add_argument("--seed", type=count, default=0, help="of the random times (default: 0)")
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="several take turns (default: 8 built in)")
    parser.add_argument("--audio", action="append", type=Path, metavar="FILE", help="input sound; several take turns")
    parser.add_argument("--voice", help="name of the speaker (default: the server's)")
    parser.add_argument("--max-tokens", type=positive, metavar="N", help="max_completion_tokens, max_output_tokens")
    parser.add_argument(
        "--extra-body", type=_object, default={}, metavar="JSON", help="more fields of each request, or of the session"
    )
    parser.add_argument(
        "--realtime-input-speed", type=not_negative, metavar="S", help="1: real time (default), 0: the turn at once"
    )
    parser.add_argument("--turn-detection", choices=TURN_DETECTION, help="of Realtime sessions (default: none)")
    parser.add_argument("--timeout", type=more_than_0, default=600.0, metavar="S", help="of a request (default: 600)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write settings, figures and all answers")
    args = parser.parse_args(argv)
    _check(args)
    args.url = args.url.rstrip("/").removesuffix("/v1") + "/v1"
    return args


def _check(args: argparse.Namespace) -> None:
    """Raise ConfigError if an option is wrong or not one of the selected API, or the output file cannot be written."""
    check_url(args.url)
    check_output("--json", args.json)
    realtime = args.api == "realtime"
    refused = {
        "--audio": args.audio and args.api == "speech",
        "--max-tokens": args.max_tokens and args.api == "speech",
        "--realtime-input-speed": args.realtime_input_speed is not None and not (realtime and args.audio),
        "--turn-detection": args.turn_detection and not (realtime and args.audio),
    }
    for flag, wrong in refused.items():
        if wrong and args.api == "speech":
            raise ConfigError(f"{flag}: --api speech has no such field")
        if wrong:
            raise ConfigError(f"{flag}: only with --api realtime and --audio FILE")
    if realtime and args.audio and args.prompt:
        raise ConfigError("--prompt: with --api realtime a turn is spoken or written; leave out --prompt or --audio")


async def _run(args: argparse.Namespace) -> list[Answer]:
    """Send the warm-up requests, then the measured requests; return the answers to the measured requests."""
    clock = time.perf_counter
    async with connections(os.environ.get("OPENAI_API_KEY")) as session:
        args.model = args.model or await only_model(session, args.url)
        api = _api(args, clock)
        columns = (*Progress.get_default_columns(), MofNCompleteColumn())
        with Progress(*columns, transient=True) as progress:
            task = progress.add_task(args.api, total=args.warmup + args.requests)

            async def one(number: int, due_at: float | None) -> Answer:
                answer = await measured(api, session, clock, args.timeout, number, due_at)
                progress.advance(task)
                return answer

            warm = await closed_loop(args.warmup, args.concurrency or 1, one)
            _print_failures("failed in the warm-up", warm)
            if args.rate is None:
                return await closed_loop(args.requests, args.concurrency, one)
            return await open_loop(arrivals(args.requests, args.rate, args.seed), one, clock)


def _api(args: argparse.Namespace, clock: Clock) -> Api:
    realtime = args.api == "realtime"
    prompts = tuple(args.prompt or (() if args.audio else PROMPTS))
    sounds = tuple(map(read_turn if realtime else _input_audio, args.audio or ()))
    request = Request(
        model=args.model,
        prompts=prompts,
        sounds=sounds,
        voice=args.voice,
        max_tokens=args.max_tokens,
        extra=args.extra_body,
    )
    if realtime:
        speed = 1.0 if args.realtime_input_speed is None else args.realtime_input_speed
        return Realtime(args.url, request, speed=speed, turn_detection=args.turn_detection or "none", clock=clock)
    return Chat(args.url, request) if args.api == "chat" else Speech(args.url, request)


def _input_audio(file: Path) -> tuple[str, str]:
    """Return (contents of the file as base64, format from its suffix)."""
    try:
        return base64.b64encode(file.read_bytes()).decode("ascii"), file.suffix.removeprefix(".").lower()
    except OSError as err:
        raise ConfigError(f"--audio {file}: cannot be read: {err.strerror}") from None


def _load(args: argparse.Namespace) -> str:
    return f"{args.concurrency} at a time" if args.rate is None else f"{args.rate:g} requests/s"


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    named = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    named["audio"] = [str(file) for file in args.audio or ()]
    return {
        **named,
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "vllm_omni_ext": __version__,
        "python": platform.python_version(),
        "machine": platform.platform(),
    }


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as err:
        raise argparse.ArgumentTypeError(f"is no JSON: {err}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text}")
    return value
