"""Metrics and traces of requests and replicas, with a clock that the test sets."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry
from vllm.v1.metrics.stats import SchedulerStats

from vllm_omni_ext import metrics as m
from vllm_omni_ext.errors import RequestFailed, StageUnavailable
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.metrics import Metric, Metrics
from vllm_omni_ext.modalities import audio
from vllm_omni_ext.modalities.base import OutputChunk
from vllm_omni_ext.modalities.chunks import AudioChunk, ImageChunk
from vllm_omni_ext.observability.observer import Observer, payload_bytes
from vllm_omni_ext.observability.request_trace import RequestTrace, as_metrics
from vllm_omni_ext.orchestrator.messages import Opened, Output
from vllm_omni_ext.plugins.flow import ForwardFlow
from vllm_omni_ext.plugins.runtime import RequestOptions

RATE = 24_000
THINKER, TALKER, VOCODER = ReplicaId("thinker", 0), ReplicaId("talker", 1), ReplicaId("code2wav", 0)


class Bench:
    """An observer, its clock and its registry."""

    def __init__(self) -> None:
        self.now = 100.0
        self.registry = CollectorRegistry()
        self.traces: dict[str, RequestTrace] = {}
        self.watched: list[RequestTrace] = []
        self.observer = Observer(
            Metrics("tiny", self.registry),
            frontend="thinker",
            replicas=[THINKER, TALKER, VOCODER],
            clock=lambda: self.now,
        )

    def value(self, metric: Metric, suffix: str = "", **labels: str) -> float | None:
        return self.registry.get_sample_value(metric.full_name + suffix, {"model_name": "tiny", **labels})

    def open(
        self, request_id: str = "r", modalities: tuple[str, ...] = ("text", "audio"), *, streamed: bool = False
    ) -> RequestTrace:
        opened = Opened(
            request_id=request_id,
            external_id=f"client {request_id}",
            flow=ForwardFlow("thinker"),
            options=RequestOptions(modalities=modalities, streamed=streamed),
            arrival=time.time(),
            watch=self.watched.append,
        )
        trace = self.traces[request_id] = self.observer.opened(opened)
        return trace

    def sent(self, source: str | None, replica: ReplicaId, payload: Any = None) -> None:
        self.observer.sent(self.traces["r"], source, replica, payload)

    def produce(self, replica: ReplicaId, *tokens: int, **fields: Any) -> None:
        self.observer.produced(self.traces["r"], Output(replica=replica, engine_id="r", tokens=tokens, **fields))

    def emit(self, stage: str, chunk: OutputChunk) -> None:
        self.observer.emitted(self.traces["r"], stage, chunk)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def sound(samples: int, frames: int = 0, *, finished: bool = False) -> AudioChunk:
    return AudioChunk(
        request_id="r",
        samples=np.zeros(samples, np.float32),
        sample_rate=RATE,
        frames=np.zeros((frames, 4), np.int64),
        last=finished,
    )


def spoken(bench: Bench) -> None:
    """A whole request: text at 0.5 s and 0.75 s, sound at 2 s and 3 s."""
    bench.open(streamed=True)
    bench.sent(None, THINKER)
    bench.now += 0.5
    bench.produce(THINKER, 5, waited_s=0.25)
    bench.sent("thinker", TALKER, {"text": [1, 2, 3], "last": False})
    bench.now += 0.25
    bench.produce(THINKER, 6, 7)
    bench.sent("thinker", TALKER, [{"track": [9], "last": True}, None])
    bench.now += 0.25
    bench.produce(TALKER, 1)
    bench.produce(TALKER, 2)
    bench.sent("talker", VOCODER, [1, 2, 3, 4])
    bench.now += 1.0
    bench.produce(VOCODER)
    bench.emit("code2wav", sound(RATE, 1))
    bench.now += 1.0
    bench.produce(VOCODER)
    bench.emit("code2wav", sound(RATE // 2, 2, finished=True))
    bench.observer.ended(bench.traces["r"], "finished")


def test_metrics_of_a_spoken_request(bench: Bench) -> None:
    spoken(bench)
    assert bench.value(m.TIME_TO_FIRST_TEXT, "_sum", modalities="text+audio") == pytest.approx(0.5, abs=0.01)
    assert bench.value(audio.TIME_TO_FIRST_AUDIO, "_sum") == pytest.approx(2, abs=0.01)
    assert bench.value(audio.AUDIO_CHUNK_GAP, "_count") == 1
    assert bench.value(audio.AUDIO_CHUNK_GAP, "_sum") == pytest.approx(1)
    assert bench.value(audio.AUDIO_SECONDS) == pytest.approx(1.5)
    assert bench.value(audio.REAL_TIME_FACTOR, "_sum") == pytest.approx(2, abs=0.01)
    assert bench.value(m.STAGE_QUEUE, "_sum", stage="thinker") == pytest.approx(0.25)
    assert bench.value(m.STAGE_REQUEST_DURATION, "_sum", stage="talker") == pytest.approx(0.5)
    assert bench.value(m.STAGE_TRANSFER_CHUNKS, source="thinker", target="talker") == 2
    assert bench.value(m.STAGE_TRANSFER_BYTES, source="thinker", target="talker") == 16
    assert bench.value(m.STAGE_TRANSFER_BYTES, source="talker", target="code2wav") == 16
    assert bench.value(m.REQUESTS, outcome="finished", modalities="text+audio") == 1


def test_metrics_of_a_response_have_all_stages(bench: Bench) -> None:
    spoken(bench)
    (record,) = bench.watched
    assert record is bench.traces["r"] and record.outcome == "finished"
    course = as_metrics(record)
    assert list(course["stages"]) == ["thinker", "talker", "code2wav"]
    thinker, sound_made = course["stages"]["thinker"], course["audio"]
    assert (thinker["replica"], thinker["tokens"], thinker["waited_s"]) == ("thinker/0", 3, 0.25)
    assert (thinker["first_output_s"], thinker["last_output_s"]) == pytest.approx((0.5, 0.75), abs=0.01)
    assert [tuple(over[name] for name in ("from", "to", "chunks", "bytes")) for over in course["handovers"]] == [
        ("thinker", "talker", 2, 16),
        ("talker", "code2wav", 1, 16),
    ]
    assert [sound_made[name] for name in ("frames", "samples", "seconds", "chunks")] == [2, RATE * 3 // 2, 1.5, 2]


@pytest.mark.parametrize("error", [StageUnavailable("talker/0 is gone"), RequestFailed("no"), ValueError("odd")])
def test_a_failure_is_counted(bench: Bench, error: Exception) -> None:
    bench.observer.failed(bench.open(), "talker", error)
    assert bench.value(m.ERRORS, kind=type(error).__name__, stage="talker") == 1
    assert bench.value(m.REQUESTS, outcome="failed", modalities="text+audio") == 1


def test_events_after_the_end_are_ignored(bench: Bench) -> None:
    bench.observer.ended(bench.open(), "aborted")
    bench.observer.sent(None, "thinker", TALKER, [1])
    bench.observer.produced(None, Output(replica=THINKER, engine_id="r"))
    bench.observer.emitted(None, "code2wav", sound(1))
    bench.observer.failed(None, "thinker", RequestFailed("no"))
    bench.observer.ended(None, "finished")
    shown = [sample for family in bench.registry.collect() for sample in family.samples]
    assert [sample.value for sample in shown if sample.name == m.REQUESTS.full_name] == [1]
    assert not any(sample.name in (m.ERRORS.full_name, m.STAGE_TRANSFER_BYTES.full_name) for sample in shown)


def test_gauges_and_totals_of_a_replica(bench: Bench) -> None:
    labels, before = {"stage": "talker", "replica": "talker/1"}, time.time()
    bench.observer.loaded(TALKER, SchedulerStats(num_running_reqs=3, num_waiting_reqs=1, num_skipped_waiting_reqs=1))
    bench.observer.bound(TALKER, 5)
    bench.observer.restarted(TALKER, 3)
    bench.observer.heartbeat(TALKER)
    bench.observer.viewed(2.0)
    for why in ("policy", "policy", "affinity"):
        bench.observer.decided(TALKER, why)
    for requests in (4, 2):
        bench.observer.waiting("talker", requests)
    bench.observer.taken_over("talker")
    bench.observer.fetched("a", "talker", 0.3)
    bench.observer.local_prefill("talker")
    gauges = m.REPLICA_RUNNING, m.REPLICA_WAITING, m.REPLICA_IN_FLIGHT, m.REPLICA_UP, m.REPLICA_RESTARTS
    assert [bench.value(metric, **labels) for metric in gauges] == [3, 2, 5, 1, 3]
    assert bench.observer.loads[TALKER] == (3, 2)
    heard, seen = bench.value(m.REPLICA_HEARTBEAT, **labels), bench.value(m.COORDINATOR_VIEW)
    assert heard is not None and before <= heard <= time.time()
    assert seen is not None and before - 2 <= seen <= time.time() - 2
    assert [bench.value(m.ROUTING_DECISIONS, reason=why, **labels) for why in ("policy", "affinity")] == [2, 1]
    totals = m.REQUESTS_WAITING, m.REQUEST_FAILOVERS, m.KV_LOCAL_PREFILLS
    assert [bench.value(metric, stage="talker") for metric in totals] == [2, 1, 1]
    assert bench.value(m.KV_WAIT, "_sum", source="a", target="talker") == 0.3
    bench.observer.replica_down(TALKER)
    assert [bench.value(metric, **labels) for metric in gauges] == [0, 0, 0, 0, 3]


def test_a_gauge_that_another_api_server_wrote_is_written_again() -> None:
    clock, metrics = iter((0.0, 1.0, 1.1, 1.3, 1.4, 1.5)), Metrics("tiny", CollectorRegistry())
    observer = Observer(metrics, frontend="thinker", replicas=[TALKER], alone=False, clock=lambda: next(clock))
    gauge, seen = metrics.of(m.REPLICA_RUNNING, "talker", "talker/1"), []
    for running in (1, 1, 1, 0, 0):
        gauge.set(7)
        observer.loaded(TALKER, SchedulerStats(num_running_reqs=running))
        seen.append(gauge._value.get())
    assert seen == [1, 7, 1, 0, 0]
    assert observer.loads[TALKER] == (0, 0)


@pytest.mark.parametrize(
    ("payload", "size"),
    [
        (None, 0),
        ([1, 2, 3], 12),
        ({"track": [1], "last": True, "fill": 7, "voice": "ethan"}, 8),
        (b"12345", 5),
        ([{"track": []}, torch.zeros(2, 3)], 24),
        ([(1, 2), (3, 4)], 16),
    ],
)
def test_sizes_of_payloads(payload: Any, size: int) -> None:
    assert payload_bytes(payload) == size


@pytest.mark.parametrize("streamed", [True, False])
def test_delays_of_streamed_answers_are_counted(bench: Bench, streamed: bool) -> None:
    """Pieces of half a second: in time, 0.25 s late, in time for the delayed player, 1 s late."""
    bench.open(streamed=streamed)
    for pause in (1.0, 0.5, 0.75, 0.5, 1.5):
        bench.now += pause
        bench.emit("code2wav", sound(RATE // 2, 1))
    assert bench.value(audio.AUDIO_CHUNK_GAP, "_count") == (4 if streamed else None)
    assert bench.value(audio.TIME_TO_FIRST_AUDIO, "_count") == (1 if streamed else None)
    facts = as_metrics(bench.traces["r"])["audio"]
    if streamed:
        assert bench.value(audio.AUDIO_UNDERRUN) == facts["underrun_s"] == pytest.approx(1.25)
    else:
        assert not bench.value(audio.AUDIO_UNDERRUN) and "underrun_s" not in facts


# -- replicas that come and go -----------------------------------------------------------------------


def series(bench: Bench, replica: ReplicaId) -> set[str]:
    """Return the names of all series of a replica."""
    return {
        sample.name
        for family in bench.registry.collect()
        for sample in family.samples
        if sample.labels.get("replica") == str(replica)
    }


def test_only_the_totals_of_a_forgotten_replica_stay(bench: Bench) -> None:
    bench.observer.restarted(TALKER, 3)
    bench.observer.heartbeat(TALKER)
    bench.observer.decided(TALKER, "only")
    bench.observer.replica_down(TALKER)
    others = series(bench, THINKER)
    totals = {each for each in series(bench, TALKER) if each.endswith(("_total", "_created"))}
    assert len(totals) == 4 and len(series(bench, TALKER)) > len(others)
    bench.observer.forgotten(TALKER)
    assert series(bench, TALKER) == totals and TALKER not in bench.observer.loads
    bench.observer.forgotten(TALKER)
    assert series(bench, THINKER) == others
    bench.observer.replica_up(TALKER)
    assert bench.value(m.REPLICA_UP, stage="talker", replica="talker/1") == 1


def test_bytes_times_and_failures_of_kv_transfers_are_counted(bench: Bench) -> None:
    labels = {"stage": "thinker", "replica": "thinker/0"}
    assert bench.value(m.KV_BYTES, **labels) is None
    columns = {
        "transfer_duration": [0.02, 0.2],
        "bytes_transferred": [1000, 500],
        "num_failed_transfers": [],
        "num_failed_recvs": [1, 1],
        "num_kv_expired_reqs": [1],
        "of_another_connector": [7],
    }
    bench.observer.loaded(THINKER, SchedulerStats(kv_connector_stats=columns))
    bench.observer.loaded(THINKER, SchedulerStats(kv_connector_stats={"bytes_transferred": [24]}))
    bench.observer.loaded(THINKER, SchedulerStats())
    assert bench.value(m.KV_BYTES, **labels) == 1524
    assert bench.value(m.KV_TRANSFER, "_count", stage="thinker") == 2
    assert bench.value(m.KV_TRANSFER, "_sum", stage="thinker") == pytest.approx(0.22)
    found = [bench.value(m.KV_FAILURES, **labels, kind=kind) for kind in ("send", "receive", "expired")]
    assert found == [None, 2, 1]
    bench.observer.forgotten(THINKER)
    assert bench.value(m.KV_BYTES, **labels) == 1524, "totals stay"
    assert bench.value(m.KV_FAILURES, **labels, kind="receive") == 2


def test_times_of_the_parts_of_an_output_add_up(bench: Bench) -> None:
    bench.open()
    for steps in (1.5, 0.5):
        picture = ImageChunk(pixels=np.zeros((1, 1, 3), np.uint8), seconds={"steps": steps, "vae": 0.25})
        bench.emit("talker", picture)
    assert bench.value(m.STAGE_PARTS, "_sum", stage="talker", part="steps") == 2.0
    assert bench.value(m.STAGE_PARTS, "_count", stage="talker", part="vae") == 2
