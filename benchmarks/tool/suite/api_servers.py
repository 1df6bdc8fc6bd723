"""Time to the first token and requests a second with 1 and 2 API servers, compared with stock vLLM with as many."""

from __future__ import annotations

from typing import Any

from benchmarks.tool.description import Description, Options, program
from benchmarks.tool.results import Comparison, Result

OURS, STOCK = "ours", "stock vLLM"

DESCRIPTION = Description(
    name="api_servers",
    compares="time to the first token, between tokens, and requests a second of text, with 1 and 2 API servers",
    baseline="stock vLLM with as many API servers and the same simulated device time",
    quick={"servers": [1], "kinds": ["text"], "rate": 10, "seconds": 2},
    full={"servers": [1, 2], "kinds": ["text", "audio"], "rate": 40, "seconds": 20},
    memory_gib=8,
    cannot_show="what a second API server brings where cores are left over, if the machine has only two.",
)


def comparisons(found: list[dict[str, Any]]) -> list[Comparison]:
    """Compare our run and stock vLLM's run of each load and number of API servers.

    Args:
        found: the figures of each run, as `api_servers.py` writes them (`Run.figures`).
    """
    runs = {(run["who"], run["kind"], run["servers"]): run for run in found}
    made = []
    for who, kind, servers in runs:
        if who == OURS:
            pair = [runs[each, kind, servers] for each in (OURS, STOCK)]
            load = f"{kind}, API servers: {servers}"
            measured = (first_ms, gaps_ms, per_second, cpu_ms)
            first, gaps, rate, cpu = ([figure(run) for run in pair] for figure in measured)
            made.append(Comparison(f"first token, {load}", "ms", OURS, STOCK, *first))
            made.append(Comparison(f"between tokens, {load}", "ms", OURS, STOCK, *gaps))
            made.append(Comparison(f"requests a second, {load}", "/s", OURS, STOCK, *rate, True))
            made.append(Comparison(f"CPU time a request, {load}", "ms", OURS, STOCK, *cpu))
    return made


def first_ms(run: dict[str, Any]) -> list[float]:
    """Return the time to the first token of every request of a run, in ms."""
    return [1e3 * seconds for seconds in run["first_s"]]


def gaps_ms(run: dict[str, Any]) -> list[float]:
    """Return all times between two successive tokens of a request, in ms."""
    return [1e3 * seconds for seconds in run["gaps_s"]]


def per_second(run: dict[str, Any]) -> list[float]:
    """Return one sample: the requests a second of the whole run."""
    return [run["requests_per_s"]]


def cpu_ms(run: dict[str, Any]) -> list[float]:
    """Return one sample: CPU time of all processes of the server divided by the number of requests, in ms."""
    return [sum(ms for kind, ms in run["cpu_ms_per_request"].items() if kind != "this program")]


def run(options: Options) -> Result:
    """Run `api_servers.py`, which measures one server after the other, and compare its results."""
    found = program("api_servers.py", options, DESCRIPTION.sizes(options))
    return Result(DESCRIPTION.name, comparisons=comparisons(found))
