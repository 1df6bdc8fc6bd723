"""`python -m tests.nullgpu [NAME ...]`: serve each scenario twice with one compile cache, and check what is counted."""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import av
import numpy as np
import openai
import psutil
from PIL import Image

from examples.server import HOST, Server, ServerFailed
from tests.nullgpu import counters
from tests.nullgpu.environment import Environment, prepare
from tests.nullgpu.scenarios import SCENARIOS, Ask, Picture, Scenario
from tests.support import media
from tests.support.cluster import replicas

GIB = 1 << 30
MOST_OF_PLAN = 1.03
"""Counted bytes of a stage, divided by the planned ones."""

ANSWER_S = 600.0
SAMPLES_A_FRAME = 1920


class NullServer(Server):
    """A server on null devices.

    Args:
        run: folder for its log, its counters and what captures refused.
    """

    def __init__(self, environment: Environment, scenario: Scenario, run: Path) -> None:
        super().__init__(environment.model(scenario.model), run / "server.log")
        variables = environment.variables(run, scenario.gpu, scenario.devices)
        serve = ["serve", str(environment.model(scenario.model)), "--omni", "--host", HOST, "--port", str(self.port)]
        more = ["--load-format", "dummy", "--served-model-name", "m", "--omni-log-dir", str(run / "logs")]
        command = [str(environment.python.with_name("vllm")), *serve, *more, *scenario.flags]
        self.words = ["env", *(f"{name}={value}" for name, value in variables.items()), *command]
        self.run = run


def main() -> int:
    """Run the scenarios that are named, or all; the exit status is 1 if one of them has a defect."""
    parser = argparse.ArgumentParser(prog="make null-gpu", description=__doc__)
    names = [each.name for each in SCENARIOS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(names)}; all without")
    parser.add_argument("--once", action="store_true", help="start each scenario once")
    args = parser.parse_args()
    if unknown := set(args.names) - set(names):
        parser.error(f"no scenario {', '.join(sorted(unknown))}; use {', '.join(names)}")
    environment = prepare()
    defects = 0
    for scenario in SCENARIOS:
        if not args.names or scenario.name in args.names:
            for turn in range(1 if args.once else 2):
                defects += report(scenario, turn, list(defects_of(environment, scenario)))
    return int(defects > 0)


def report(scenario: Scenario, turn: int, found: list[str]) -> int:
    """Print the defects of a start; returns their number."""
    print(f"{scenario.name}, start {turn + 1}: {'ok' if not found else f'{len(found)} defects'}", flush=True)
    for each in found:
        print(f"  DEFECT {each}", flush=True)
    return len(found)


def defects_of(environment: Environment, scenario: Scenario) -> Iterator[str]:
    """Start a scenario, send its requests, and yield what is wrong."""
    with tempfile.TemporaryDirectory(prefix="null-gpu-") as folder:
        run = Path(folder)
        server = NullServer(environment, scenario, run)
        began = time.monotonic()
        try:
            with server:
                print(f"  {scenario.name} ready after {time.monotonic() - began:.0f} s", flush=True)
                for ask in scenario.asks:
                    yield from (wrong_picture if isinstance(ask, Picture) else wrong_answer)(server, ask)
                yield from wrong_counts(environment, scenario, server)
        except ServerFailed as error:
            yield f"the server did not start: {error}"
        yield from refused(run)


