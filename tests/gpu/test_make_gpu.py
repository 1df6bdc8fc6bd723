"""`make gpu`: its parts, going on after an interruption, its report; and all that needs no GPU, run on a CPU."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from tests.gpu import run_once
from tests.support.cluster import until

ROOT = Path(__file__).parents[2]
MODES = ("fp32-eager-v2", "bf16-graphs-v2", "fp32-graphs-v2-nixl")
PAGE = ROOT / "docs" / "gpu.md"
TIMEOUT_S = 900
MACHINE = {"devices": "2 x H100, 79.1 GiB", "driver": "580.1", "vllm": "0.32.0"}


Import = Callable[[str], ModuleType]


@pytest.fixture
def table(benchmark: Import) -> ModuleType:
    return benchmark("gpu_parts")


@pytest.fixture
def report(benchmark: Import) -> ModuleType:
    return benchmark("gpu_report")


@pytest.fixture
def program(benchmark: Import) -> ModuleType:
    return benchmark("gpu")


def level(at_once: int, **figures: float) -> dict[str, float]:
    usual = {"first_p50_s": 0.08, "first_max_s": 0.1, "whole_p50_s": 1.0, "real_time_factor_p50": 0.1}
    return {"concurrency": at_once, "requests_per_s": 8.0, "devices": 2, **usual, **figures}


@pytest.mark.parametrize("tiny", [True, False])
def test_every_part_is_a_program_with_a_name_of_its_own(table: ModuleType, tmp_path: Path, tiny: bool) -> None:
    known = table.parts(MODES, tiny=tiny)
    assert len({part.name for part in known}) == len(known)
    assert [part.name for part in known][:3] == ["start", "right-bf16-graphs-v2", "right-bagel"]
    for part in known:
        python, file, *words = part.command("python3", tmp_path)
        assert python == "python3" and Path(file).is_file()
        assert not [word for word in words if word.startswith("{") and word.endswith("}") and " " not in word]
    assert table.LIMIT_S < 600


@pytest.mark.engine
def test_the_modes_on_cuda_are_those_of_the_correctness_program(program: ModuleType) -> None:
    assert program.modes_of(os.environ, cpu=False) == list(run_once.MODES)


def test_levels_are_swept_with_one_and_with_two_talkers(table: ModuleType) -> None:
    known = {part.name: part for part in table.parts(MODES, tiny=False)}

    def levels(name: str) -> list[int]:
        words = known[name].words
        return [int(word) for word in itertools.takewhile(str.isdecimal, words[words.index("--levels") + 1 :])]

    assert levels("levels-few") + levels("levels-many") == levels("levels-talkers") == [1, 4, 8, 16, 32]


def test_answers_are_compared_where_prompts_are_computed_apart(table: ModuleType) -> None:
    known = {part.name: part for part in table.parts(list(run_once.MODES), tiny=False)}
    for connector in ("mooncake", "nixl"):
        part = known[f"right-fp32-graphs-v2-{connector}"]
        assert part.missing(1, [connector]) is None and part.missing(1, []) == f"needs {connector}"


def test_a_part_that_has_ended_well_is_not_run_again(table: ModuleType, tmp_path: Path) -> None:
    known, file = table.parts(MODES, tiny=False), tmp_path / "results.json"
    results = table.Results(MACHINE)
    for name, state, commit in [
        (known[0].name, table.OK, "new"),
        (known[1].name, table.FAILED, "new"),
        ("start", table.REFUSED, "new"),
        ("start-fp8", table.OK, "old"),
        ("text", table.LEFT_OUT, "new"),
    ]:
        results = results.having(name, table.Result(state, 1.5, {"a": [1]}, "said", commit))
    results.write(file)
    again = table.Results.read(file).on(MACHINE)
    assert again == results
    left = [part.name for part in again.left(known, (), "new")]
    rest = [part.name for part in known if part.name not in (known[0].name, known[1].name, "start", "text")]
    assert left == [*rest, known[1].name], "parts that have not run come before one that has failed"
    assert [part.name for part in again.left(known, ["start", known[0].name], "new")] == ["start", known[0].name]
    assert again.on({**MACHINE, "driver": "590"}).parts == {}


@pytest.mark.engine
@pytest.mark.extended
def test_a_part_that_takes_too_long_is_ended_with_its_processes(
    table: ModuleType, program: ModuleType, tmp_path: Path
) -> None:
    script, pid = tmp_path / "part.py", tmp_path / "pid"
    script.write_text(
        "import subprocess, sys, pathlib\n"
        "child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE, start_new_session=True)\n"
        f"pathlib.Path({str(pid)!r}).write_text(str(child.pid))\n"
        "print('begun', flush=True)\nchild.wait()\n"
    )
    part = table.Part("slow", "waits", (str(script),))
    state, seconds = program.run(part, tmp_path, dict(os.environ), limit_s=2.0)
    assert state == table.LATE and 2.0 <= seconds < 30
    result = program.result_of(part, tmp_path, state, seconds, "abc")
    assert result.said.startswith("begun") and result.figures is None
    assert not psutil.pid_exists(int(pid.read_text())) or psutil.Process(int(pid.read_text())).status() == "zombie"


@pytest.mark.engine
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.extended)], ids=str)
def test_a_part_ends_with_the_program(number: signal.Signals, tmp_path: Path) -> None:
    pid, script = tmp_path / "pid", tmp_path / "part.py"
    script.write_text(
        f"import os, pathlib, time\nfile = pathlib.Path({str(pid)!r})\n"
        "file.with_suffix('.new').write_text(str(os.getpid()))\nfile.with_suffix('.new').rename(file)\ntime.sleep(60)\n"
    )
    program = (
        f"import os, pathlib, signal, sys\nsys.path.append({str(ROOT / 'benchmarks')!r})\nimport gpu, gpu_parts\n"
        f"signal.signal(signal.SIGTERM, gpu.interrupt)\npart = gpu_parts.Part('slow', 'waits', ({str(script)!r},))\n"
        f"gpu.run(part, pathlib.Path({str(tmp_path)!r}), dict(os.environ))\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL) as running:
        assert until(pid.exists, 30)
        part = psutil.Process(int(pid.read_text()))
        running.send_signal(number)
    assert until(lambda: not part.is_running() or part.status() == psutil.STATUS_ZOMBIE, 30)


def test_no_program_comes_before_the_package_on_the_path() -> None:
    """Where the package is not installed, it is in a folder of PYTHONPATH; the repository's has no model plugins."""
    programs = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "tests" / "gpu").glob("*_once.py")]
    assert [each.name for each in programs if "sys.path.insert" in each.read_text()] == []


