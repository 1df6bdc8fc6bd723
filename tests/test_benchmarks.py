"""`python -m benchmarks` and its programs: options, reports, figures and pages. Nothing is measured."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import soundfile

from benchmarks.tool import cli, description, figures, markdown
from benchmarks.tool import environment as environment_module
from benchmarks.tool.description import Description, Options, ProgramFailed, program
from benchmarks.tool.results import BadReport, Comparison, Report, Result, decode
from benchmarks.tool.suite import (
    api_servers,
    first_audio,
    handoff,
    layouts,
    memory,
    overhead,
    prefill_decode,
    replicas,
    silence,
    speakers,
    startup,
)

ROOT = Path(__file__).parents[1]
SMALL = Path(__file__).parent / "data" / "benchmarks.json"
PAIRED = Comparison("step", "ms", "ours", "bare <client>", [2.0, 3.0, 4.0], [1.0, 2.0, 2.0], paired=True)
SAMPLES = np.arange(-5, 5, dtype="<i2")
Import = Callable[[str], ModuleType]


def small() -> Report:
    return decode(SMALL.read_bytes())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "truncated"),
        (b'{"schema": 2}', "schema 2"),
        (SMALL.read_bytes().replace(b"[41.0, 38.0, 52.0]", b"[]"), "no samples of"),
    ],
)
def test_a_file_that_is_no_report_is_refused(data: bytes, message: str):
    with pytest.raises(BadReport, match=message):
        decode(data)


def test_a_ratio_is_that_of_the_medians_with_the_spread_of_the_pairs():
    assert (PAIRED.ratio, PAIRED.ratios) == (1.5, [2.0, 1.5, 2.0])
    assert figures.ratio(PAIRED) == "1.50 (1.50 to 2.00)"
    assert figures.ratio(msgspec.structs.replace(PAIRED, paired=False)) == "1.50"
    assert figures.ratio(Comparison("x", "s", "a", "b", [1.0], [0.0])) == "none, the baseline is 0"
    with pytest.raises(ValueError, match="3 samples cannot pair with 1"):
        msgspec.structs.replace(PAIRED, baseline_samples=[1.0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["replica", "memory"], "did you mean replicas?"),
        (["--json", "nowhere/out.json"], "there is no folder nowhere"),
        (["--from", "missing.json"], "No such file"),
        (["--from", str(ROOT / "README.md")], "malformed"),
        (["memory", "--from", str(SMALL)], "leave out the names"),
    ],
)
def test_bad_options_are_one_error_before_anything_runs(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    assert cli.main(options) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.engine
def test_a_program_gets_its_flags_and_its_failure_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(description, "PROGRAMS", tmp_path)
    source = "import json, sys; open(sys.argv[-1], 'w').write(json.dumps(sys.argv[1:-1]))"
    (tmp_path / "echo.py").write_text(source)
    assert program("echo.py", Options("some-model"), {"rounds": 3}) == ["some-model", "--rounds", "3", "--json"]
    for source, status in (("raise SystemExit('no cache')", 1), ("print('no cache')", 0)):
        (tmp_path / "bad.py").write_text(source)
        with pytest.raises(ProgramFailed, match=rf"(?s)bad\.py ended with status {status}.*no cache"):
            program("bad.py", Options(), {})


@pytest.mark.engine
def test_a_benchmark_that_fails_or_does_not_fit_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch):
    def module(name: str, memory_gib: float, failed: str = "") -> Any:
        def run(options: Options) -> Result:
            if failed:
                raise ProgramFailed(failed)
            return Result(name, comparisons=[PAIRED])

        return SimpleNamespace(DESCRIPTION=Description(name, "this", "that", {}, {}, memory_gib, "much."), run=run)

    each = {"bad": module("bad", 0, "status 3"), "large": module("large", 1e6), "good": module("good", 0)}
    monkeypatch.setattr(cli, "BENCHMARKS", each)
    monkeypatch.setattr(environment_module, "LOOK_S", 0.01)
    kept: list[int] = []
    report = cli.measure([], Options(quick=True), lambda so_far: kept.append(len(so_far.results)))
    assert kept == [1, 2]
    assert [(result.name, bool(result.failed)) for result in report.results] == [("bad", True), ("good", False)]
    assert "1e+06 GiB" in report.left_out["large"]
    assert [result.name for result in cli.measure(["large"], Options()).results] == ["large"], "it was named"


def served(who: str, first: float) -> dict[str, Any]:
    spent = {"engines": 3.0, "API servers": 1.0, "this program": 9.0}
    base = {"who": who, "kind": "text", "servers": 2, "requests_per_s": 5.0, "cpu_ms_per_request": spent}
    return base | {"first_s": [first], "gaps_s": [0.02]}


STARTS = {
    "ours": [{"seconds": 2.0, "memory_gb": {"talker": 1.0, "API server": 0.5}}],
    "stock": [{"seconds": 4.0, "memory_gb": {"python": 2.0, "python (2)": 1.0}}],
}
TURN = {"bytes": 100, "cpu": {"a": 0.2, "b": 0.1}}
TURNS = [{"edge": "text", "single": [TURN], "whole": [TURN | {"bytes": 50}]}]
SOUNDS = {"short": {"on": [{"first": s, "spans": []} for s in (0.1, 0.2, 0.9)], "off": [{"first": 1.0}] * 3}}
ROWS = {"ours": {"p50": 0.3}, "bare client": {"p50": 0.2}}
TALKERS = {"talker": {"rates": {"1": [10.0], "2": [20.0]}, "overhead_ms": {"4": ROWS}}}
ONE = {"seconds": 10, "ended": 20, "first_token": [0.1], "first_sound": [0.2]}
SEEN = {"writers": {"first": [0.1], "gaps": [0.01]}, "readers": {"first": [0.3], "gaps": []}}
ROLES = {"2 do both": SEEN, "1 prefills, 1 decodes": SEEN, "copy_bytes_s": 1.0}
LATE, EARLY = [{"late_s": 0.1, "first_s": 0.05}], [{"late_s": 0.0, "first_s": 0.06}]
SPOKEN = [
    {"speakers": 32, "answers": [3.0], "answer_device": 2.0, "intervals": [0.04], "device": [0.02], "own_cpu": 0.2}
    | {"steps": 100}
]
ORDERS = [["fcfs", 1, 4, LATE], ["fcfs", 2, 4, LATE], ["priority", 2, 4, EARLY]]


@pytest.mark.parametrize(
    ("module", "found", "ratios"),
    [
        (startup, STARTS, [0.5]),
        (memory, STARTS, [0.5, 1 / 3, 0.5 / 3]),
        (handoff, TURNS, [2.0, 1.0]),
        (first_audio, SOUNDS, [0.2]),
        (replicas, TALKERS, [2.0, 1.5]),
        (api_servers, [served("ours", 0.1), served("stock vLLM", 0.2)], [0.5, 1.0, 1.0, 1.0]),
        (layouts, {"1": [ONE], "2": [ONE | {"ended": 40}, ONE | {"first_token": [0.1, 0.2]}]}, [1.5, 1.0, 1.0]),
        (silence, ORDERS, [0.0, 1.2]),
        (speakers, SPOKEN, [1.5, 2.0, 0.1]),
        (prefill_decode, ROLES, [1.0, 1.0, 1.0]),
    ],
)
def test_results_of_programs_become_comparisons(module: Any, found: Any, ratios: list[float]):
    assert sorted(each.ratio for each in module.comparisons(found)) == pytest.approx(sorted(ratios))
    assert overhead.comparison(8, {"ours": [11.0], "stock": [10.0]}).ratio == pytest.approx(1.1)


def test_the_page_is_made_of_a_stored_run_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    page, text, copy = tmp_path / "page.html", tmp_path / "page.md", tmp_path / "copy.json"
    options = ["--html", str(page), "--markdown", str(text), "--json", str(copy)]
    assert cli.main(["--from", str(SMALL), *options]) == 1, "one of its benchmarks failed"
    assert decode(copy.read_bytes()) == small()
    made = page.read_text()
    assert "<script" not in made and "src=" not in made and "href=" not in made
    assert "41 (38 to 52)" in made and "0.50 (0.48 to 0.51)" in made and "first &lt;sound&gt;" in made
    assert "ended with status 1" in made and "needs 12 GiB" in made and "abc123" in made
    assert [ElementTree.fromstring(plot).tag for plot in re.findall(r"<svg.*?</svg>", made)] == ["svg"] * 2
    assert "| first <sound>, ms | chunks: 41 (38 to 52) | chunks off: 82 (79 to 102) | 0.50" in text.read_text()
    assert "No figures: ProgramFailed: pd.py ended with status 1" in capsys.readouterr().out


def test_a_page_marks_a_run_on_a_busy_machine_or_of_the_smallest_sizes():
    report = small()
    assert "smallest sizes" not in markdown.page(report) and "Other programs were running" not in markdown.page(report)
    report.quick = True
    assert report.environment is not None
    for more in ({"load": [3.0, 3.0]}, {"busy": [0.0, 0.2]}):
        report.environment = msgspec.structs.replace(report.environment, **more)
        assert "smallest sizes" in markdown.page(report) and "Other programs were running" in markdown.page(report)


def test_the_page_in_docs_is_that_of_the_stored_run():
    stored = decode((ROOT / "benchmarks" / "measured.json").read_bytes())
    written = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert written == markdown.page(stored), (
        "python -m benchmarks --from benchmarks/measured.json --markdown docs/benchmarks.md"
    )


def test_the_cost_of_a_message_is_the_difference_of_two_turns(benchmark: Import) -> None:
    cost_module: Any = benchmark("handoff_cost")

    def turn(messages: int, bytes_: int, add: float, cpu: float, **calls: int) -> Any:
        counts = {cost_module.API: Counter(calls), "talker/0": Counter(read=5)}
        return cost_module.Turn(messages, bytes_, [add], {cost_module.API: cpu, "talker/0": 0.5}, counts)

    single = [turn(101, 5000, add, cpu, sendmsg=201, openat=3) for add, cpu in ((20e-6, 0.30), (30e-6, 0.40))]
    cost = cost_module.cost("text", single, [turn(1, 1000, 1.0, 0.10, sendmsg=1, openat=3)] * 2)
    assert (cost.messages, cost.bytes, cost.naming, cost.often) == (100, 40.0, 0.0, {"sendmsg": 2.0})
    assert (cost.add_us, cost.cpu_us[cost_module.API], cost.calls["talker/0"]) == pytest.approx((25, 2500, 0))


OPENS = """
import os, sys
print("ready", flush=True)
sys.stdin.readline()
for _ in range(7):
    os.getppid()  # Python itself never calls it
