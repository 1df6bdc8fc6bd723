"""`python -m tests.nullgpu [NAME ...]`: start scenarios, one of each model twice, and check the counters."""

from __future__ import annotations

import argparse
import base64
import contextlib
import functools
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import Any

import av
import numpy as np
import openai
import psutil
from PIL import Image

from examples.server import HOST, Server, ServerFailed
from tests.faults.table import Fault, read_file
from tests.nullgpu import counters
from tests.nullgpu.environment import Environment, add_missing, prepare, with_fault
from tests.nullgpu.scenarios import SCENARIOS, Ask, Calls, Picture, Restart, Scenario, Sleep
from tests.support import media
from tests.support.cluster import replicas, states, until
from tests.support.sharing import with_each

FAULTS = Path(__file__).with_name("faults.yaml")
GIB = 1 << 30
MOST_OF_PLAN = 1.03
"""Counted bytes of a stage, divided by the planned ones."""

LEAST_GIVEN_BACK = 0.95
"""Part of weights and KV cache that a stage gives back while it sleeps."""

TOO_LATE = "the server was not ready after"

ANSWER_S = 600.0
SAMPLES_A_FRAME = 1920


class NullServer(Server):
    """A server on null devices.

    Args:
        run: folder for its log, its counters and the refused calls.
    """

    def __init__(self, environment: Environment, scenario: Scenario, run: Path) -> None:
        super().__init__(environment.model(scenario.model), run / "server.log")
        variables = {**environment.variables(run, scenario.gpu, scenario.devices), **scenario.environ}
        serve = ["serve", str(environment.model(scenario.model)), "--omni", "--host", HOST, "--port", str(self.port)]
        more = ["--load-format", "dummy", "--served-model-name", "m", "--omni-log-dir", str(run / "logs")]
        command = [str(environment.python.with_name("vllm")), *serve, *more, *scenario.flags]
        # Not in the repository: its folder of the package, without the models, would come before the installed one.
        self.words = ["env", "-C", str(run), *(f"{name}={value}" for name, value in variables.items()), *command]
        self.run = run
        self.planned = plan(environment, scenario)


def main() -> int:
    """Run the scenarios that are named, or all; the exit status is 1 if one of them has a defect."""
    parser = argparse.ArgumentParser(prog="make null-gpu", description=__doc__)
    names = [each.name for each in SCENARIOS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(names)}; all without")
    parser.add_argument("--once", action="store_true", help="start each scenario once")
    parser.add_argument("--jobs", type=int, default=2, help="scenarios or faults at a time, each with its cache (2)")
    parser.add_argument("--prepared", type=Path, metavar="CACHE", help=argparse.SUPPRESS)
    parser.add_argument("--faults", nargs="*", metavar="NAME", help="make the faults of faults.yaml: all, or some")
    args = parser.parse_args()
    if args.faults is not None:
        faults = {fault.name: fault for fault in read_file(FAULTS)}
        if unknown := set(args.faults) - faults.keys():
            parser.error(f"no fault {', '.join(sorted(unknown))}; use {', '.join(faults)}")
        return missed([faults[name] for name in args.faults or faults], args.jobs)
    if unknown := set(args.names) - set(names):
        parser.error(f"no scenario {', '.join(sorted(unknown))}; use {', '.join(names)}")
    chosen = [each for each in SCENARIOS if not args.names or each.name in args.names]
    if args.prepared is None:
        return in_parallel(prepare(), chosen, args.jobs, once=args.once)
    environment, defects = Environment(args.prepared.parent, args.prepared, args.prepared.with_name("site")), 0
    for scenario in chosen:
        for turn, each in enumerate(scenario.starts(once=args.once)):
            defects += report(each, turn, list(defects_of(environment, each)))
    return int(defects > 0)


def in_parallel(environment: Environment, scenarios: Sequence[Scenario], jobs: int, *, once: bool) -> int:
    """Run each scenario in a process, `jobs` at a time; its output is printed at its end.

    A scenario reports kernels that are compiled after its start, so no other one may use its cache meanwhile. It begins
    with the compiled code of all that have ended.
    """
    ended, copying = environment.cache, Lock()

    def run(scenario: Scenario, cache: Path) -> int:
        with copying:
            add_missing(ended, cache)
        words = [sys.executable, "-m", "tests.nullgpu", scenario.name, "--prepared", str(cache)]
        done = subprocess.run([*words, *(["--once"] if once else [])], stdout=subprocess.PIPE, text=True)
        print(done.stdout, end="", flush=True)
        with copying:
            add_missing(cache, ended)
        return done.returncode

    caches = [ended.with_name(f"cache-{job}") for job in range(1, jobs + 1)]

    return int(any(with_each(run, scenarios, caches)))


