"""Metrics and traces of requests and replicas, with a clock that the test sets."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry
from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, FinishReason
from vllm.v1.metrics.stats import SchedulerStats

from vllm_omni_ext import metrics as m
from vllm_omni_ext.errors import RequestFailed, StageUnavailable
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.metrics import Metric, Metrics
from vllm_omni_ext.modalities import audio
from vllm_omni_ext.modalities.base import AUDIO, TEXT
from vllm_omni_ext.modalities.chunks import AudioChunk, ImageChunk
from vllm_omni_ext.observability.observer import Observer, payload_bytes
from vllm_omni_ext.observability.request_trace import RequestTrace, as_metrics, as_trace

RATE = 24_000
THINKER, TALKER, VOCODER = ReplicaId("thinker", 0), ReplicaId("talker", 1), ReplicaId("code2wav", 0)


class Bench:
    """An observer, its clock and its registry."""

    def __init__(self) -> None:
        self.now = 100.0
        self.registry = CollectorRegistry()
        self.ended: list[RequestTrace] = []
        self.observer = Observer(
            Metrics("tiny", self.registry),
            frontend="thinker",
            replicas=[THINKER, TALKER, VOCODER],
            keep=2,
            ended=self.ended.append,
            clock=lambda: self.now,
        )

    def value(self, metric: Metric, suffix: str = "", **labels: str) -> float | None:
        return self.registry.get_sample_value(metric.full_name + suffix, {"model_name": "tiny", **labels})

    def open(self, request_id: str = "r", modalities: tuple[str, ...] = ("text", "audio")) -> None:
        parts = (TEXT,) if modalities == ("text",) else (TEXT, AUDIO)
        self.observer.opened(request_id, f"client {request_id}", modalities, parts=parts, arrival=time.time())

    def produce(self, stage: str, *tokens: int, request_id: str = "r", **fields: Any) -> None:
        self.observer.produced(stage, EngineCoreOutput(request_id, list(tokens), **fields))


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    assert made.observer.held() == 0, "a request was not ended"


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
    bench.open()
    bench.observer.sent("r", None, THINKER)
    bench.now += 0.5
    events = [
        EngineCoreEvent(EngineCoreEventType.QUEUED, 7.0),
        EngineCoreEvent(EngineCoreEventType.SCHEDULED, 7.25),
    ]
    bench.produce("thinker", 5, events=events)
    bench.observer.sent("r", "thinker", TALKER, {"text": [1, 2, 3], "last": False})
    bench.now += 0.25
    bench.produce("thinker", 6, 7, finish_reason=FinishReason.STOP)
    bench.observer.sent("r", "thinker", TALKER, [{"track": [9], "last": True}, None])
    bench.now += 0.25
    bench.produce("talker", 1)
    bench.produce("talker", 2, finish_reason=FinishReason.STOP)
    bench.observer.sent("r", "talker", VOCODER, [1, 2, 3, 4])
    bench.now += 1.0
    bench.produce("code2wav")
    bench.observer.emitted("r", "code2wav", sound(RATE, 1))
    bench.now += 1.0
    bench.produce("code2wav", finish_reason=FinishReason.STOP)
    bench.observer.emitted("r", "code2wav", sound(RATE // 2, 2, finished=True))
    bench.observer.finished("r", AUDIO)


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


def test_metrics_and_trace_of_one_request_have_all_stages(bench: Bench) -> None:
    bench.observer.keep("client r")
    spoken(bench)
    record = bench.observer.trace("client r")
    assert record is not None and bench.ended == [record]
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
    events = as_trace(record)["traceEvents"]
    named = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {"request client r", "thinker (thinker/0)", "talker (talker/1)", "code2wav (code2wav/0)"} <= named
    bars = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and isinstance(event["ts"], int) for event in bars)
    whole = next(event for event in bars if event["name"] == "request: finished")
    assert whole["dur"] == pytest.approx(3_000_000, abs=10_000)
    assert all(event["ts"] + event["dur"] <= whole["dur"] for event in bars)


@pytest.mark.parametrize("error", [StageUnavailable("talker/0 is gone"), RequestFailed("no"), ValueError("odd")])
def test_a_failure_is_counted_once(bench: Bench, error: Exception) -> None:
    bench.open()
    bench.observer.failed("r", "talker", error)
    bench.observer.failed("r", "talker", error)
    bench.observer.aborted("r")
    assert bench.value(m.ERRORS, kind=type(error).__name__, stage="talker") == 1
    assert bench.value(m.REQUESTS, outcome="failed", modalities="text+audio") == 1
    assert bench.value(m.REQUESTS, outcome="aborted", modalities="text+audio") is None


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [(FinishReason.ABORT, "aborted"), (FinishReason.ERROR, "failed"), (FinishReason.LENGTH, "finished")],
)
def test_a_text_request_ends_with_the_engines_finish_reason(bench: Bench, reason: FinishReason, outcome: str) -> None:
    bench.open(modalities=("text",))
    bench.observer.sent("r", None, THINKER)
    bench.produce("thinker", finish_reason=reason)
    assert bench.value(m.REQUESTS, outcome=outcome, modalities="text") == 1


def test_a_cancelled_request_counts_as_aborted_and_later_events_are_ignored(bench: Bench) -> None:
    bench.open()
    bench.observer.failed("r", "thinker", GeneratorExit())
    assert bench.value(m.REQUESTS, outcome="aborted", modalities="text+audio") == 1
    bench.observer.sent("r", None, THINKER)
    bench.produce("thinker", 1)
    bench.observer.emitted("r", "code2wav", sound(1))
    bench.observer.finished("r", TEXT)
    assert len(bench.ended) == 1


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
    bench.observer.alone("talker")
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


def test_only_the_last_traces_are_kept(bench: Bench) -> None:
    for name in ("a", "b", "c"):
        bench.observer.keep(f"client {name}")
        bench.open(name, ("text",))
        bench.observer.finished(name, TEXT)
    assert bench.observer.trace("client a") is None
    kept = bench.observer.trace("client c")
    assert kept is not None and kept.outcome == "finished"


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


def test_underruns_are_counted(bench: Bench) -> None:
    """Pieces of half a second: in time, 0.25 s late, in time for the delayed player, 1 s late."""
    bench.open()
    bench.observer.finished("r", TEXT)
    for pause in (1.0, 0.5, 0.75, 0.5, 1.5):
        bench.now += pause
        bench.observer.emitted("r", "code2wav", sound(RATE // 2, 1))
    assert bench.value(audio.AUDIO_UNDERRUN) == pytest.approx(1.25)
    bench.observer.finished("r", AUDIO)
    (record,) = bench.ended
    assert as_metrics(record)["audio"]["underrun_s"] == pytest.approx(1.25)


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
        bench.observer.emitted("r", "talker", picture)
    assert bench.value(m.STAGE_PARTS, "_sum", stage="talker", part="steps") == 2.0
    assert bench.value(m.STAGE_PARTS, "_count", stage="talker", part="vae") == 2
    bench.observer.aborted("r")
