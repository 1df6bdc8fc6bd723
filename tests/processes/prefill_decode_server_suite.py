"""Prefill and decode apart behind HTTP: two API servers, a prefill replica in another process.

`test_prefill_decode.py` runs it.
"""

from __future__ import annotations

import base64
import contextlib
import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.server import HOST, Server
from tests.processes.test_headless import check_parity
from tests.support.cluster import (
    LENGTH,
    MODEL,
    Answer,
    Headless,
    all_up,
    ask,
    ask_all,
    body,
    free_ports,
    get,
    idle,
    kill,
    listening_ports,
    load,
    metric,
    replicas,
    status,
    until,
    used,
    wait_busy,
)
from tests.support.media import image, openai_messages
from tests.support.namespace import two_hosts
from tests.support.oracle import Golden, Oracle

PREFILL, DECODE = "thinker.prefill", "thinker.decode"
TIMES = ["--omni-heartbeat-timeout", "20", "--omni-drain-timeout", "60"]
PORTS, RANGE = 3, 60
SESSIONS = 7
"""An odd number: a round-robin policy would change the replica of each."""

UP_S, SOON_S = 300.0, 120.0
"""For machines that other programs keep busy."""

AT_ONCE = 8
LONG = "A long prompt, " * 60
BODIES = [body(f"{LONG if number % 3 else 'Short.'} Tell me about number {number}.", 20, 30) for number in range(10)]
PATIENT = {"transfer_timeout_s": 60.0}
"""Decode gives up no transfer because it had to wait for a core."""

SPLIT = json.dumps({"thinker": {"prefill_decode": PATIENT}})
STAGE_CONFIG = ["--stage-config", "qwen3_omni_pd"]
MEDIA = ["audio", "video", "media_in_an_earlier_turn", "long_media_prompt"]
ALL = 5
"""Replicas: one of each side, talker, code2wav, and the one that joins."""


@pytest.fixture(scope="module")
def cluster(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Headless, list[Answer]]]:
    """A server, one more prefill replica that has joined it, and the answers to `BODIES` before that."""
    logs, port = tmp_path_factory.mktemp("logs"), free_ports(PORTS + RANGE)
    head = ["-oma", HOST, "-omp", str(port)]
    shared = [*STAGE_CONFIG, "--stage-overrides", SPLIT]
    shared += ["--omni-port-range", f"{port + PORTS}-{port + PORTS + RANGE - 1}"]
    flags = [*LENGTH, *shared, *TIMES]
    with (
        Server(tiny, logs / "head", [*flags, *head, "--api-server-count", "2"]) as server,
        Headless(tiny, logs / "crew", PREFILL, port, *shared) as crew,
    ):
        expected = ask_all(server, BODIES, 1)
        assert until(lambda: all_up(server, ALL), UP_S), crew.tail()
        yield server, crew, expected


def test_every_port_for_other_hosts_is_one_of_the_range(cluster: Any) -> None:
    """Also those of Mooncake's engine."""
    server, crew, _ = cluster
    found = listening_ports(server, crew) - {server.port}
    first = min(found)
    assert len(found) > PORTS + 2 * 4 and found <= set(range(first, first + PORTS + RANGE))


def busy(server: Server) -> str:
    """The requests that a server still holds."""
    known = [f"{name} {each['running']}+{each['waiting']}" for name, each in replicas(server).items()]
    lines = get(server, "/metrics")[1].decode().splitlines()
    return "\n".join([*known, *(line for line in lines if "requests_in_flight{" in line and not line.endswith(" 0.0"))])