@pytest.mark.engine
@pytest.mark.extended
@pytest.mark.parametrize(("status", "state"), [(0, "ok"), (1, "failed"), (3, "refused"), (-signal.SIGKILL, "failed")])
def test_only_a_part_that_ends_with_status_0_has_figures(
    table: ModuleType, program: ModuleType, tmp_path: Path, status: int, state: str
) -> None:
    script = tmp_path / "part.py"
    end = f"os.kill(os.getpid(), {-status})" if status < 0 else f"sys.exit({status})"
    script.write_text(f"import os, sys\nopen(sys.argv[1], 'w').write('[{{\"x\": 1, \"each\": [2]}}]')\n{end}\n")
    part = table.Part("part", "ends", (str(script), "{json}"))
    found = program.run(part, tmp_path, dict(os.environ))
    assert found[0] == state
    assert program.result_of(part, tmp_path, *found, "abc").figures == ([{"x": 1}] if state == "ok" else None)


def test_the_report_compares_figures_with_goals(table: ModuleType, report: ModuleType) -> None:
    size = {"height": 512, "width": 512, "steps": 20}
    parts = {"queue": 0.0, "prefill": 0.1, "steps": 1.5, "vae": 0.2, "transfer": 0.3}
    times = (("image", 1, 2.1), ("image", 4, 9.0), ("edit", 1, 2.7))
    known, results = table.parts(MODES, tiny=False), table.Results(MACHINE)
    for name, figures in {
        "levels-few": [level(1, first_p50_s=0.1), level(4)],
        "levels-many": [level(32, first_p50_s=0.5, requests_per_s=8.1)],
        "levels-talkers": [level(32, requests_per_s=12.0)],
        "api-servers-2": [
            {
                "who": "ours",
                "servers": 2,
                "requests_per_s": 249.5,
                "ttft_mean_s": 0.052,
                "ttft_p99_s": 0.09,
                "cpu_ms_per_request": {"API servers": 4.0, "engines": 2.5},
            }
        ],
        "video": [
            {"frames": 0, "devices_bytes": [1 << 30], "replicas_bytes": {}},
            {
                "frames": 32,
                "devices_bytes": [5 << 29],
                "replicas_bytes": {"thinker/0": 3 << 29, "talker/0": 1 << 29},
                "prompt_tokens": 11539,
                "answer_s": 1.26,
            },
        ],
        "text": {"ours_per_s": 97.0, "stock_per_s": 100.0, "ratio": 0.97},
        "start": {"ready_s": 90.0, "first_sound_s": [0.9, 0.1, 0.08], "answer_s": [1, 1, 1]},
        "pictures-512": [
            {**size, "answer_p50_s": 2.0, "task": task, "at_once": n, "image_s": s, "parts": parts}
            for task, n, s in times
        ],
        "picture-steps-512": [
            {**size, "images": n, "seconds": {"packed": n / 2, "one by one": n}, "packed_beside": {"one by one": 0.5}}
            for n in (1, 4)
        ],
    }.items():
        results = results.having(name, table.Result(table.OK, 60.0, figures, "", "abc"))
    results = results.having("text-fp8", table.Result(table.FAILED, 3.0, None, "one\nboom", "abc"))
    results = results.having("start-fp8", table.Result(table.REFUSED, 3.0, None, "error: too large", "abc"))
    text = report.render(results, known, devices=2)
    assert text.splitlines()[0] == f"# On a GPU: 11 of {len(known)} parts have run, 1 failed"
    for line in (
        "| 0 |  |  | 0.0 | 1.0 |",
        "| 32 | 11539 | 1.3 | 1.5 | 2.5 |",
        "| driver | 580.1 |",
        "| first sound, 1 answer, ms | at most 100 | 100 | met |",
        "| first sound, 32 answers at once, ms | at most 400 | 500 | **missed** |",
        "| spoken answers a second, 32 at once | at least 7.5 | 8.1 | met |",
        "| text-only answers a second, ours / stock vLLM | at least 0.98 | 0.97 | **missed** |",
        "| an image of 512x512, 20 steps, s | at most 2.2 | 2.1 | met |",
        "| an edit of 512x512, 20 steps, s | at most 2.6 | 2.7 | **missed** |",
        "| denoise steps of 4 images of 512x512, packed / one by one | at most 0.6 | 0.5 | met |",
        "| image, 512x512, 20 steps | 1 | 2.100 | 2.000 | 0.000, 0.100, 1.500, 0.200, 0.300 |",
        "refused: error: too large",
        "boom\n```",
        "| 32 | 500 / 100 | 1.00 | 0.100 | 8.10 | 4.05 |",
        "| 32, two talkers | 80 / 100 | 1.00 | 0.100 | 12.00 | 6.00 |",
        "| ours | 2 | 249.5 | 52 / 90 | API servers 4.0, engines 2.5 |",
    ):
        assert line in text
    one_device = report.render(results, known, devices=1)
    assert "| spoken answers a second, 32 at once | at least 7.5 |  | needs 2 devices |" in one_device
    tiny = table.parts(MODES, tiny=True)
    for given, devices in ((table.Results(), 0), (results, 0), (results, 1)):
        text = report.render(given, tiny, devices=devices, released=False)
        assert devices or text.splitlines()[0] == report.NOT_YET
        assert not given.parts or text.count("not measured") == len(report.GOALS), "a tiny model measures no goal"


