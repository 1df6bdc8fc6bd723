"""Prefill and decode on replicas of their own over NIXL, through all stages; `test_prefill_decode.py` runs it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.processes import prefill_decode_suite
from tests.processes.prefill_decode_suite import DECODE, MEDIA, PREFILL, each, nothing_is_kept, started, under_load
from tests.processes.test_parity import answer, check
from tests.support.cluster import free_ports, until
from tests.support.oracle import Golden, Oracle
from vllm_omni_ext.ids import ReplicaId

pytestmark = pytest.mark.extended
environment = prefill_decode_suite.environment
SETTINGS = {"connector": "nixl", "kv_retention_s": 10.0}
RANGE = 40
"""Ports of `port_range`."""

SOME = ["text", "turns", "audio", "two_images_and_audio", "long_prompt", "long_media_prompt", "one_token"]


@pytest.fixture(scope="module")
def pair(tiny: Path) -> Iterator[Any]:
    first = free_ports(RANGE)
    with started(tiny, SETTINGS, port_range=f"{first}-{first + RANGE - 1}") as omni:
        yield omni


def test_nixl_and_its_library_listen_on_ports_of_the_range_only(pair: Any) -> None:
    first, last = pair.plan.config.cluster.ports
    processes = pair._deployment.processes()
    for side in (PREFILL, DECODE):
        connections = psutil.Process(processes[ReplicaId(side, 0)].pid).net_connections("tcp")
        ports = [each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN]
        assert ports and all(first <= port <= last for port in ports), ports


def test_answers_equal_transformers(pair: Any, oracle: Oracle, expected: dict[str, Golden]) -> None:
    """Decode computes no token of a prompt but the last."""
    before = each(pair, "computed_tokens", DECODE)[f"{DECODE}/0"]
    for name, output in zip(SOME, answer(pair, oracle, SOME), strict=True):
        check(output, expected[name])
    computed = each(pair, "computed_tokens", DECODE)[f"{DECODE}/0"] - before
    assert computed == sum(len(expected[name].thinker_ids) for name in SOME)
    steps = each(pair, "encoder_steps")
    assert steps[f"{PREFILL}/0"] > 0 and steps[f"{DECODE}/0"] == 0
    assert until(lambda: nothing_is_kept(pair), prefill_decode_suite.SETTLED_S)


def handed(omni: Any) -> int:
    """Prompts that the present replicas have computed for others."""
    return sum(edge.handed for edge in omni._omni.orchestrator.pairs())


def test_answers_stay_the_same_when_the_prefill_replica_dies(
    pair: Any, oracle: Oracle, expected: dict[str, Golden]
) -> None:
    """Decode computes the prompts until the replica has restarted, and fetches blocks of it then."""
    under_load(pair, oracle, expected, f"{PREFILL}/0")
    before = handed(pair)
    check(answer(pair, oracle, MEDIA[:1])[0], expected[MEDIA[0]])
    assert handed(pair) == before + 1