def test_all_prefill_replicas_and_api_servers_give_the_same_answers(cluster: Any) -> None:
    server, _, expected = cluster
    answers = ask_all(server, BODIES * 2, AT_ONCE)
    assert answers == expected * 2
    assert {f"{PREFILL}/0", f"{PREFILL}/1", f"{DECODE}/0"} <= set(used(answers))
    assert len({answer.server for answer in answers}) == 2
    assert until(lambda: idle(server))
    for replica in (f"{PREFILL}/0", f"{PREFILL}/1"):
        assert metric(server, "kv_transfer_bytes_total", replica=replica) > 0
    assert metric(server, "kv_wait_seconds_count", source=PREFILL, target=DECODE) >= len(answers)
    failures = "kv_transfer_failures_total", "kv_local_prefills_total"
    assert [metric(server, name) for name in failures] == [0, 0]
    (edge,) = status(server)["kv_edges"]
    assert (edge["source"], edge["target"], edge["connector"]) == (PREFILL, DECODE, "mooncake")
    assert {pair["target"] for pair in edge["pairs"]} == {f"{DECODE}/0"}
    assert all(pair["handed"] > 0 and pair["fetching"] == 0 for pair in edge["pairs"])
    assert [stage["name"] for stage in status(server)["stages"]][:2] == [PREFILL, DECODE]


def test_answers_to_media_equal_transformers(cluster: Any, oracle: Oracle, expected: dict[str, Golden]) -> None:
    """One by one and all at once; decode computes no prompt again."""
    server, *_ = cluster
    before = metric(server, "kv_local_prefills_total")
    check_parity(server, oracle, expected, MEDIA)
    with ThreadPoolExecutor(AT_ONCE) as threads:
        asked = [threads.submit(check_parity, server, oracle, expected, [name]) for name in MEDIA]
        answers = [answer for each in asked for answer in each.result()]
    assert used(answers)[f"{DECODE}/0"] == len(MEDIA)
    assert metric(server, "kv_local_prefills_total") == before
    assert until(lambda: idle(server))


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["session", "image"])
def test_a_session_or_a_medium_stays_with_a_prefill_replica(cluster: Any, kind: str) -> None:
    """Over one connection, and so through one API server: each has its own table."""
    server, *_ = cluster
    assert until(lambda: idle(server)), busy(server)  # a replica's last report counts until the next
    shown = [{"type": "image", "image": image(64, 64, 100 + number)} for number in range(SESSIONS)]
    pictures = [openai_messages([{"role": "user", "content": [part]}])[0]["content"] for part in shown]
    places: dict[int, set[str]] = {number: set() for number in range(SESSIONS)}
    with httpx.Client() as client:
        for turn in range(2):
            for number in range(SESSIONS):
                text = {"type": "text", "text": f"Turn {turn} of {number}."}
                content = [text] if kind == "session" else [text, *pictures[number]]
                fields = body(content, 4, 4, **({"session_id": f"s{number}"} if kind == "session" else {}))
                places[number].add(ask(server, fields, client).where[PREFILL])
    assert all(len(found) == 1 for found in places.values()), places
    assert set.union(*places.values()) == {f"{PREFILL}/0", f"{PREFILL}/1"}


@pytest.mark.extended
def test_several_turns_get_the_same_answers_from_prefix_caches(cluster: Any) -> None:
    server, *_ = cluster
    messages = [{"role": "user", "content": LONG}]
    for turn in range(3):
        fields = body("", 12, 8) | {"messages": list(messages)}
        first, second = ask(server, fields), ask(server, fields)
        assert first == second
        messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": f"And {turn}?"}]
    assert until(lambda: idle(server))


EMBEDDED = {"type": "image_embeds", "image_embeds": {"image_grid_thw": base64.b64encode(b"x").decode()}}
PRIVATE: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "completions": {"prompt": "Hi"},
    "responses": {"input": "Hi"},
    "media without data": {"messages": [{"role": "user", "content": [EMBEDDED]}]},
}


@pytest.mark.parametrize("case", PRIVATE)
def test_a_client_cannot_send_fields_that_replicas_exchange(cluster: Any, case: str) -> None:
    """Transfer parameters, and media without data, which vLLM accepts from its own proxy."""
    server, _, expected = cluster
    path, fields = case, {"model": MODEL, **PRIVATE[case]}
    if case == "media without data":
        path = "chat/completions"
    else:
        fields["kv_transfer_params"] = {"do_remote_decode": True, "transfer_id": "x"}
    answer = httpx.post(f"{server.base_url}/{path}", json=fields, timeout=30)
    assert answer.status_code == 400, answer.text
    assert case == "media without data" or "kv_transfer_params" in answer.text
    assert ask(server, BODIES[0]) == expected[0]
    assert until(lambda: idle(server), SOON_S), busy(server)