print("done", flush=True)
sys.stdin.readline()
"""


@pytest.mark.engine
@pytest.mark.needs("strace")
def test_system_calls_of_a_process_are_counted(benchmark: Import) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-uc", OPENS], text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            assert process.stdout.readline() == "ready\n"
            with benchmark("syscalls").counted({"it/0": process.pid}) as counts:
                print(file=process.stdin, flush=True)
                process.stdout.readline()
        finally:
            process.kill()
    assert counts["it/0"]["getppid"] == 7


def test_a_soak_run_compares_whole_answers(benchmark: Import) -> None:
    soak: Any = benchmark("soak")

    def event(**delta: Any) -> bytes:
        return b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\n\n"

    soundfile.write(file := io.BytesIO(), SAMPLES, 24_000, format="wav", subtype="PCM_16")
    encoded = base64.b64encode(file.getvalue()).decode()
    chat = json.dumps({"choices": [{"message": {"content": "moon", "audio": {"data": encoded}}}]}).encode()
    half = [base64.b64encode(part.tobytes()).decode() for part in np.split(SAMPLES, 2)]
    stream = event(content="mo") + event(audio={"data": half[0]}) + event(content="on") + event(audio={"data": half[1]})
    assert soak.same(soak.heard("spoken", chat), ("moon", SAMPLES))
    assert soak.same(soak.heard("read aloud", file.getvalue()), ("", SAMPLES))
    assert soak.same(soak.heard("streamed", stream + b"data: [DONE]\n\n"), ("moon", SAMPLES + 1))
    with pytest.raises(soak.Wrong, match="gone"):
        soak.heard("streamed", stream + b'data: {"error": {"message": "gone"}}\n\n')
    for text, samples in (("a", SAMPLES + 2), ("a", SAMPLES[1:]), ("b", SAMPLES)):
        assert not soak.same(("a", SAMPLES), (text, samples))


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"descriptors": {"head": 8}, "shared_names": 1}, []),
        ({"descriptors": {"head": 11}}, ["head: 2 more descriptors"]),
        ({"threads": {"head": 4}}, ["head: 1 more threads"]),
        ({"threads": {"head": 3, "api_server/0": 22}}, []),
        ({"threads": {"head": 3, "api_server/0": 23}}, ["api_server/0: 23 more threads"]),
        ({"zmq_threads": {"head": 1, "api_server/0": 4}}, ["api_server/0: 4 more threads of connections"]),
        ({"shared_names": 3}, ["1 more names in /dev/shm"]),
        ({"requests": 1.0, "blocks": 0.5}, ["requests are held", "blocks are held"]),
    ],
)
def test_a_soak_run_finds_leaks(benchmark: Import, changes: dict[str, Any], found: list[str]) -> None:
    soak: Any = benchmark("soak")
    usual = {"pss": {"head": 100}, "rss": {"head": 200}, "descriptors": {"head": 9}, "threads": {"head": 3}}
    usual |= {"zmq_threads": {"head": 1}, "shared_bytes": 5, "shared_names": 2, "requests": 0.0, "blocks": 0.0}
    before = soak.Level(**usual)
    assert soak.Level(**usual | changes).left_over(before) == found
    grown = soak.Level(**usual | {"pss": {"head": 90, "talker/0": 20}, "rss": {"head": 150, "talker/0": 50}})
    assert soak.Result(levels=[before, grown]).growth() == pytest.approx({"pss": 0.1, "rss": 0.0})


async def test_an_open_loop_sends_at_the_same_times_without_answers(benchmark: Import) -> None:
    load: Any = benchmark("stage_load")

    async def sent(seed: int) -> list[float]:
        dues, enough, ended = list[float](), asyncio.Event(), []

        async def unanswered(due: float) -> None:
            dues.append(due)
            if len(dues) == 20:
                enough.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(due)

        async with load.open_loop(unanswered, 1000.0, seed):
            await enough.wait()
        assert sorted(ended) == sorted(dues)
        return np.diff(dues)[:19].tolist()

    first, again, other = [await sent(seed) for seed in (0, 0, 1)]
    assert first == pytest.approx(again, abs=1e-6) and first != pytest.approx(other, abs=1e-6)
