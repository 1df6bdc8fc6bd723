"""`vllm-omni-ext eval --suite FILE`: send the items of a suite to servers, score and compare the answers."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import platform
import shlex
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import msgspec

from vllm_omni_ext import __version__
from vllm_omni_ext.cli.options import check_output, check_url, key_of_environment, positive
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.evaluation.recognisers import Recogniser, recogniser
from vllm_omni_ext.evaluation.report import Run, Scored, as_json, from_json, judge, junit, table
from vllm_omni_ext.evaluation.scores import SCORERS
from vllm_omni_ext.evaluation.servers import Answer, ask_all, served
from vllm_omni_ext.evaluation.suite import Item, Suite, load

URL = "http://127.0.0.1:8000/v1"


def main(argv: Sequence[str]) -> int:
    """Send a suite of requests to servers and score the answers; the exit status is 1 if a server does not pass."""
    args = _parser().parse_args(argv)
    for flag in ("json", "junit"):
        check_output(f"--{flag}", getattr(args, flag))
    suite, topologies = load(args.suite), _topologies(args)
    baseline = _baseline(args.baseline, suite) if args.baseline else None
    listen = recogniser(suite.recogniser, suite.vocabulary) if suite.recogniser else None
    runs = []
    for name, server in topologies.items():
        with server as url:
            runs.append(_run(name, url, suite, listen, args))
    verdicts = [judge(suite, run, runs[0], baseline, args.alike) for run in runs]
    if args.json:
        machine = {"python": platform.python_version(), "machine": platform.platform()}
        args.json.write_bytes(as_json(verdicts, {"vllm_omni_ext": __version__, **machine}))
    if args.junit:
        args.junit.write_bytes(junit(verdicts))
    from rich.console import Console

    Console().print(table(verdicts))
    return int(any(verdict.problems for verdict in verdicts))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vllm-omni-ext eval", description=main.__doc__)
    add = parser.add_argument
    add("--suite", type=Path, required=True, metavar="FILE", help="YAML, see docs/accuracy.md")
    add("--url", action="append", metavar="[NAME=]URL", help=f"a server; several are compared (default: {URL})")
    add("--serve", metavar="MODEL", help="start `vllm serve MODEL --omni` for each --topology, one by one")
    add("--topology", action="append", metavar="NAME=FLAGS", help="flags of a server that --serve starts")
    add("--model", help="name of the model (default: the server's only one)")
    add("--baseline", type=Path, metavar="FILE", help="JSON of an earlier run: fail if this one is worse")
    add("--alike", action="store_true", help="fail if a server's answers are not those of the first one")
    add("--json", type=Path, metavar="FILE", help="write all scores, for a later --baseline")
    add("--junit", type=Path, metavar="FILE", help="write JUnit XML")
    add("--at-once", type=positive, default=8, metavar="N", help="requests at once (default: 8)")
    return parser


def _topologies(args: argparse.Namespace) -> dict[str, AbstractContextManager[str]]:
    """Return a context manager for each server, by name: it starts the server if needed, and yields its URL."""
    if bool(args.topology) and not args.serve:
        raise ConfigError("--topology: starts servers; name the model with --serve MODEL")
    if args.serve and args.url:
        raise ConfigError("--url: names a server that runs; with --serve, leave it out")
    found: list[tuple[str, AbstractContextManager[str]]]
    if args.serve:
        named = [each.partition("=") for each in args.topology or ["usual="]]
        found = [(name, served(args.serve, f"topology '{name}'", _flags(name, flags))) for name, _, flags in named]
    else:
        found = [(name, nullcontext(url)) for name, url in map(_named, args.url or [URL])]
    names = [name for name, _ in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"two servers are called {', '.join(twice)}; write NAME=... with different names")
    return dict(found)


def _flags(name: str, flags: str) -> list[str]:
    """Split the flags of an option `--topology NAME=FLAGS` into arguments, as a shell does.

    Args:
        name: the option's NAME, for the error.
        flags: the option's FLAGS.

    Raises:
        ConfigError: a quotation mark is not closed.
    """
    try:
        return shlex.split(flags)
    except ValueError as err:
        raise ConfigError(f"--topology {name}={flags}: {err}") from None


def _named(url: str) -> tuple[str, str]:
    """Return (name, URL with `/v1` at its end) of the option value NAME=URL. Without NAME, the URL is the name."""
    name, separator, rest = url.partition("=")
    if not separator or "://" in name:
        name = rest = url
    check_url(rest)
    return name, rest.rstrip("/").removesuffix("/v1") + "/v1"


def _baseline(file: Path, suite: Suite) -> Run:
    try:
        return from_json(file.read_bytes(), suite)
    except OSError as err:
        raise ConfigError(f"--baseline {file}: cannot be read: {err.strerror}") from None
    except (msgspec.MsgspecError, ValueError) as err:
        raise ConfigError(f"--baseline {file}: {err}") from None


def _run(name: str, url: str, suite: Suite, listen: Recogniser | None, args: argparse.Namespace) -> Run:
    from rich.markup import escape
    from rich.progress import Progress

    key = key_of_environment(started=bool(args.serve)) or "none"
    with Progress(transient=True) as progress:
        task = progress.add_task(escape(name), total=len(suite.items))
        done = partial(progress.advance, task)
        model, answers = asyncio.run(ask_all(url, key, args.model, suite, args.at_once, done))
    items = [scored(suite, item, answers[item.id], listen) for item in suite.items]
    return Run(suite.name, suite.digest(), name, model, items)


def scored(suite: Suite, item: Item, answer: Answer, listen: Recogniser | None) -> Scored:
    """Return the score of an answer; 0 with an error if the answer or its sound is missing.

    Args:
        item: one request of the suite, with the expected text.
        listen: returns the text that is spoken in a sound; None if the suite has no recogniser.
    """
    sound = hashlib.sha256(answer.sound).hexdigest() if answer.sound else None
    if answer.error is not None:
        return Scored(item.id, 0.0, error=answer.error)
    scorer = SCORERS[item.score or suite.score]
    if not item.listen:
        return Scored(item.id, scorer(answer.text, item.expected), answer.text, sound=sound)
    if not answer.sound or listen is None:
        return Scored(item.id, 0.0, answer.text, error="the answer has no sound")
    try:
        heard = listen(answer.sound)
    except (RuntimeError, ValueError) as err:  # soundfile's error for anything but WAV, FLAC, OGG or MP3
        return Scored(item.id, 0.0, answer.text, sound=sound, error=f"the sound cannot be read: {err}")
    return Scored(item.id, scorer(heard, item.expected), answer.text, heard=heard, sound=sound)