def test_the_page_keeps_its_text_and_has_a_report_at_its_top(
    table: ModuleType, report: ModuleType, tmp_path: Path
) -> None:
    page = tmp_path / "gpu.md"
    report.write(page, f"# One\n{report.END}\n")
    page.write_text(page.read_text() + "\n## By hand\n\ntext\n")
    report.write(page, f"# Two\n{report.END}\n")
    assert page.read_text() == f"# Two\n{report.END}\n\n## By hand\n\ntext\n"
    top = PAGE.read_text().partition(report.END)[0]
    if top.startswith(report.NOT_YET):
        assert top + report.END + "\n" == report.render(table.Results(), (), devices=0)
    else:
        assert top.startswith("# On a GPU: ") and "| driver |" in top


def test_our_server_and_that_of_stock_vllm_get_the_same_flags(benchmark: Import) -> None:
    text = benchmark("gpu_text")
    ours, stock = text.words_of("m", (), ["--a"]), text.words_of("m", ("python", "stock.py"), ["--a"])
    ports = {words[words.index("--port") + 1] for words in (ours, stock)}
    common = [word for word in ours[ours.index("serve") :] if word != "--omni" and word not in ports]
    assert "--omni" in ours and common == [word for word in stock[2:] if word not in ports]


def test_a_machine_without_cuda_or_vllm_skips_everything_with_one_line(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(program, "look", lambda env: {"devices": 0})
    assert program.main(["--folder", str(tmp_path), "--device", "cpu", "--tiny", "--parts", "strat"]) == 2
    assert "no part strat; there are start, right-cpu" in capsys.readouterr().out
    assert program.main(["--folder", str(tmp_path)]) == 0
    assert "make gpu: skipped: no CUDA device" in capsys.readouterr().out
    monkeypatch.setattr(program, "find_spec", lambda name: None)
    assert program.main([]) == 0
    assert "has no vllm; set GPU_PYTHON" in capsys.readouterr().out


def call(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


@pytest.mark.engine
@pytest.mark.extended
def test_all_kinds_of_parts_run_on_a_cpu_with_tiny_checkpoints(report: ModuleType, tmp_path: Path) -> None:
    """Spoken answers of a server and in Python, denoise steps alone, images and edits of a server, and the report."""
    names = ("start", "levels-few", "picture-steps-512", "pictures-512", "levels-talkers", "video", "right-bagel")
    names += ("api-servers-2",)
    done = call("--device", "cpu", "--tiny", "--folder", str(tmp_path), "--parts", *names)
    logs = [file.read_text(errors="replace")[-3000:] for file in sorted(tmp_path.glob("*.log"))]
    assert done.returncode == 0, done.stdout + done.stderr + "\n".join(logs)
    parts: Any = json.loads((tmp_path / "results.json").read_text())["parts"]
    assert {name: each["state"] for name, each in parts.items()} == dict.fromkeys(names, "ok")
    start, levels, steps, pictures, talkers, videos, _, servers = (parts[name]["figures"] for name in names)
    assert [each["concurrency"] for each in talkers] == [2] and [each["frames"] for each in videos] == [0, 8]
    assert len(start["first_sound_s"]) == 10
    assert [(each["who"], each["servers"], each["failed"]) for each in servers] == [
        ("ours", 2, {}),
        ("stock vLLM", 2, {}),
    ]
    assert [each["concurrency"] for each in levels] == [1, 2]
    assert [each["images"] for each in steps] == [1, 2, 4]
    assert set(steps[0]["seconds"]) == {"packed", "one by one", "plain loop"}
    assert [(each["task"], each["at_once"]) for each in pictures] == [
        (task, count) for task in ("image", "edit") for count in (1, 2, 4)
    ]
    for each in pictures:
        assert set(each["parts"]) == {"queue", "prefill", "steps", "vae", "transfer"}
        assert all(seconds > 0 for seconds in each["parts"].values()), each
        assert each["parts"]["transfer"] < each["answer_p50_s"]
    text = (tmp_path / "report.md").read_text()
    assert text.startswith(report.NOT_YET)
    assert all(row in text for row in ("| `start` |", "| 2 | ", "| edit, 64x48, 3 steps | 4 | ", "| 64x48 | 4 | "))