def wrong_answer(server: NullServer, ask: Ask) -> Iterator[str]:
    """Send a request; yield what is wrong with its answer."""
    client = openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0, timeout=ANSWER_S)
    fields = dict(ask.fields)
    extra = {"ignore_eos": True, "return_stage_metrics": True}
    extra |= {name: fields.pop(name) for name in ("talker",) if name in fields}
    began = time.monotonic()
    try:
        messages: Any = [{"role": "user", "content": list(map(made, ask.content))}]
        answer: Any = client.chat.completions.create(model="m", messages=messages, **fields, extra_body=extra)
    except openai.OpenAIError as error:
        yield f"{ask.name}: {error}"
        return
    print(f"  {ask.name}: {answer.usage.prompt_tokens} prompt tokens, {time.monotonic() - began:.1f} s", flush=True)
    if (tokens := answer.usage.completion_tokens) < fields["max_completion_tokens"]:
        yield f"{ask.name}: {tokens} tokens of text"
    if "talker" in extra:
        frames, audio = extra["talker"]["max_tokens"], answer.metrics["audio"]
        if not 0 < audio["samples"] <= frames * SAMPLES_A_FRAME:
            yield f"{ask.name}: {audio['samples']} samples of {audio['frames']} frames"


def wrong_picture(server: NullServer, ask: Picture) -> Iterator[str]:
    """Send a request for a picture; yield what is wrong with its answer."""
    client = openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0, timeout=ANSWER_S)
    began = time.monotonic()
    try:
        answer: Any = client.images.generate(
            model="m", prompt="a red fox", size=ask.size, response_format="b64_json", extra_body=dict(ask.fields)
        )
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
    size = part["height"], part["width"], 3
    picture = np.random.default_rng(0).integers(0, 255, size, np.uint8)
    if part["type"] == "image":
        return {"type": "image_url", "image_url": {"url": media.image_url(Image.fromarray(picture))}}
    data = io.BytesIO()
    with av.open(data, "w", format="mp4") as file:
        stream = file.add_stream("mpeg4", rate=2, width=part["width"], height=part["height"], pix_fmt="yuv420p")
        for shift in range(part["frames"]):
            file.mux(stream.encode(av.VideoFrame.from_ndarray(np.roll(picture, shift, 0))))
        file.mux(stream.encode(None))
    url = f"data:video/mp4;base64,{base64.b64encode(data.getvalue()).decode()}"
    return {"type": "video_url", "video_url": {"url": url}}


def wrong_counts(environment: Environment, scenario: Scenario, server: NullServer) -> Iterator[str]:
    """Compare counted memory with the plan; yield where they differ, and processes that need no device but have one."""
    planned = plan(environment, scenario)
    names = {}
    for name, about in replicas(server).items():
        tree = psutil.Process(about["pid"])
        names |= {process.pid: name for process in [tree, *tree.children(recursive=True)]}
    for process in counters.read(server.run / "counters"):
        if process.pid not in names:
            if any(process.peak):
                yield f"process {process.pid} has memory on a device, and is no replica's"
            continue
        name = names[process.pid]
        peak, expected = max(process.peak), planned[name]
        line = f"{name}: {peak / GIB:.2f} GiB counted, {expected / GIB:.2f} planned"
        print(f"  {line}; {process.graphs} graphs, {process.nodes} nodes, {process.launches} launches", flush=True)
        if peak > MOST_OF_PLAN * expected:
            yield line


def plan(environment: Environment, scenario: Scenario) -> dict[str, int]:
    """Planned bytes of each replica on its fullest device."""
    machine = "cuda:" + ",".join([f"{scenario.gpu.mib}MiB"] * scenario.devices)
    model = str(environment.model(scenario.model))
    words = ["plan", model, "--machine", machine, "--json", "--load-format", "dummy", *scenario.flags]
    done = subprocess.run([sys.executable, "-m", "vllm_omni_ext", *words], capture_output=True, text=True, check=True)
    found: dict[str, int] = {}
    for device in json.loads(done.stdout)["memory"]:
        for replica in device["replicas"]:
            total = sum(value for name, value in replica.items() if name.endswith("_bytes"))
            found[replica["id"]] = max(found.get(replica["id"], 0), total)
    return found


def refused(run: Path) -> Iterator[str]:
    """Captures that CUDA would have refused, and allocations that did not fit."""
    with contextlib.suppress(FileNotFoundError):
        for line in (run / "refused").read_text().splitlines():
            if "REFUSED" in line or "out of memory" in line:
                yield line


if __name__ == "__main__":
    sys.exit(main())