def missed(faults: Sequence[Fault], jobs: int) -> int:
    """Make each fault, `jobs` at a time, and print its first defect; returns 1 if a fault has none.

    A server that is not ready in time is no defect: a busy machine is as slow.
    """
    environment = prepare()

    def is_found(fault: Fault, job: int) -> bool:
        faulty = with_fault(environment, fault, job)
        chosen = [scenario for name in fault.tests for scenario in SCENARIOS if scenario.name == name]
        defects = (each for scenario in chosen for each in defects_of(faulty, scenario))
        found = next((each for each in defects if TOO_LATE not in each), None)
        defects.close()
        print(f"{fault.name}: {'MISSED' if found is None else f'found: {found}'}", flush=True)
        return found is not None

    return int(not all(with_each(is_found, faults, range(jobs))))


def report(scenario: Scenario, turn: int, found: list[str]) -> int:
    """Print the defects of a start; returns their number."""
    print(f"{scenario.name}, start {turn + 1}: {'ok' if not found else f'{len(found)} defects'}", flush=True)
    for each in found:
        print(f"  DEFECT {each}", flush=True)
    return len(found)


def defects_of(environment: Environment, scenario: Scenario) -> Iterator[str]:
    """Start a scenario, take its steps, and yield its defects. The logs of a run with a defect stay."""
    run, found = Path(tempfile.mkdtemp(prefix="null-gpu-")), False
    try:
        wrong = wrong_program if scenario.program else wrong_server
        for each in chain(wrong(environment, scenario, run), refused(run)):
            found = True
            yield f"{each} [{run}]"
    finally:
        if not found:
            shutil.rmtree(run)


def wrong_server(environment: Environment, scenario: Scenario, run: Path) -> Iterator[str]:
    """Start a server, take the scenario's steps, and yield the defects."""
    server = NullServer(environment, scenario, run)
    began = time.monotonic()
    try:
        with server:
            print(f"  {scenario.name} ready after {time.monotonic() - began:.0f} s", flush=True)
            compiled = kernels(environment)
            for step in scenario.steps:
                yield from STEPS[type(step)](server, step)
                for name in sorted(kernels(environment) - compiled):
                    if Path(name).stem.removeprefix("__grp__") not in scenario.compiles:
                        yield f"{step.name}: {name} was compiled after the start"
                compiled = kernels(environment)
            yield from wrong_counts(server)
    except ServerFailed as error:
        reason, _, log = str(error).partition("\n")
        yield f"{reason} {log[-2000:]}"


def wrong_program(environment: Environment, scenario: Scenario, run: Path) -> Iterator[str]:
    """Run a program, and yield the defects that it prints."""
    variables = {**os.environ, **environment.variables(run, scenario.gpu, scenario.devices), **scenario.environ}
    words = [environment.python, Path(__file__).with_name(scenario.program), environment.model(scenario.model)]
    began = time.monotonic()
    done = subprocess.run(list(map(str, words)), env=variables, capture_output=True, text=True, cwd=run)
    print(f"  {scenario.name} ended after {time.monotonic() - began:.0f} s", flush=True)
    yield from (line.removeprefix("DEFECT ") for line in done.stdout.splitlines() if line.startswith("DEFECT "))
    if done.returncode:
        yield f"exit status {done.returncode}: {done.stderr[-2000:]}"


def kernels(environment: Environment) -> set[str]:
    """Names of the kernels of Triton and torch.compile in the cache."""
    cache = environment.cache
    return {str(path.relative_to(cache)) for path in cache.glob("triton/*/*.json")} | {
        str(path.relative_to(cache)) for path in cache.glob("inductor/*/*.py")
    }


