"""Measures the CPU time of a streamed talker step in the API server's own code; fake replicas, no engine, no model.

An output of the talker passes the orchestrator, the flow, the observer and the pools. Every fourth output makes a part
for code2wav, which is encoded as in vLLM's client, and answered. Each step is also recorded in vLLM's statistics; this
is included in its time and has a row of its own. The statistics are in files, as with several API servers, except with
`--api-servers 1`. "warm" repeats steps back to back. "cold" reads 64 MB between them, as after the pause of a real
step. Times are of this thread, so other programs have little effect.

    python benchmarks/step_cpu.py [--steps 2000] [--requests 1 4] [--api-servers 2] [--profile]
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import pstats
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from checkpoint import checkpoint
from prometheus_client import CollectorRegistry
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackEncoder

from vllm_omni_ext import metrics
from vllm_omni_ext.connectors.chunks import ChunkSchedule
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.metrics import Metrics
from vllm_omni_ext.model_plugins.qwen3_omni.flow import ReadAloudFlow, SpeechPlan
from vllm_omni_ext.model_plugins.qwen3_omni.prompt import SpecialIds, find_parts
from vllm_omni_ext.observability.engine_stats import EngineNumbers, ReplicaStats, tokens_of
from vllm_omni_ext.observability.observer import Observer
from vllm_omni_ext.orchestrator.engine_requests import EngineRequests
from vllm_omni_ext.orchestrator.messages import Opened
from vllm_omni_ext.orchestrator.orchestrator import Orchestrator
from vllm_omni_ext.orchestrator.placement import Settings
from vllm_omni_ext.plugins.runtime import RequestOptions
from vllm_omni_ext.pool.stage_pool import StagePool

TALKER, CODE2WAV, THINKER = (ReplicaId(stage, 0) for stage in ("talker", "code2wav", "thinker"))
GROUPS = 16
CHUNK = 4
SAMPLES = 1920
"""Number of samples of a frame."""
FRAMES = 200
"""Frames of a request."""
US = 1e6
IDS = SpecialIds(
    im_start=1,
    user=2,
    assistant=3,
    tts_bos=4,
    tts_eos=5,
    tts_pad=6,
    multimodal=frozenset(),
    codec_nothink=1,
    codec_think_bos=2,
    codec_think_eos=3,
    codec_pad=4,
    codec_bos=5,
    codec_eos=6,
    speakers={"ethan": 7},
)
PROMPT = [1, 2, 9, 10, 11, 1, 3, 9]


class Sent:
    """A fake replica, which encodes its requests as vLLM's client does, and sends them nowhere.

    Attributes:
        ids: ids of the requests, for the fake answers.
    """

    def __init__(self, replica: ReplicaId) -> None:
        self.id = replica
        self.encoder = MsgpackEncoder()
        self.ids: list[str] = []

    async def add(self, request: Any) -> None:
        """Encode a request as for vLLM's socket, and store its id."""
        self.encoder.encode(request)
        self.ids.append(request.request_id)

    async def abort(self, request_ids: list[str]) -> None:
        """Do nothing."""


class Runtime:
    """A `ModelRuntime` that decodes outputs only."""

    def decode(self, stage: str, tensor: Any) -> Any:
        """Return the tensor unchanged."""
        return tensor


