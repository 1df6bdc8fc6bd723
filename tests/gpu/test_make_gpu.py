"""`make gpu`: what it runs, how it goes on, what it writes; and all that needs no GPU, run on a CPU."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import aiohttp
import psutil
import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer

from vllm_omni_ext.model_plugins.qwen3_omni.tiny.qwen3_omni import write_qwen3_omni

ROOT = Path(__file__).parents[2]
MODES = ("fp32-eager-v2", "bf16-graphs-v2")
PAGE = ROOT / "docs" / "gpu.md"
TIMEOUT_S = 300
MACHINE = {"devices": "2 x H100, 79.1 GiB", "driver": "580.1", "vllm": "0.32.0"}


@pytest.fixture
def table(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("gpu_parts")


@pytest.fixture
def report(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("gpu_report")


@pytest.fixture
def program(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("gpu")


def level(at_once: int, **figures: float) -> dict[str, float]:
    usual = {"first_p50_s": 0.08, "first_max_s": 0.1, "whole_p50_s": 1.0, "real_time_factor_p50": 0.1}
    return {"concurrency": at_once, "requests_per_s": 8.0, **usual, **figures}


# -- the table ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tiny", [True, False])
def test_every_part_is_a_program_of_ours_with_names_of_its_own(table: ModuleType, tmp_path: Path, tiny: bool) -> None:
    known = table.parts(MODES, tiny=tiny)
    assert len({part.name for part in known}) == len(known)
    assert [part.name for part in known][:2] == [f"right-{mode}" for mode in MODES]
    for part in known:
        python, file, *words = part.command("python3", tmp_path)
        assert python == "python3" and Path(file).is_file()
        assert not [word for word in words if word.startswith("{") and word.endswith("}") and " " not in word]
    assert table.LIMIT_S <= 600


def test_the_released_shape_is_run_with_the_readmes_command(table: ModuleType, tmp_path: Path) -> None:
    by_name = {part.name: part for part in table.parts(MODES, tiny=False)}
    words = by_name["start"].command("python3", tmp_path)
    assert words[2:] == [
        str(tmp_path / "model"),
        "--json",
        str(tmp_path / "start.json"),
        "--",
        "--load-format",
        "dummy",
    ]
    levels = [word for name in ("levels-few", "levels-many") for word in by_name[name].words if word.isdigit()]
    assert levels == ["1", "4", "8", "16", "32"]


def test_pictures_are_of_the_released_shape_with_random_weights(table: ModuleType, tmp_path: Path) -> None:
    by_name = {part.name: part for part in table.parts(MODES, tiny=False)}
    names = [name for name in by_name if name.startswith("picture")]
    assert names == ["picture-steps-512", "picture-steps-1024", "pictures-512", "pictures-1024"]
    for name in names:
        words = by_name[name].command("python3", tmp_path)
        assert "--released-shape" in words and words[words.index("--json") + 1] == str(tmp_path / f"{name}.json")
        assert words[words.index("--height") + 1] == words[words.index("--width") + 1] == name.rpartition("-")[2]
        assert "--steps" not in words, "20 steps are the default"


def test_goals_of_pictures(table: ModuleType, report: ModuleType) -> None:
    row = {"height": 512, "width": 512, "steps": 20, "answer_p50_s": 2.0}
    parts = {"queue": 0.0, "prefill": 0.1, "steps": 1.5, "vae": 0.2, "transfer": 0.3}
    pictures = [
        {**row, "task": task, "at_once": n, "image_s": s, "parts": parts}
        for task, n, s in (("image", 1, 2.1), ("image", 4, 9.0), ("edit", 1, 2.7))
    ]
    steps = [
        {**row, "images": n, "seconds": {"packed": n / 2, "one by one": n}, "packed_beside": {"one by one": 0.5}}
        for n in (1, 4)
    ]
    results = table.Results(MACHINE).having("pictures-512", table.Result(table.OK, 60.0, pictures, "", "abc"))
    results = results.having("picture-steps-512", table.Result(table.OK, 60.0, steps, "", "abc"))
    text = report.render(results, table.parts(MODES, tiny=False), devices=1)
    assert "| an image of 512x512, 20 steps, s | at most 2.2 | 2.1 | met |" in text
    assert "| an edit of 512x512, 20 steps, s | at most 2.6 | 2.7 | **missed** |" in text
    assert "| denoise steps of 4 images of 512x512, packed / one by one | at most 0.6 | 0.5 | met |" in text
    assert "| image, 512x512, 20 steps | 1 | 2.100 | 2.000 | 0.000, 0.100, 1.500, 0.200, 0.300 |" in text
    assert "| 512x512 | 4 | 40.0 | 20.0 | 0.50 |" in text


def test_what_a_machine_lacks(table: ModuleType) -> None:
    by_name = {part.name: part for part in table.parts(MODES, tiny=False)}
    assert by_name["start"].missing(1, []) is None
    assert by_name["text"].missing(1, []) == "needs 2 CUDA devices, here is 1"
    assert by_name["prefill-decode"].missing(2, ["nixl"]) == "needs mooncake"
    assert by_name["prefill-decode-nixl"].missing(1, ["nixl"]) is None


def test_flags_of_the_server_come_after_two_hyphens(benchmark: Callable[[str], ModuleType]) -> None:
    split = benchmark("gpu_start").split
    assert split(["m", "--json", "f", "--", "--load-format", "dummy"]) == (
        ["m", "--json", "f"],
        ["--load-format", "dummy"],
    )
    assert split(["m"]) == (["m"], [])


# -- going on -------------------------------------------------------------------------------------------------------


def test_what_has_ended_well_is_not_run_again(table: ModuleType, tmp_path: Path) -> None:
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
    assert left == [part.name for part in known if part.name not in (known[0].name, "start", "text")]
    assert [part.name for part in again.left(known, ["start", known[0].name], "new")] == ["start", known[0].name]
    assert again.on({**MACHINE, "driver": "590"}).parts == {}
    assert table.Results.read(tmp_path / "none.json") == table.Results()


@pytest.mark.engine
def test_a_part_that_takes_too_long_is_ended_with_all_it_has_started(
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
@pytest.mark.parametrize(("status", "state"), [(0, "ok"), (1, "failed"), (3, "refused"), (-signal.SIGKILL, "failed")])
def test_what_becomes_of_a_part(
    table: ModuleType, program: ModuleType, tmp_path: Path, status: int, state: str
) -> None:
    script = tmp_path / "part.py"
    end = f"os.kill(os.getpid(), {-status})" if status < 0 else f"sys.exit({status})"
    script.write_text(f"import os, sys\nopen(sys.argv[1], 'w').write('[{{\"x\": 1, \"each\": [2]}}]')\n{end}\n")
    part = table.Part("part", "ends", (str(script), "{json}"))
    found = program.run(part, tmp_path, dict(os.environ))
    assert found[0] == state
    assert program.result_of(part, tmp_path, *found, "abc").figures == ([{"x": 1}] if state == "ok" else None)


# -- the report -----------------------------------------------------------------------------------------------------


def test_goals_are_compared(table: ModuleType, report: ModuleType) -> None:
    known = table.parts(MODES, tiny=False)
    results = table.Results(MACHINE)
    for name, figures in {
        "levels-few": [level(1, first_p50_s=0.1), level(4)],
        "levels-many": [level(32, first_p50_s=0.5, requests_per_s=8.1)],
        "text": {"ours_per_s": 97.0, "stock_per_s": 100.0, "ratio": 0.97},
        "start": {"ready_s": 90.0, "first_sound_s": [0.9, 0.1, 0.08], "answer_s": [1, 1, 1]},
    }.items():
        results = results.having(name, table.Result(table.OK, 60.0, figures, "", "abc"))
    results = results.having("text-fp8", table.Result(table.FAILED, 3.0, None, "one\nboom", "abc"))
    results = results.having("start-fp8", table.Result(table.REFUSED, 3.0, None, "error: too large", "abc"))
    text = report.render(results, known, devices=2)
    assert text.splitlines()[0] == f"# On a GPU: 6 of {len(known)} parts have run, 1 failed"
    assert "| driver | 580.1 |" in text
    assert "| first sound, 1 answer, ms | at most 100 | 100 | met |" in text
    assert "| first sound, 32 answers at once, ms | at most 400 | 500 | **missed** |" in text
    assert "| real-time factor, 1 answer | at most 0.11 | 0.1 | met |" in text
    assert "| spoken answers a second, 32 at once | at least 7.5 | 8.1 | met |" in text
    assert "| text-only answers a second, ours / stock vLLM | at least 0.98 | 0.97 | **missed** |" in text
    assert "refused: error: too large" in text and "boom\n```" in text
    assert "| 32 | 500 / 100 | 1.00 | 0.100 | 8.10 |" in text
    assert "ready after 90 s; first sound 900 ms, of the tenth answer" in text
    assert "| spoken answers a second, 32 at once | at least 7.5 |  | needs 2 devices |" in report.render(
        results, known, devices=1
    )


def test_a_report_without_a_gpu_says_so(table: ModuleType, report: ModuleType) -> None:
    known = table.parts(MODES, tiny=True)
    results = table.Results(MACHINE).having("levels-few", table.Result(table.OK, 60.0, [level(1)], "", "abc"))
    assert report.render(table.Results(), known, devices=0).splitlines()[0] == report.NOT_YET
    text = report.render(results, known, devices=0)
    assert text.splitlines()[0] == report.NOT_YET and text.count("not measured") == len(report.GOALS)
    with_device = report.render(results, known, devices=1, released=False)
    assert with_device.count("not measured") == len(report.GOALS), "a tiny model says nothing about the goals"


def test_what_is_written_by_hand_stays(report: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "gpu.md"
    report.write(page, f"# One\n{report.END}\n")
    page.write_text(page.read_text() + "\n## By hand\n\ntext\n")
    report.write(page, f"# Two\n{report.END}\n")
    report.write(page, f"# Three\n{report.END}\n")
    assert page.read_text() == f"# Three\n{report.END}\n\n## By hand\n\ntext\n"


def test_the_page_has_a_report_at_its_top(table: ModuleType, report: ModuleType) -> None:
    top = PAGE.read_text().partition(report.END)[0]
    if top.startswith(report.NOT_YET):
        assert top + report.END + "\n" == report.render(table.Results(), (), devices=0)
    else:
        assert top.startswith("# On a GPU: ") and "| driver |" in top


# -- text beside stock vLLM -----------------------------------------------------------------------------------------


async def test_text_is_asked_for_so_many_at_once(benchmark: Callable[[str], ModuleType]) -> None:
    text, bodies, together = benchmark("gpu_text"), [], [0, 0]

    async def answer(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        together[0] += 1
        together[1] = max(together[:2])
        await asyncio.sleep(0)
        together[0] -= 1
        return web.json_response({"usage": {"completion_tokens": bodies[-1]["max_completion_tokens"]}})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    async with TestServer(app) as server:
        url = str(server.make_url("/v1"))
        assert await text.answers(url, 9, 3, 5) > 0
        assert len(bodies) == 9 and together[1] <= 3
        assert {(tuple(body["modalities"]), body["max_completion_tokens"]) for body in bodies} == {(("text",), 5)}
    with pytest.raises(aiohttp.ClientError):
        await text.answers(url, 1, 1, 5)


def test_both_servers_get_the_same_flags(benchmark: Callable[[str], ModuleType]) -> None:
    text = benchmark("gpu_text")
    assert "--load-format" in text.flags(tiny=False) and "--load-format" not in text.flags(tiny=True)
    ours, stock = text.words_of("m", (), ["--a"]), text.words_of("m", ("python", "stock.py"), ["--a"])
    assert "--omni" in ours and stock[:3] == ["python", "stock.py", "serve"]
    start = ours.index("serve")
    assert [word for word in ours[start:] if word not in ("--omni", ours[ours.index("--port") + 1])] == [
        word for word in stock[2:] if word != stock[stock.index("--port") + 1]
    ]


# -- a machine on which the package is not installed ----------------------------------------------------------------


@pytest.mark.engine
def test_the_package_as_if_it_were_installed(benchmark: Callable[[str], ModuleType], tmp_path: Path) -> None:
    site = benchmark("gpu_site").make(ROOT, tmp_path / "site")
    benchmark("gpu_site").make(ROOT, site)
    (found,) = metadata.distributions(path=[str(site)])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    assert {(e.group, e.name, e.value) for e in found.entry_points} == {
        (group, name, value) for group, each in groups.items() for name, value in each.items()
    }
    look = "import vllm_omni_ext.patches, vllm_omni_ext.plugins.registry as r; print(r.__file__)"
    words = [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(site)!r}); {look}"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(str(site))


def test_what_all_parts_are_given(program: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "find_spec", lambda name: None)
    env = program.environment(Path("/site"), {"PYTHONPATH": "/more", "PATH": "/bin"})
    assert env["PYTHONPATH"] == "/site:/more" and env["PATH"] == "/bin"
    assert env["VLLM_USE_FLASHINFER_SAMPLER"] == "0" and env["HF_HUB_OFFLINE"] == "1"
    monkeypatch.setattr(program, "find_spec", lambda name: object())
    env = program.environment(None, {})
    assert "PYTHONPATH" not in env and "VLLM_USE_FLASHINFER_SAMPLER" not in env


# -- run ------------------------------------------------------------------------------------------------------------


def call(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


@pytest.mark.engine
@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_without_cuda_one_line_says_so(tmp_path: Path) -> None:
    done = call("--folder", str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "make gpu: skipped: no CUDA device on this machine\n")


def test_without_vllm_one_line_says_so(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "find_spec", lambda name: None)
    assert program.main([]) == 0
    assert "has no vllm; set GPU_PYTHON" in capsys.readouterr().out


def test_a_wrong_part_is_refused(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(program, "look", lambda env: {"devices": 0})  # the test above looks
    assert program.main(["--folder", str(tmp_path), "--device", "cpu", "--tiny", "--parts", "strat"]) == 2
    assert "no part strat; there are right-cpu, start" in capsys.readouterr().out


@pytest.mark.engine
def test_a_start_that_is_refused(table: ModuleType, program: ModuleType, tmp_path: Path) -> None:
    """What the server refuses before it starts anything is no failure; the report has the reason."""
    write_qwen3_omni(tmp_path / "tiny", seed=0)
    flags = ("--stage-overrides", '{"talker": {"devices": "7"}}')
    part = table.Part("start", "refused", ("benchmarks/gpu_start.py", "{tiny}", "--json", "{json}", "--", *flags))
    state, seconds = program.run(part, tmp_path, dict(os.environ))
    result = program.result_of(part, tmp_path, state, seconds, "abc")
    assert state == table.REFUSED, result.said
    assert result.said.splitlines()[-1].startswith("error: stages.talker.devices")


@pytest.mark.engine
def test_pictures_on_a_cpu_with_the_tiny_checkpoint(report: ModuleType, tmp_path: Path) -> None:
    """The computation alone, then a server: images and edits, 1, 2 and 4 at once, and the report."""
    words = ["--device", "cpu", "--tiny", "--folder", str(tmp_path)]
    done = call(*words, "--parts", "picture-steps-512", "pictures-512")
    logs = [file.read_text(errors="replace")[-3000:] for file in sorted(tmp_path.glob("*.log"))]
    assert done.returncode == 0, done.stdout + done.stderr + "\n".join(logs)
    told: Any = json.loads((tmp_path / "results.json").read_text())["parts"]
    steps, pictures = (told[name]["figures"] for name in ("picture-steps-512", "pictures-512"))
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
    assert "| edit, 64x48, 3 steps | 4 | " in text and "| 64x48 | 4 | " in text


@pytest.mark.engine
def test_on_a_cpu_with_the_tiny_checkpoint(report: ModuleType, tmp_path: Path) -> None:
    """A server, spoken answers in Python, and the report. The other parts have tests of their own."""
    words = ["--device", "cpu", "--tiny", "--folder", str(tmp_path)]
    done = call(*words, "--parts", "start", "levels-few")
    assert done.returncode == 0, done.stdout + done.stderr
    told: Any = json.loads((tmp_path / "results.json").read_text())["parts"]
    assert {name: each["state"] for name, each in told.items()} == {"start": "ok", "levels-few": "ok"}
    assert len(told["start"]["figures"]["first_sound_s"]) == 10
    assert [each["concurrency"] for each in told["levels-few"]["figures"]] == [1, 2]
    text = (tmp_path / "report.md").read_text()
    assert text.startswith(report.NOT_YET) and "| `start` |" in text and "| 2 | " in text