def wrong_answer(server: NullServer, ask: Ask) -> Iterator[str]:
    """Send a request; yield the defects of its answer."""
    client = openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0, timeout=ANSWER_S)
    fields = dict(ask.fields)
    extra = {"ignore_eos": True, "return_stage_metrics": True}
    extra |= {name: fields.pop(name) for name in ("talker", "chunks") if name in fields}
    before = counted(server)
    began = time.monotonic()
    try:
        messages: Any = [{"role": "user", "content": list(map(made, ask.content))}]
        answer: Any = client.chat.completions.create(model="m", messages=messages, **fields, extra_body=extra)
    except openai.OpenAIError as error:
        if isinstance(error, openai.BadRequestError) and ask.refused and ask.refused in str(error):
            print(f"  {ask.name}: refused", flush=True)
        else:
            yield f"{ask.name}: {error}"
        return
    if ask.refused:
        yield f"{ask.name}: not refused"
    print(f"  {ask.name}: {answer.usage.prompt_tokens} prompt tokens, {time.monotonic() - began:.1f} s", flush=True)
    if (tokens := answer.usage.completion_tokens) < fields["max_completion_tokens"]:
        yield f"{ask.name}: {tokens} tokens of text"
    if "talker" in extra:
        frames, audio = extra["talker"]["max_tokens"], answer.metrics["audio"]
        if not 0 < audio["samples"] <= frames * SAMPLES_A_FRAME:
            yield f"{ask.name}: {audio['samples']} samples of {audio['frames']} frames"
        yield from wrong_calls(ask, before, counted(server))


def wrong_calls(ask: Ask, before: Mapping[str, Calls], after: Mapping[str, Calls]) -> Iterator[str]:
    """Print the calls of each replica for a request; yield those beyond the limits of the scenario."""
    for name, now in after.items():
        done = Calls(now.launches - before[name].launches, now.waits - before[name].waits)
        print(f"    {name}: {done.launches} launches, {done.waits} waits", flush=True)
        most = ask.calls.get(name, done)
        if done.launches > most.launches or done.waits > most.waits:
            yield f"{ask.name}: {name}: {done}, at most {most}"


def wrong_picture(server: NullServer, ask: Picture) -> Iterator[str]:
    """Send a request for a picture; yield the defects of its answer."""
    client = openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0, timeout=ANSWER_S)
    began = time.monotonic()
    try:
        fields: dict[str, Any] = {"model": "m", "prompt": "a red fox", "response_format": "b64_json"}
        fields["extra_body"] = dict(ask.fields)
        if ask.edit:
            file = io.BytesIO()
            noise(*map(int, ask.size.split("x"))).save(file, "PNG")
            answer: Any = client.images.edit(image=("noise.png", file.getvalue()), **fields)
        else:
            answer = client.images.generate(size=ask.size, **fields)
    except openai.OpenAIError as error:
        yield f"{ask.name}: {error}"
        return
    print(f"  {ask.name}: {time.monotonic() - began:.1f} s", flush=True)
    picture = Image.open(io.BytesIO(base64.b64decode(answer.data[0].b64_json)))
    if "{}x{}".format(*picture.size) != ask.size:
        yield f"{ask.name}: a picture of {picture.size}"