class Driver:
    """Runs an orchestrator with fake replicas; all requests are in each step, as in one engine.

    Args:
        requests: number of concurrent requests.
        cold: read 64 MB before each step, so that the CPU's caches are cold.

    Attributes:
        times: CPU seconds of each step, by kind of step.
    """

    def __init__(self, requests: int, config: VllmConfig, api_servers: int, *, cold: bool) -> None:
        self.replicas: dict[ReplicaId, Any] = {each: Sent(each) for each in (TALKER, CODE2WAV, THINKER)}
        runtime: Any = Runtime()
        self.observer = Observer(
            Metrics("m", CollectorRegistry()), frontend="thinker", replicas=self.replicas, alone=api_servers == 1
        )
        self.numbers = EngineNumbers("thinker", ["thinker", "talker", "code2wav"], tuple(self.replicas))
        self.stats = ReplicaStats(
            config,
            dict.fromkeys(self.replicas, config),
            self.numbers,
            planned=tuple(self.replicas),
            client_count=api_servers,
        )
        self.orchestrator = Orchestrator(
            Settings(frontend="thinker"),
            runtime=runtime,
            pools={each.stage: StagePool(each.stage, [each], changed=self.observer.bound) for each in self.replicas},
            replicas=self.replicas,
            requests=EngineRequests(),
            observer=self.observer,
        )
        self.requests = requests
        kinds = ("frame", "frame and part", "answer of code2wav", "statistics")
        self.times: dict[str, list[float]] = {kind: [] for kind in kinds}
        self.profile = cProfile.Profile()
        self.profiled = False
        self._cache = np.ones(8 << 20, np.int64) if cold else None
        self._names = 0

    async def run(self, steps: int) -> None:
        """Run `steps` steps of the talker, with new requests after every `FRAMES` steps."""
        for begun in range(0, steps, FRAMES):
            names = [f"r{begun}-{number}" for number in range(self.requests)]
            sinks = [await self.open(name) for name in names]
            for step in range(min(FRAMES, steps - begun)):
                await self.step(names, sinks, step)
            await self.orchestrator.abort(names)

    async def open(self, name: str) -> asyncio.Queue[Any]:
        """Begin a request; return its sink, the queue that gets its chunks of sound."""
        parts = find_parts(PROMPT, IDS)
        assert parts is not None
        speech = SpeechPlan(prompt=PROMPT, parts=parts, voice="ethan", ids=IDS, sample_rate=24_000)
        sink: asyncio.Queue[Any] = asyncio.Queue()
        flow = ReadAloudFlow(speech, [9, 10, 11], frames=ChunkSchedule((CHUNK,)))
        options = RequestOptions(modalities=("audio",))
        event = Opened(request_id=name, external_id=name, flow=flow, options=options, sink=sink)
        await self.orchestrator.open(event)
        return sink

    async def step(self, names: list[str], sinks: list[asyncio.Queue[Any]], step: int) -> None:
        """Simulate one step of the talker, and one of code2wav if the talker's step has completed a part for it."""
        parts = self.replicas[CODE2WAV].ids
        parts.clear()
        frames = [
            EngineCoreOutput(name, [7], pooling_output=torch.zeros(1, GROUPS, dtype=torch.int64)) for name in names
        ]
        taken = await self.measured(TALKER, frames)
        self.times["frame and part" if parts else "frame"].append(taken)
        if parts:
            sound = [
                EngineCoreOutput(part, [], pooling_output=torch.zeros(CHUNK * SAMPLES), finish_reason=FinishReason.STOP)
                for part in parts
            ]
            self.times["answer of code2wav"].append(await self.measured(CODE2WAV, sound))
            for sink in sinks:
                sink.get_nowait()

    async def measured(self, replica: ReplicaId, outputs: list[EngineCoreOutput]) -> float:
        """Pass the outputs of one step to the orchestrator and to the statistics; return the CPU seconds of both."""
        stats = SchedulerStats(num_running_reqs=self.requests)
        if self._cache is not None:
            self._cache.sum()
        if self.profiled:
            self.profile.enable()
        began = time.thread_time()
        for each in outputs:
            await self.orchestrator.produced(replica, each)
        noted = time.thread_time()
        self.observer.loaded(replica, stats)
        self.stats.record(stats, tokens_of(EngineCoreOutputs(outputs=outputs)), engine_idx=self.numbers.of(replica))
        self.times["statistics"].append(time.thread_time() - noted)
        taken = time.thread_time() - began
        self.profile.disable()
        return taken


def rows(requests: int, config: VllmConfig, args: argparse.Namespace) -> Iterator[tuple[str, float, float]]:
    """Yield the median microseconds of each kind of step: (kind, warm, cold)."""
    found = []
    for cold in (False, True):
        driver = Driver(requests, config, args.api_servers, cold=cold)
        gc.disable()
        asyncio.run(driver.run(FRAMES))
        for times in driver.times.values():
            times.clear()
        asyncio.run(driver.run(args.steps))
        gc.enable()
        found.append(driver.times)
    for kind in found[0]:
        yield kind, *(float(np.median(times[kind])) * US for times in found)


def main() -> None:
    """Run this benchmark from the command line: make the configuration that vLLM's statistics need, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--api-servers", type=int, default=2, help="1: the metrics are in memory")
    parser.add_argument("--profile", action="store_true", help="show where the time goes")
    args = parser.parse_args()
    with checkpoint(None) as model, tempfile.TemporaryDirectory() as folder:
        if args.api_servers > 1:
            metrics.share(folder)
        measure(AsyncEngineArgs(model=model, max_model_len=1024).create_engine_config(), args)


def measure(config: VllmConfig, args: argparse.Namespace) -> None:
    """Measure each number of concurrent requests and print a table; with `--profile`, print a profile instead."""
    if args.profile:
        driver = Driver(args.requests[0], config, args.api_servers, cold=False)
        driver.profiled = True
        asyncio.run(driver.run(args.steps))
        pstats.Stats(driver.profile).sort_stats("tottime").print_stats(28)
        return
    print(f"{'microseconds of a step':<36}{'warm':>8}{'cold':>8}")
    for requests in args.requests:
        for kind, warm, cold in rows(requests, config, args):
            print(f"{f'{kind}, {requests} at once':<36}{warm:>8.1f}{cold:>8.1f}")


if __name__ == "__main__":
    main()
