"""`python -m benchmarks`: options, what is made of the programs' files, and the pages. Nothing is measured."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

from benchmarks.tool import cli, description, figures, html, markdown, svg
from benchmarks.tool import environment as environment_module
from benchmarks.tool.description import Description, Options, ProgramFailed, program, words
from benchmarks.tool.environment import environment
from benchmarks.tool.results import BadReport, Comparison, Report, Result, Span, Timeline, decode, encode
from benchmarks.tool.suite import (
    BENCHMARKS,
    api_servers,
    first_audio,
    handoff,
    layouts,
    memory,
    overhead,
    prefill_decode,
    replicas,
    silence,
    startup,
)

ROOT = Path(__file__).parents[1]
SMALL = Path(__file__).parent / "data" / "benchmarks.json"
PAIRED = Comparison("step", "ms", "ours", "bare <client>", [2.0, 3.0, 4.0], [1.0, 2.0, 2.0], paired=True)


def small() -> Report:
    return decode(SMALL.read_bytes())


def test_a_report_is_the_same_after_it_was_written_and_read():
    report = small()
    assert decode(encode(report)) == report
    assert report.results[0].comparisons[0].samples == [41.0, 38.0, 52.0]
    report.results[0].comparisons[0].samples[0] = 41.000000049
    assert b'"samples": [41.0, 38.0, 52.0]' in encode(report), "a list of numbers is one line, of six digits each"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "truncated"),
        (b'{"schema": 2}', "schema 2"),
        (b'{"result": []}', "result"),
        (
            b'{"results": [{"name": "x", "comparisons": [{"what": "w", "unit": "s", "subject": "a", "baseline": "b", '
            b'"samples": [], "baseline_samples": [1]}]}]}',
            "no samples of a",
        ),
    ],
)
def test_a_file_that_is_no_report_is_refused(data: bytes, said: str):
    with pytest.raises(BadReport, match=said):
        decode(data)


def test_a_ratio_is_of_the_medians_and_its_spread_is_of_the_pairs():
    assert PAIRED.ratio == 1.5
    assert PAIRED.ratios == [2.0, 1.5, 2.0]
    assert figures.ratio(PAIRED) == "1.50 (1.50 to 2.00)"


def test_without_pairs_a_ratio_has_no_spread():
    assert figures.ratio(msgspec.structs.replace(PAIRED, paired=False)) == "1.50"


def test_a_baseline_of_zero_has_no_ratio():
    assert figures.ratio(Comparison("x", "s", "a", "b", [1.0], [0.0])) == "none, the baseline is 0"


def test_samples_that_are_said_to_be_pairs_must_be():
    with pytest.raises(ValueError, match="3 samples cannot pair with 1"):
        msgspec.structs.replace(PAIRED, baseline_samples=[1.0])


@pytest.mark.parametrize(("names", "count"), [([], len(BENCHMARKS)), (["memory", "startup", "memory"], 2)])
def test_benchmarks_are_chosen_by_name(names: list[str], count: int):
    assert len(cli.chosen(names)) == count


def test_a_name_that_does_not_exist_is_one_error_with_all_names(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["replica", "memory", "none"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "replica, none; did you mean replicas?" in line
    assert all(name in line for name in BENCHMARKS)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--json", "nowhere/out.json"], "there is no folder nowhere"),
        (["--from", "missing.json"], "No such file"),
        (["--from", str(ROOT / "README.md")], "malformed"),
        (["memory", "--from", str(SMALL)], "leave out the names"),
    ],
)
def test_bad_options_are_one_error_before_anything_runs(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
):
    assert cli.main(options) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_there_are_at_most_ten_and_each_is_described():
    assert len(BENCHMARKS) <= 10
    for name, module in BENCHMARKS.items():
        described: Description = module.DESCRIPTION
        assert described.name == name and described.baseline and described.cannot_show
        assert described.quick.keys() <= {*described.full, "concurrency"}
        assert described.sizes(Options(quick=True)) != described.sizes(Options())


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("startup", "startup"),
        ("memory", "startup"),
        ("handoff", "handoff_cost"),
        ("first_audio", "first_audio"),
        ("overhead", "thinker_decode"),
        ("silence", "silence"),
        ("replicas", "replicas"),
        ("layouts", "layouts"),
        ("api_servers", "api_servers"),
        ("prefill_decode", "pd"),
    ],
)
def test_every_size_is_an_option_of_its_program(name: str, file: str):
    source = (ROOT / "benchmarks" / f"{file}.py").read_text()
    known = {*re.findall(r'add_argument\("--([\w-]+)"', source)}
    assert {*BENCHMARKS[name].DESCRIPTION.full, *BENCHMARKS[name].DESCRIPTION.quick, "json"} <= known


def test_sizes_become_flags():
    assert words({"rate": 1.5, "stages": ["a", "b"]}) == ["--rate", "1.5", "--stages", "a", "b"]


@pytest.mark.engine
def test_a_program_gets_its_flags_and_its_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(description, "PROGRAMS", tmp_path)
    source = "import json, sys; open(sys.argv[-1], 'w').write(json.dumps(sys.argv[1:-1]))"
    (tmp_path / "echo.py").write_text(source)
    assert program("echo.py", Options("some-model"), {"rounds": 3}) == ["some-model", "--rounds", "3", "--json"]


@pytest.mark.engine
@pytest.mark.parametrize(("source", "status"), [("raise SystemExit('no cache')", 1), ("print('no cache')", 0)])
def test_a_program_that_fails_says_how_it_ended(
    source: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(description, "PROGRAMS", tmp_path)
    (tmp_path / "bad.py").write_text(source)
    with pytest.raises(ProgramFailed, match=rf"(?s)bad\.py ended with status {status}.*no cache"):
        program("bad.py", Options(), {})


def module(name: str, memory_gib: float, run: Any) -> ModuleType:
    described = Description(name, "this", "that", {}, {}, memory_gib, "much.")
    return SimpleNamespace(DESCRIPTION=described, run=run)  # type: ignore[return-value]


@pytest.mark.engine
def test_one_that_fails_or_does_not_fit_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch):
    def fail(options: Options) -> Result:
        raise ProgramFailed("x.py ended with status 3")

    def work(options: Options) -> Result:
        return Result("good", comparisons=[PAIRED])

    each = {"bad": module("bad", 0, fail), "large": module("large", 1e6, work), "good": module("good", 0, work)}
    monkeypatch.setattr(cli, "BENCHMARKS", each)
    monkeypatch.setattr(environment_module, "LOOK_S", 0.01)
    kept: list[int] = []
    report = cli.measure([], Options(quick=True), lambda so_far: kept.append(len(so_far.results)))
    assert kept == [1, 2]
    assert [(result.name, bool(result.failed)) for result in report.results] == [("bad", True), ("good", False)]
    assert "1e+06 GiB" in report.left_out["large"]
    assert [result.name for result in cli.measure(["large"], Options()).results] == ["good"], "it was named"
    assert report.environment is not None and len(report.environment.load) == 2
    assert len(report.environment.busy) == 2, "before each that ran"


def test_the_environment_is_recorded():
    seen = environment()
    assert re.fullmatch(r"[0-9a-f]{12,40}(-dirty)?|unknown", seen.commit)
    assert seen.vllm.split()[1].startswith("0.32") and seen.cores > 0 and seen.memory_gib > 0


def test_what_the_programs_write_becomes_comparisons():
    starts = {
        "ours": [{"seconds": 2.0, "memory_gb": {"talker": 1.0, "API server": 0.5}}],
        "stock": [{"seconds": 4.0, "memory_gb": {"python": 2.0, "python (2)": 1.0}}],
    }
    assert [each.ratio for each in startup.comparisons(starts)] == [0.5]
    ratios = {each.what.partition(",")[0]: each.ratio for each in memory.comparisons(starts)}
    assert ratios == {"all processes": 0.5, "API server": 0.5 / 3, "talker": 1 / 3}
    turn = {"bytes": 100, "cpu": {"a": 0.2, "b": 0.1}}
    (size, spent) = handoff.comparisons([{"edge": "text", "single": [turn], "whole": [turn | {"bytes": 50}]}])
    assert (size.ratio, spent.ratio, spent.samples) == (2.0, 1.0, [pytest.approx(300)])
    assert overhead.comparison(8, {"ours": [11.0], "stock": [10.0]}).ratio == 1.1


def test_first_sounds_have_a_time_line_of_the_answer_in_the_middle():
    lines = [{"first": s, "spans": [["thinker", 0.0, s / 2], ["code2wav", s / 2, s]]} for s in (0.1, 0.2, 0.9)]
    found = {"short": {"on": lines, "off": [{"first": 1.0}] * 3}}
    (each,) = first_audio.comparisons(found)
    assert each.ratio == pytest.approx(0.2) and each.unit == "ms"
    (line,) = first_audio.timelines(found)
    assert line.spans == [Span("thinker", 0.0, 0.1), Span("code2wav", 0.1, 0.2)]


def test_replicas_are_compared_with_one_and_a_step_with_a_bare_client():
    rows = {"ours": {"p50": 0.3}, "bare client": {"p50": 0.2}}
    found = {"talker": {"rates": {"1": [10.0], "2": [20.0]}, "overhead_ms": {"4": rows}}}
    assert [each.ratio for each in replicas.comparisons(found)] == [2.0, pytest.approx(1.5)]


def test_api_servers_are_compared_with_as_many_of_stock_vllm():
    def run(who: str, first: float) -> dict[str, Any]:
        spent = {"engines": 3.0, "API servers": 1.0, "this program": 9.0}
        base = {"who": who, "kind": "text", "servers": 2, "requests_per_s": 5.0, "cpu_ms_per_request": spent}
        return base | {"first_s": [first], "gaps_s": [0.02]}

    made = api_servers.comparisons([run("ours", 0.1), run("stock vLLM", 0.2)])
    assert [(each.ratio, each.samples) for each in made] == [(0.5, [100.0]), (1.0, [20.0]), (1.0, [5.0]), (1.0, [4.0])]


def test_layouts_are_compared_with_one_talker():
    one = {"seconds": 10, "ended": 20, "first_token": [0.1], "first_sound": [0.2]}
    made = layouts.comparisons({"1": [one], "2": [one | {"ended": 40}, one | {"first_token": [0.1, 0.2]}]})
    assert [(each.ratio, len(each.samples)) for each in made] == [(1.5, 2), (1.0, 3), (1.0, 2)]


def test_silences_are_compared_with_the_order_of_arrival():
    answers, ours = [{"late_s": 0.1, "first_s": 0.05}], [{"late_s": 0.0, "first_s": 0.06}]
    made = silence.comparisons([["fcfs", 1, 4, answers], ["fcfs", 2, 4, answers], ["priority", 2, 4, ours]])
    assert [(each.what, each.ratio) for each in made] == [
        ("silence, listeners: 4", 0.0),
        ("first sound, listeners: 4", pytest.approx(1.2)),
    ]


def test_prefill_and_decode_apart_leaves_out_what_nobody_saw():
    seen = {"writers": {"first": [0.1], "gaps": [0.01]}, "readers": {"first": [0.3], "gaps": []}}
    made = prefill_decode.comparisons({"2 do both": seen, "1 prefills, 1 decodes": seen, "copy_bytes_s": 1.0})
    assert [each.ratio for each in made] == [1.0, 1.0, 1.0]


def test_the_page_is_made_of_a_stored_run_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    page, text, copy = tmp_path / "page.html", tmp_path / "page.md", tmp_path / "copy.json"
    options = ["--html", str(page), "--markdown", str(text), "--json", str(copy)]
    assert cli.main(["--from", str(SMALL), *options]) == 1, "one of its benchmarks failed"
    assert decode(copy.read_bytes()) == small()
    made = page.read_text()
    assert "<script" not in made and "src=" not in made and "href=" not in made
    assert "41 (38 to 52)" in made and "0.50 (0.48 to 0.51)" in made and "first &lt;sound&gt;" in made
    assert "ended with status 1" in made and "needs 12 GiB" in made and "abc123" in made
    drawn = re.findall(r"<svg.*?</svg>", made)
    assert len(drawn) == 2
    for plot in drawn:
        ElementTree.fromstring(plot)
    assert "| first <sound>, ms | chunks: 41 (38 to 52) | chunks off: 82 (79 to 102) | 0.50" in text.read_text()
    assert "No figures: ProgramFailed: pd.py ended with status 1" in capsys.readouterr().out


def test_a_run_that_is_not_to_be_cited_says_so():
    report = small()
    assert "smallest sizes" not in html.page(report) and "Other programs were running" not in html.page(report)
    report.quick = True
    assert report.environment is not None
    for more in ({"load": [3.0, 3.0]}, {"busy": [0.0, 0.2]}):
        report.environment = msgspec.structs.replace(report.environment, **more)
        for page in (html.page(report), markdown.page(report)):
            assert "smallest sizes" in page and "Other programs were running" in page
    report.environment = msgspec.structs.replace(report.environment, busy=[0.0, 0.05])
    assert "Other programs were running" not in markdown.page(report), "the load average knows the last minute"


def test_plots_have_every_sample_and_every_step():
    assert svg.distribution(PAIRED).count("<circle") == 6
    assert "bare &lt;client&gt;" in svg.distribution(PAIRED)
    line = Timeline("t", [Span("a", 0.0, 0.01), Span("b", 0.01, 0.02), Span("a", 0.02, 0.04)])
    plot = ElementTree.fromstring(svg.timeline(line.title, line.spans))
    rows = [(each.get("y"), float(each.get("x", 0)), float(each.get("width", 0))) for each in plot.iter("rect")]
    assert rows[0][0] == rows[2][0] != rows[1][0]
    assert rows[0][1] == svg.LEFT and rows[2][2] == pytest.approx(2 * rows[0][2], abs=0.2)


def test_many_samples_become_bars_and_have_a_tail():
    many = [float(value) for value in range(1, 1001)]
    each = Comparison("gap", "ms", "a", "b", many, many[:3])
    plot = svg.distribution(each)
    assert plot.count("<circle") == 3 and 50 <= plot.count("<rect") <= svg.BARS
    assert figures.spread(many) == "500 (1 to 1,000, p99 991)"


def test_the_page_in_docs_is_what_the_stored_run_says():
    stored = decode((ROOT / "benchmarks" / "measured.json").read_bytes())
    written = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert written == markdown.page(stored), (
        "python -m benchmarks --from benchmarks/measured.json --markdown docs/benchmarks.md"
    )