def made(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a part of a message with its medium: noise that moves, of which no pixel matters."""
    if part["type"] == "text":
        return part
    if part["type"] == "audio":
        return {"type": "audio_url", "audio_url": {"url": media.audio_url(media.audio(part["seconds"], seed=0))}}
    image = noise(part["width"], part["height"])
    if part["type"] == "image":
        return {"type": "image_url", "image_url": {"url": media.image_url(image)}}
    picture = np.asarray(image)
    data = io.BytesIO()
    with av.open(data, "w", format="mp4") as file:
        stream = file.add_stream("mpeg4", rate=2, width=part["width"], height=part["height"], pix_fmt="yuv420p")
        for shift in range(part["frames"]):
            file.mux(stream.encode(av.VideoFrame.from_ndarray(np.roll(picture, shift, 0))))
        file.mux(stream.encode(None))
    url = f"data:video/mp4;base64,{base64.b64encode(data.getvalue()).decode()}"
    return {"type": "video_url", "video_url": {"url": url}}


def noise(width: int, height: int) -> Image.Image:
    """Return a picture whose pixels are random."""
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (height, width, 3), np.uint8))


def wrong_restart(server: NullServer, step: Restart) -> Iterator[str]:
    """Kill a replica; yield the defects of the next one of its name."""
    killed = replicas(server)[step.replica]["pid"]
    os.kill(killed, signal.SIGKILL)
    began = time.monotonic()

    def is_back() -> bool:
        found = replicas(server).get(step.replica, {"pid": killed})
        return found["pid"] != killed and states(server)[step.replica] == "UP"

    if not until(is_back, ANSWER_S):
        yield f"{step.name}: {step.replica} is {states(server).get(step.replica)} after {ANSWER_S:.0f} s"
    print(f"  {step.name}: {step.replica} is back after {time.monotonic() - began:.0f} s", flush=True)


def wrong_sleep(server: NullServer, step: Sleep) -> Iterator[str]:
    """Put all stages to sleep and wake them up; yield differences from the expected memory of devices."""
    before = held(server)
    try:
        call(server, "/sleep?level=1")
        asleep = held(server)
        call(server, "/wake_up")
    except urllib.error.HTTPError as error:
        yield f"{step.name}: {error}: {error.read().decode()}"
        return
    awake = held(server)
    for name, about in server.planned.items():
        given = before[name] - asleep[name]
        print(f"  {step.name}: {name} gave back {given / GIB:.2f} of {before[name] / GIB:.2f} GiB", flush=True)
        if given < LEAST_GIVEN_BACK * (about["weights_bytes"] + about["kv_cache_bytes"]):
            yield f"{step.name}: {name} keeps {asleep[name] / GIB:.2f} GiB"
        if awake[name] > MOST_OF_PLAN * before[name]:  # less: PyTorch's unused pieces are given back too
            yield f"{step.name}: {name} has {awake[name] / GIB:.2f} GiB after it, {before[name] / GIB:.2f} before"


def call(server: NullServer, path: str) -> None:
    """Send POST to an operator endpoint."""
    request = urllib.request.Request(server.base_url.removesuffix("/v1") + path, method="POST")
    with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
        answer.read()


STEPS: Mapping[type, Callable[[NullServer, Any], Iterator[str]]] = {
    Ask: wrong_answer,
    Picture: wrong_picture,
    Restart: wrong_restart,
    Sleep: wrong_sleep,
}


def processes(server: NullServer) -> Iterator[tuple[str | None, counters.Process]]:
    """Yield each process that has counters, and its replica if it has one."""
    names = {}
    for name, about in replicas(server).items():
        tree = psutil.Process(about["pid"])
        names |= {process.pid: name for process in [tree, *tree.children(recursive=True)]}
    for process in counters.read(server.run / "counters"):
        if psutil.pid_exists(process.pid):
            yield names.get(process.pid), process


def counted(server: NullServer) -> dict[str, Calls]:
    """Launches and waits of each replica since its start."""
    found: dict[str, Calls] = {}
    for name, process in processes(server):
        if name is not None:
            so_far = found.get(name, Calls(0, 0))
            found[name] = Calls(so_far.launches + process.launches, so_far.waits + process.waits)
    return found


def held(server: NullServer) -> dict[str, int]:
    """Bytes of devices that each replica has now."""
    found: dict[str, int] = {}
    for name, process in processes(server):
        if name is not None:
            found[name] = found.get(name, 0) + sum(process.bytes)
    return found


def wrong_counts(server: NullServer) -> Iterator[str]:
    """Compare counted memory with the plan; yield differences, and processes that need no device but have one."""
    for name, process in processes(server):
        peak = max(process.peak)
        if name is None:
            if peak:
                yield f"process {process.pid} has memory on a device, and is no replica's"
            continue
        expected = sum(value for field, value in server.planned[name].items() if field.endswith("_bytes"))
        line = f"{name}: {peak / GIB:.2f} GiB counted, {expected / GIB:.2f} planned"
        print(f"  {line}; {process.graphs} graphs, {process.nodes} nodes, {process.launches} launches", flush=True)
        if peak > MOST_OF_PLAN * expected:
            yield line


def plan(environment: Environment, scenario: Scenario) -> dict[str, dict[str, int]]:
    """Planned memory of each replica, as `vllm-omni-ext plan --json` has it. No scenario divides one over devices."""
    machine = f"cuda:{scenario.gpu.mib}MiBx{scenario.devices}"
    model = str(environment.model(scenario.model))
    made = json.loads(printed("plan", model, "--machine", machine, "--json", "--load-format", "dummy", *scenario.flags))
    return {each["id"]: each for device in made["memory"] for each in device["replicas"]}


@functools.cache
def printed(*words: str) -> str:
    """Return the output of `vllm-omni-ext` with these words; the starts of a scenario have one plan."""
    command = [sys.executable, "-m", "vllm_omni_ext", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def refused(run: Path) -> Iterator[str]:
    """Captures that CUDA would have refused, and allocations that did not fit."""
    with contextlib.suppress(FileNotFoundError):
        for line in (run / "refused").read_text().splitlines():
            if "REFUSED" in line or "out of memory" in line:
                yield line


if __name__ == "__main__":
    sys.exit(main())
