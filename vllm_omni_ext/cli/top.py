"""`vllm-omni-ext top`: shows a live table of a server's replicas, from `/v1/omni/status` and `/metrics`."""

from __future__ import annotations

import argparse
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException
from typing import Any, TypedDict

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.live import Live
from rich.table import Table

from vllm_omni_ext import metrics as m
from vllm_omni_ext.cli.options import KEY_VARIABLE, check_url, more_than_0
from vllm_omni_ext.errors import OmniError
from vllm_omni_ext.metrics import PREFIX

STATUS, METRICS = "/v1/omni/status", "/metrics"
TOKENS = "vllm:generation_tokens_total"
TOTAL = "_total"
STATES = {"UP": "green", "SLEEPING": "cyan", "SUSPECT": "yellow", "DRAINING": "yellow", "DOWN": "red"}
ANSWER_S = 10.0
"""Timeout of a request to the server, in seconds."""

Labels = frozenset[tuple[str, str]]
Series = Mapping[tuple[str, Labels], float]


class _Replica(TypedDict):
    """The fields of a replica's status that the table shows."""

    id: str
    state: str
    host: str
    pid: int | None
    running: int
    waiting: int
    restarts: int


class _Stage(TypedDict):
    replicas: list[_Replica]


class Status(TypedDict):
    """The fields of `/v1/omni/status` that the table shows."""

    stages: list[_Stage]
    uptime_s: float


@dataclass(frozen=True)
class Sample:
    """Status and metrics of a server at one time.

    Attributes:
        at: monotonic time in seconds.
        status: JSON object of `/v1/omni/status`.
        series: values of all metrics, by (name, labels).
    """

    at: float
    status: Status
    series: Series


def rows(before: Sample, now: Sample) -> list[dict[str, Any]]:
    """Return a row for each replica: its status from `/v1/omni/status`, and the key `tokens_per_s`.

    `tokens_per_s` are the generated tokens per second between the two samples; None if unknown.
    """
    return [
        {**each, "tokens_per_s": _rate(before, now, TOKENS, {"replica": each["id"]})}
        for stage in now.status["stages"]
        for each in stage["replicas"]
    ]


def made(before: Sample, now: Sample) -> dict[str, float]:
    """Return the rates, per second, of this package's counters whose only label is `model_name`, between two samples.

    The rate of the counter `vllm_omni_ext:images_total` has the key "images".
    """
    names = sorted(
        {
            name
            for name, labels in now.series
            if name.startswith(PREFIX) and name.endswith(TOTAL) and {key for key, _ in labels} <= {m.MODEL}
        }
    )
    rates = {name.removeprefix(PREFIX).removesuffix(TOTAL): _rate(before, now, name, {}) for name in names}
    return {name.replace("_", " "): rate for name, rate in rates.items() if rate is not None}


def _rate(before: Sample, now: Sample, name: str, wanted: Mapping[str, str]) -> float | None:
    """Return the increase per second of a counter's series with the `wanted` labels; None if missing or reset."""
    sums: list[float | None] = []
    for sample in (before, now):
        found = [v for (known, labels), v in sample.series.items() if known == name and wanted.items() <= labels]
        sums.append(sum(found) if found else None)
    earlier, later = sums
    seconds = now.at - before.at
    if later is None or seconds <= 0 or later < (earlier or 0.0):
        return None
    return (later - (earlier or 0.0)) / seconds


def table(before: Sample, now: Sample, url: str) -> Table:
    """Return a table of the replicas, with the rates of the whole server (`made`) below. Rates need two samples."""
    rates = ", ".join(f"{name} {rate:.2f}/s" for name, rate in made(before, now).items())
    shown = Table(
        title=f"{url}, up {now.status['uptime_s']:.0f} s", caption=rates or None, box=None, padding=(0, 1, 0, 0)
    )
    for name in ("replica", "state"):
        shown.add_column(name, no_wrap=True)  # names are not cut on a terminal of 80 columns
    for name in ("running", "waiting", "tokens/s", "restarts", "pid"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("host")
    for row in rows(before, now):
        tokens = "-" if row["tokens_per_s"] is None else f"{row['tokens_per_s']:.1f}"
        state = f"[{STATES.get(row['state'], 'white')}]{row['state']}[/]"
        numbers = map(str, (row["running"], row["waiting"], tokens, row["restarts"], row["pid"]))
        shown.add_row(row["id"], state, *numbers, row["host"])
    return shown


class Client:
    """Reads the status and the metrics of one server.

    Args:
        url: address of the server; a path `/v1` at its end is removed.
        key: the API key; "": no key.
    """

    def __init__(self, url: str, key: str = "") -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._key = key
        check_url(url)

    def sample(self) -> Sample:
        """Return the current status and metrics of the server.

        Raises:
            OmniError: the server does not respond, refuses the key, or is not a server of this package.
        """
        status, metrics = self._get(STATUS), self._get(METRICS)
        try:
            series = {
                (each.name, frozenset(each.labels.items())): each.value
                for family in text_string_to_metric_families(metrics)
                for each in family.samples
            }
        except ValueError as error:
            raise self._other(f"{METRICS} is not in Prometheus' format") from error
        try:
            found = msgspec.json.decode(status, type=Status)
        except msgspec.ValidationError as error:
            raise self._other(f"its status page has other fields: {error}") from error
        except msgspec.DecodeError as error:
            raise self._other("its status page is not JSON") from error
        return Sample(time.monotonic(), found, series)

    def _other(self, why: str) -> OmniError:
        return OmniError(f"{self.url} is no server of vllm-omni-ext: {why}")

    def _get(self, path: str) -> str:
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        request = urllib.request.Request(self.url + path, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
                text: str = answer.read().decode()
                return text
        except urllib.error.HTTPError as error:
            if error.code == HTTPStatus.UNAUTHORIZED:
                what = "refuses this key" if self._key else "needs a key"
                raise OmniError(f"{self.url} {what}; give it with --api-key or {KEY_VARIABLE}") from error
            if error.code == HTTPStatus.NOT_FOUND:
                raise OmniError(f"{self.url} is no server of vllm-omni-ext: it has no {path}") from error
            raise OmniError(f"{self.url}{path} answers with status {error.code}") from error
        except HTTPException as error:
            raise OmniError(f"no server answers at {self.url}: {error!r}") from error
        except (OSError, ValueError) as error:
            raise OmniError(f"no server answers at {self.url}: {getattr(error, 'reason', error)}") from error


def main(argv: Sequence[str]) -> int:
    """Show the table until Ctrl-C, or once with `--once`; return the exit status. OmniError: see `Client.sample`."""
    args = _parser().parse_args(argv)
    client = Client(args.url, args.api_key or os.environ.get(KEY_VARIABLE, ""))
    console, pause = Console(), threading.Event()
    before = client.sample()
    pause.wait(args.interval)
    now = client.sample()
    if args.once:
        console.print(table(before, now, client.url))
        return 0
    shown = Live(table(before, now, client.url), console=console, auto_refresh=False)
    with suppress(KeyboardInterrupt), shown as live:
        while not pause.wait(args.interval):
            before, now = now, client.sample()
            live.update(table(before, now, client.url), refresh=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-omni-ext top", description="Show the replicas of a running server and how busy they are."
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the server (default: %(default)s)")
    parser.add_argument(
        "--interval", type=more_than_0, default=2.0, metavar="SECONDS", help="time between two looks (default: 2)"
    )
    parser.add_argument("--once", action="store_true", help="look twice, print one table and end")
    parser.add_argument("--api-key", metavar="KEY", help=f"the server's key; left out: {KEY_VARIABLE}")
    return parser
