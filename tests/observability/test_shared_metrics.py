"""Metrics that several processes share. Each test has processes of its own: the setting is one for a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HEAD = """
import os, sys
import prometheus_client  # as vLLM may have done already
from vllm_omni_ext import metrics as m
from vllm_omni_ext.modalities.audio import AUDIO_SECONDS

m.share(sys.argv[1])

def work(number, requests):
    metrics = m.Metrics("tiny")
    metrics.of(m.REQUESTS, "finished", "text").inc(requests)
    metrics.of(AUDIO_SECONDS).inc(0.5)
    metrics.of(m.STAGE_REQUEST_DURATION, "talker").observe(0.2)
    metrics.of(m.REPLICA_IN_FLIGHT, "talker", "talker/0").set(requests)
    metrics.of(m.REPLICA_UP, "talker", "talker/0").set(1)
    metrics.of(m.REPLICA_RUNNING, "talker", "talker/0").set(10 * number)

def forked(*args):
    pid = os.fork()
    if pid == 0:
        work(*args)
        os._exit(0)
    os.waitpid(pid, 0)
    return pid

def scraped():
    from prometheus_client import CollectorRegistry, multiprocess
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    samples = [s for family in registry.collect() for s in family.samples if s.name.startswith(m.PREFIX)]
    assert len({(s.name, tuple(sorted(s.labels.items()))) for s in samples}) == len(samples)
    assert not any("pid" in s.labels for s in samples)
    return {s.name.removeprefix(m.PREFIX): s.value for s in samples}
"""


IMPORTS = """
import os, sys
from vllm_omni_ext.observability.observer import Observer  # imports vLLM

bodies, statuses = sys.argv[1::2], []
for body, folder in zip(bodies, sys.argv[2::2], strict=True):
    if os.fork() == 0:
        sys.argv[1:] = [folder]
        exec(body, {})
        os._exit(0)
    statuses.append(os.wait()[1])
print(*statuses)
"""
"""Runs each body in a process of its own, which has imported vLLM already."""


def python(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PROMETHEUS_MULTIPROC_DIR"}
    done = subprocess.run([sys.executable, "-c", *words], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done


def run(body: str, folder: Path) -> None:
    python(HEAD + body, str(folder))


@pytest.mark.engine
def test_api_servers_share_totals_and_gauges_also_after_a_restart(tmp_path: Path) -> None:
    run(
        """
first, second = forked(1, 3), forked(2, 4)
seen = scraped()
assert seen["requests_total"] == 7 and seen["audio_seconds_total"] == 1.0
assert seen["stage_request_duration_seconds_count"] == 2
assert seen["replica_requests_in_flight"] == 7, "a sum over API servers"
assert seen["replica_up"] == 1 and seen["replica_requests_running"] == 20, "the latest value of the same replica"
m.mark_dead(first)
seen = scraped()
assert seen["requests_total"] == 7, "totals never go back"
assert seen["replica_requests_in_flight"] == 4 and seen["replica_up"] == 1
forked(3, 1)
seen = scraped()
assert seen["requests_total"] == 8 and seen["replica_requests_in_flight"] == 5
assert seen["replica_requests_running"] == 30
""",
        tmp_path,
    )


@pytest.mark.engine
def test_the_state_after_the_latest_step_is_shown(tmp_path: Path) -> None:
    """Not the one that was written last: an API server reads states that its predecessor has not read."""
    run(
        """
def after_step(at, requests):
    if os.fork() == 0:
        metrics = m.Metrics("tiny")
        with m.StepGauge.state_after(round(at * 1e9)):
            metrics.of(m.REPLICA_RUNNING, "talker", "talker/0").set(requests)
        os._exit(0)
    os.wait()
    return scraped()["replica_requests_running"]

import time
now = time.time()
assert after_step(now - 9, 1) == 1
assert after_step(now - 5, 0) == 0
assert after_step(now - 7, 3) == 0, "an older step"
assert after_step(now + 100, 2) == 2, "of a host whose clock is ahead"
assert after_step(time.time(), 1) == 1
assert after_step(0, 5) == 5, "a step without a time is of now"
""",
        tmp_path,
    )


RESTARTS = """
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.observability.observer import Observer
TALKER, OTHER = ReplicaId("talker", 0), ReplicaId("talker", 1)

def counts(follows, *totals):
    pid = os.fork()
    if pid == 0:
        observer = Observer(m.Metrics("tiny"), frontend="talker", replicas=())
        if follows:
            observer.continue_restarts()
        for total in totals:
            observer.restarted(TALKER, total)
        m.Metrics("another model").of(m.REPLICA_RESTARTS, "talker", "talker/0").inc(100)
        observer.restarted(OTHER, 1)
        observer.forgotten(OTHER)
        observer.restarted(OTHER, 1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    m.mark_dead(pid)

def shown():
    return sorted(m.Metrics("tiny").shared_counts(m.REPLICA_RESTARTS).items())

assert shown() == []
counts(False, 0, 1)
assert shown() == [(("talker", "talker/0"), 1), (("talker", "talker/1"), 1)]
counts(True, 3, 3)
assert shown() == [(("talker", "talker/0"), 3), (("talker", "talker/1"), 1)], "two restarts while none counted"
counts(True, 2)
assert shown()[0][1] == 3, "it never falls"
counts(True, 5)
assert shown()[0][1] == 5
"""

LEFT = """
import math
from vllm.v1.metrics.stats import SchedulerStats
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.observability.observer import Observer
TALKER = ReplicaId("talker", 0)
observer = Observer(m.Metrics("tiny"), frontend="talker", replicas=[TALKER])
observer.heartbeat(TALKER)
observer.loaded(TALKER, SchedulerStats(num_running_reqs=2, num_waiting_reqs=1))
observer.bound(TALKER, 3)
observer.decided(TALKER, "only")
observer.forgotten(TALKER)
seen = scraped()
for name in ("replica_up", "replica_requests_running", "replica_requests_waiting", "replica_requests_in_flight"):
    assert seen[name] == 0, name
assert math.isnan(seen["replica_heartbeat_timestamp_seconds"]), "no panel shows how long ago it was"
assert seen["routing_decisions_total"] == 1
observer.replica_up(TALKER)
observer.heartbeat(TALKER)
assert scraped()["replica_up"] == 1 and scraped()["replica_heartbeat_timestamp_seconds"] > 0
"""


@pytest.mark.engine  # imports vLLM in a process of its own
def test_restarts_are_counted_on_and_a_replica_that_left_runs_nothing(tmp_path: Path) -> None:
    words = []
    for name, body in (("restarts", RESTARTS), ("left", LEFT)):
        (tmp_path / name).mkdir()
        words += [HEAD + body, str(tmp_path / name)]
    done = python(IMPORTS, *words)
    assert done.stdout.split()[-2:] == ["0", "0"], done.stderr