@contextlib.contextmanager
def loaded(server: Server, expected: list[Answer], replica: str) -> Iterator[None]:
    """Requests arrive all the time, and a replica has some of them; each must get its expected answer."""
    with load(server, BODIES, expected, AT_ONCE) as asked:
        wait_busy(server, replica, asked)
        yield


@pytest.mark.parametrize("victim", [pytest.param(f"{PREFILL}/0", marks=pytest.mark.extended), f"{DECODE}/0"])
def test_answers_stay_the_same_when_a_replica_is_killed(cluster: Any, victim: str) -> None:
    server, _, expected = cluster
    with loaded(server, expected, f"{DECODE}/0"):
        kill(server, victim, signal.SIGKILL)
    assert until(lambda: all_up(server, ALL), UP_S)
    assert until(lambda: idle(server), SOON_S), busy(server)


@pytest.mark.extended
def test_answers_stay_the_same_when_a_decode_replica_joins_dies_and_leaves(cluster: Any) -> None:
    """The process that joined restarts its replica when it is killed."""
    server, crew, expected = cluster
    name, words = f"{DECODE}/1", [DECODE if word == PREFILL else word for word in crew.words]
    joined = Headless(Path(), crew.log.with_name("decode"), DECODE, 0)
    joined.words = words
    with joined:
        assert until(lambda: all_up(server, ALL + 1), UP_S), joined.tail()
        with loaded(server, expected, name):
            kill(server, name, signal.SIGKILL)
        assert until(lambda: all_up(server, ALL + 1) and idle(server), UP_S), joined.tail()
        assert replicas(server)[name]["restarts"] == 1
        with loaded(server, expected, name):
            assert joined.stop(signal.SIGTERM) == [] and joined.status() == 0, joined.tail()
    assert until(lambda: all_up(server, ALL), UP_S)
    assert until(lambda: idle(server), SOON_S), busy(server)


@pytest.mark.extended
@pytest.mark.needs("two hosts")
def test_prefill_on_another_host_sends_its_blocks_over_the_network(tiny: Path, tmp_path: Path) -> None:
    port = free_ports(PORTS)
    with contextlib.ExitStack() as stack:
        here, there = stack.enter_context(two_hosts())
        none_here = {"thinker": {"prefill_decode": {"prefill": {"replicas": 0}, **PATIENT}}}
        split = ["--stage-overrides", json.dumps(none_here)]
        head = Server(tiny, tmp_path / "head", [*LENGTH, *TIMES, *split, "-oma", here.address, "-omp", str(port)])
        head.words[:0] = here.words
        crew = Headless(tiny, tmp_path / "crew", PREFILL, port, *split, host=here.address)
        crew.words[:0] = there.words
        here.call(lambda: stack.enter_context(head))
        alone = here.call(lambda: ask_all(head, BODIES[:4], 1))  # decode alone
        stack.enter_context(crew)
        assert here.call(lambda: until(lambda: all_up(head, 4), UP_S)), crew.tail()
        assert here.call(lambda: replicas(head))[f"{PREFILL}/0"]["host"] == there.address
        assert here.call(lambda: ask_all(head, BODIES[:4], 4)) == alone
        assert here.call(lambda: metric(head, "kv_local_prefills_total")) == len(alone)
        assert here.call(lambda: until(lambda: metric(head, "kv_transfer_bytes_total", replica=f"{PREFILL}/0") > 0))
        assert here.call(lambda: metric(head, "kv_transfer_failures_total")) == 0
        assert not crew.stop(signal.SIGTERM)
        assert here.call(lambda: ask_all(head, BODIES[:4], 4)) == alone
