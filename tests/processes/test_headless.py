"""Replicas of other processes: they join a head, vanish, come back, leave, and are refused."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import zmq
from prometheus_client.parser import text_string_to_metric_families

from examples.server import HOST, Server, alive
from tests.processes.test_parity import CASES, TOLERANCE
from tests.support import noise, strangers
from tests.support.cluster import (
    LENGTH,
    Answer,
    Headless,
    all_up,
    ask,
    ask_all,
    body,
    busy,
    free_ports,
    get,
    idle,
    kill,
    listening_ports,
    overrides,
    replicas,
    states,
    until,
    used,
)
from tests.support.media import audio, image, openai_messages
from tests.support.namespace import two_hosts
from tests.support.oracle import Golden, Oracle
from tests.support.pace import pace
from tests.support.strangers import as_nobody, leaves
from vllm_omni_ext import __version__
from vllm_omni_ext.cli.args import parse_serve
from vllm_omni_ext.cli.settings import from_cli
from vllm_omni_ext.coordinator.keys import Keys, as_client
from vllm_omni_ext.coordinator.members import Heartbeat, Member
from vllm_omni_ext.coordinator.membership import Timing
from vllm_omni_ext.encoding import MAX_MESSAGE_BYTES, encode
from vllm_omni_ext.metrics import PREFIX
from vllm_omni_ext.model_plugins.qwen3_omni.tiny.qwen3_omni import write_qwen3_omni
from vllm_omni_ext.pool.load import Load
from vllm_omni_ext.runtime.launch.secret import default_file
from vllm_omni_ext.runtime.supervise.joining import Join, Present
from vllm_omni_ext.topology.agreement import config_hash, models_of

pytestmark = pytest.mark.engine

TIMEOUT_S, DRAIN_S = 1.5, 20
PORTS = 3
"""The head's port, and those of the coordinator after it."""

RANGE = 60
"""Ports of `port_range`."""

AT_ONCE = 8
BODIES = [body(f"Tell me about number {number}.", 20, 40) for number in range(10)]
EACH, FEWER, RAW = 500, 5, 20
"""Messages of each kind for each port of the members, the step between those for every port, and raw connections."""

GROWTH_BYTES = 48 << 20
GONE_S = 30.0
"""A killed head's processes are gone within this time."""

FORGOTTEN_S = 20 * TIMEOUT_S
UP_S, SOON_S = 180.0, 30.0
SECRET_FILE = ["--omni-cluster-secret-file"]
TIMES = ["--omni-heartbeat-timeout", str(TIMEOUT_S), "--omni-drain-timeout", str(DRAIN_S)]


@dataclass
class Cluster:
    """A head that runs the thinker alone, two talkers and a code2wav that have joined it."""

    head: Server
    talkers: Headless
    vocoder: Headless
    join: Callable[..., Headless]
    port: int


@pytest.fixture(scope="module")
def cluster(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Scenario with one stage a process: head first, which makes the secret."""
    logs, port = tmp_path_factory.mktemp("cluster"), free_ports(PORTS + RANGE)
    within = ["--omni-port-range", f"{port + PORTS}-{port + PORTS + RANGE - 1}"]

    def join(name: str, stage: str, *flags: str, model: Path = tiny) -> Headless:
        return Headless(model, logs / name, stage, port, *within, *flags)

    words = ["--stage", "thinker", "--omni-dp-size-local", "2", "-oma", HOST, "-omp", str(port)]
    head = Server(tiny, logs / "head", [*LENGTH, *words, *TIMES, *within])
    talkers, vocoder = join("talkers", "talker", "--omni-dp-size-local", "2"), join("vocoder", "code2wav")
    vocoder.words += ["--replica-id", "7"]
    with contextlib.ExitStack() as stack:
        head.start()
        stack.callback(head.stop)
        assert until(lambda: get(head, "/health")[0] == 503, UP_S), head.tail()
        stack.enter_context(talkers)
        stack.enter_context(vocoder)
        head.wait()
        assert until(lambda: all_up(head, 5), UP_S), states(head)
        yield Cluster(head, talkers, vocoder, join, port)


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> list[Answer]:
    return ask_all(cluster.head, BODIES, AT_ONCE)


def check_parity(
    server: Server,
    oracle: Oracle,
    expected: dict[str, Golden],
    names: list[str],
    client: httpx.Client | None = None,
) -> list[Answer]:
    """Answers of a server, over new connections or a client's, equal those of Transformers."""
    answers = []
    for name in names:
        case, golden = CASES[name], expected[name]
        fields = body("", case.text, case.frames, ignore_eos=False)
        fields["messages"] = openai_messages(case.messages)
        fields["talker"] = {"temperature": 0, "max_tokens": case.frames}
        answers.append(answer := ask(server, fields, client))
        assert answer.text == oracle.processor.tokenizer.decode(golden.thinker_ids, skip_special_tokens=True)
        assert answer.samples.shape == golden.wav.shape
        assert np.abs(answer.samples / 2**15 - golden.wav).max() <= TOLERANCE + 1 / 2**15
    return answers


def during(head: Server, stage: str, do: Callable[[], Any]) -> list[Answer]:
    """All answers, with something done while a replica of a stage works for them."""
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(ask_all, head, BODIES, AT_ONCE)
        assert until(lambda: busy(head, stage) or asked.done())
        do()
        return asked.result()


def test_one_stage_a_process(cluster: Cluster, oracle: Oracle, expected: dict[str, Golden]) -> None:
    check_parity(cluster.head, oracle, expected, ["text", "image"])


def test_all_replicas_are_used(cluster: Cluster, undisturbed: list[Answer]) -> None:
    assert set(used(undisturbed)) == {"thinker/0", "thinker/1", "talker/0", "talker/1", "code2wav/0"}
    assert until(lambda: idle(cluster.head))


def decisions(head: Server, stage: str) -> Counter[str]:
    """The number of choices of a replica of a stage, by the reason."""
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(get(head, "/metrics")[1].decode()):
        for sample in family.samples:
            if sample.name == PREFIX + "routing_decisions_total" and sample.labels["stage"] == stage:
                found[sample.labels["reason"]] += int(sample.value)
    return found


SESSIONS, TURNS = 7, 3
"""An odd number: a policy that takes turns alone would change the replica of each."""


def test_a_session_stays_with_its_replica(cluster: Cluster) -> None:
    """Turns of different sessions alternate; each has its session in the body, then in a header."""
    assert until(lambda: idle(cluster.head))  # a replica's last report counts until the next
    head, before = cluster.head, decisions(cluster.head, "thinker")
    places: dict[int, set[str]] = {session: set() for session in range(SESSIONS)}
    for turn in range(TURNS):
        for session, found in places.items():
            fields, name = body(f"Turn {turn} of {session}.", 4, 4), f"session {session}"
            with httpx.Client(headers={"X-Session-ID": name} if turn else {}) as client:
                answer = ask(head, fields if turn else fields | {"session_id": name}, client)
            found.add(answer.where["thinker"])
    assert all(len(found) == 1 for found in places.values()), places
    assert set.union(*places.values()) == {"thinker/0", "thinker/1"}
    assert decisions(head, "thinker")["affinity"] - before["affinity"] == SESSIONS * (TURNS - 1)


def test_an_image_stays_with_the_replica_that_has_seen_it(cluster: Cluster) -> None:
    """Images alternate, in requests of no session; the text differs, so that only the image is the same."""
    assert until(lambda: idle(cluster.head))
    head, before = cluster.head, decisions(cluster.head, "thinker")
    parts = {number: {"type": "image", "image": image(64, 64, 100 + number)} for number in range(SESSIONS)}
    places: dict[int, set[str]] = {number: set() for number in parts}
    for turn in range(TURNS):
        for number, part in parts.items():
            said = {"role": "user", "content": [{"type": "text", "text": f"Question {turn}."}, part]}
            fields = body("", 4, 4) | {"messages": openai_messages([said])}
            places[number].add(ask(head, fields).where["thinker"])
    assert all(len(found) == 1 for found in places.values()), places
    assert set.union(*places.values()) == {"thinker/0", "thinker/1"}
    assert decisions(head, "thinker")["affinity"] - before["affinity"] == SESSIONS * (TURNS - 1)


def test_replica_number_is_chosen_by_the_head(cluster: Cluster) -> None:
    warnings = [line for line in cluster.vocoder.log.read_text().splitlines() if "--replica-id" in line]
    assert warnings == ["warning: --replica-id 7 is ignored: the head gives replicas their numbers"]


def test_join_with_another_configuration_is_refused_with_the_reason(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, undisturbed: list[Answer]
) -> None:
    folder = tmp_path_factory.mktemp("others")
    other, secret = write_qwen3_omni(folder / "other", seed=1), folder / "secret"
    secret.write_text("the secret of another cluster")
    wrong = {
        "model": (cluster.join("model", "talker", model=other), 2, "model"),
        "config": (cluster.join("config", "talker", *overrides(talker={"max_model_len": 1024})), 2, "config"),
        "stage": (cluster.join("stage", "vocoder"), 2, "--stage vocoder: no such stage"),
        "secret": (
            cluster.join("secret2", "talker", "--omni-cluster-secret-file", str(secret)),
            2,
            "secret",
        ),
        "none": (cluster.join("no_secret", "talker", "--no-omni-cluster-auth"), 2, "secret"),
    }
    before = states(cluster.head)
    with contextlib.ExitStack() as stack:
        for member, _, _ in wrong.values():
            stack.enter_context(member)
        for what, (member, code, reason) in wrong.items():
            assert until(lambda m=member: m.status() is not None, UP_S), what
            errors = [line for line in member.log.read_text().splitlines() if "error" in line]
            assert (member.status(), reason in "".join(errors)) == (code, True), (what, member.tail())
    assert until(lambda: states(cluster.head) == before)  # heartbeats may be late while so many processes start
    assert ask_all(cluster.head, BODIES[:4], AT_ONCE) == undisturbed[:4]


def expectations(model: Path) -> dict[str, str]:
    """The settings that the head expects of a talker."""
    plan = from_cli(parse_serve([str(model), "--omni", *LENGTH, "-oma", HOST, "-omp", "9"]))[0]
    return {"model": models_of(plan)["talker"], "version": __version__, "config_hash": config_hash(plan, "talker")}


@pytest.mark.needs("user nobody")
def test_messages_without_the_secret_get_no_reply(cluster: Cluster, tiny: Path, undisturbed: list[Answer]) -> None:
    """From another user of the machine that has everything but the secret, while requests go on."""
    head, ports = cluster.head, sorted(listening_ports(cluster.head) - {cluster.head.port})
    assert {cluster.port, cluster.port + 1, cluster.port + 2} < set(ports)
    assert len(ports) >= 3 + 2 * 3, "and two for each replica of the other processes"
    right = expectations(tiny)
    messages = [
        encode(Join(ticket="t" * 32, stage="talker", host=HOST, **right)),
        encode(Heartbeat(Member("talker", 9, 9), Load(), proof="p" * 64)),
        *leaves(list(states(head)), range(3)),
        encode(Present(ticket="t" * 32, pid=1)),
        b"ENGINE_CORE_DEAD",
    ]
    said: list[Any] = []
    addresses = [f"tcp://{HOST}:{port}" for port in ports]
    answers = during(head, "talker", lambda: said.append(as_nobody(strangers.ask, addresses, messages, 3.0)))
    assert said == [[]], "nothing is learned, not even from a refusal"
    assert answers == undisturbed
    assert until(lambda: all_up(head, 5))
    assert as_nobody(_readable, [str(default_file()), str(default_file().parent)]) == [os.geteuid() != 0] * 2


def test_malformed_messages_at_every_port_change_no_answer(cluster: Cluster, undisturbed: list[Answer]) -> None:
    """2,000 messages while requests go on: bytes that are not ZeroMQ, messages without the secret at all ports, and
    malformed ones with the secret at the head's ports for members of the deployment.
    """
    head, rng = cluster.head, random.Random(1)
    secret = Keys.read(str(default_file()))
    assert secret is not None
    harmless = [encode(Present(ticket="y" * 32, pid=1)), *leaves(["talker/9"], [9])]
    messages = [noise.garbage(rng, MAX_MESSAGE_BYTES - 1) for _ in range(EACH)]  # one more ends a connection
    messages += [noise.mutated(rng, harmless) for _ in range(EACH)]
    before = sum(process.memory_full_info().uss for process in head.processes())

    def attack() -> None:
        for port in listening_ports(head) - {head.port}:
            raw_noise(port, rng)
            flood(port, messages[::FEWER])
        for port, kind in ((cluster.port, zmq.DEALER), (cluster.port + 1, zmq.PUSH)):
            flood(port, messages, secret, kind)

    assert during(head, "talker", attack) == undisturbed
    assert all_up(head, 5)
    assert sum(process.memory_full_info().uss for process in head.processes()) - before < GROWTH_BYTES
    assert ask_all(head, BODIES, AT_ONCE) == undisturbed


def raw_noise(port: int, rng: random.Random) -> None:
    """Bytes over several connections, of which some stay half open until the last one is closed."""
    with contextlib.ExitStack() as stack:
        for _ in range(RAW):
            connection = stack.enter_context(socket.create_connection((HOST, port)))
            with contextlib.suppress(ConnectionError):
                connection.sendall(rng.randbytes(200))


def flood(port: int, messages: list[bytes], keys: Keys | None = None, kind: int = zmq.DEALER) -> None:
    """Send messages, from a new connection every thousand; with keys, wait until they are sent.

    Without the keys, the port refuses the handshake. From then on the socket has no peer, and takes no more messages.
    """
    with zmq.Context() as context:
        for start in range(0, len(messages), 1000):
            with context.socket(kind) as sender:
                as_client(sender, keys)
                sender.sndhwm = 0
                sender.linger = 1000 if keys else 0
                sender.connect(f"tcp://{HOST}:{port}")
                refused = contextlib.nullcontext() if keys else contextlib.suppress(zmq.Again)
                with refused:
                    for message in messages[start : start + 1000]:
                        sender.send(message, zmq.NOBLOCK)


def _readable(paths: list[str]) -> list[bool]:
    return [os.access(path, os.R_OK) for path in paths]


def test_only_the_thinker_listens_on_a_port(cluster: Cluster) -> None:
    """Only the thinker's hidden states have a port. Forked replicas also hold the sockets of their parents."""
    parents = (cluster.head.pid, cluster.talkers.pid, cluster.vocoder.pid)
    inherited = {each.laddr for pid in parents for each in _open(pid)}
    for name, each in replicas(cluster.head).items():
        own = [found for found in _open(each["pid"]) if found.laddr not in inherited]
        assert len(own) <= name.startswith("thinker"), (name, own)


def test_every_port_for_other_hosts_is_one_of_the_range(cluster: Cluster) -> None:
    found = listening_ports(cluster.head, cluster.talkers, cluster.vocoder) - {cluster.head.port}
    assert len(found) > PORTS and found <= set(range(cluster.port, cluster.port + PORTS + RANGE))


def _open(pid: int) -> list[Any]:
    """Sockets of a process that listen."""
    return [each for each in psutil.Process(pid).net_connections("tcp") if each.status == psutil.CONN_LISTEN]


def test_a_replica_that_hangs_comes_back(cluster: Cluster, undisturbed: list[Answer]) -> None:
    head, hung = cluster.head, []

    def hang() -> None:
        hung.append(kill(head, "talker/0", signal.SIGSTOP))
        assert until(lambda: states(head)["talker/0"] == "DOWN")

    began = time.monotonic()
    try:
        assert during(head, "talker", hang) == undisturbed
        served = used(ask_all(head, BODIES[:4], AT_ONCE))["talker/0"]
        # On a busy machine the replica was silent for so long meanwhile that another has its name.
        assert served == 0 or replicas(head)["talker/0"]["pid"] != hung[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(hung[0], signal.SIGCONT)
    too_long = time.monotonic() - began > Timing(timeout_s=TIMEOUT_S, drain_s=DRAIN_S).forget_s
    assert until(lambda: all_up(head, 5), UP_S)
    again = ask_all(head, BODIES, AT_ONCE)
    assert again == undisturbed and used(again)["talker/0"]
    assert too_long or replicas(head)["talker/0"]["restarts"] == 0


@pytest.mark.extended
def test_a_replica_that_hangs_for_too_long_is_replaced(cluster: Cluster, undisturbed: list[Answer]) -> None:
    """Its name is given up. The process receives that after it continues, and another is started in its place."""
    head, before = cluster.head, replicas(cluster.head)["talker/0"]
    os.kill(before["pid"], signal.SIGSTOP)
    assert until(lambda: "talker/0" not in states(head), FORGOTTEN_S)
    with contextlib.suppress(ProcessLookupError):
        os.kill(before["pid"], signal.SIGCONT)
    assert until(lambda: replicas(head).get("talker/0", before)["pid"] != before["pid"], UP_S), states(head)
    assert until(lambda: all_up(head, 5), UP_S), states(head)
    answers = ask_all(head, BODIES, AT_ONCE)
    assert answers == undisturbed and used(answers)["talker/0"]
    assert until(lambda: idle(head))


@pytest.mark.extended
def test_a_host_that_hangs_comes_back(cluster: Cluster, undisturbed: list[Answer]) -> None:
    """All talkers are gone for a while: requests wait."""
    head = cluster.head

    def hang() -> None:
        os.killpg(cluster.talkers.pid, signal.SIGSTOP)
        try:
            assert until(lambda: {states(head)["talker/0"], states(head)["talker/1"]} == {"DOWN"})
            assert get(head, "/health")[0] == 503
        finally:
            os.killpg(cluster.talkers.pid, signal.SIGCONT)

    assert during(head, "talker", hang) == undisturbed
    assert until(lambda: all_up(head, 5) and idle(head), UP_S)
    assert {"talker/0", "talker/1"} <= set(used(ask_all(head, BODIES, AT_ONCE)))


def test_a_killed_replica_is_started_again_where_it_was(cluster: Cluster, undisturbed: list[Answer]) -> None:
    head, before = cluster.head, replicas(cluster.head)

    def restarted() -> dict[str, int]:
        more = {name: each["restarts"] - before[name]["restarts"] for name, each in replicas(head).items()}
        return {name: restarts for name, restarts in more.items() if restarts}

    assert during(head, "talker", lambda: kill(head, "talker/1")) == undisturbed
    # If the answers ended before the kill, the head has not received it yet.
    assert until(lambda: restarted() and all_up(head, 5) and idle(head), UP_S)
    assert restarted() == {"talker/1": 1}
    assert "talker/1" in used(ask_all(head, BODIES, AT_ONCE))


def test_no_request_is_lost_when_a_replica_leaves(cluster: Cluster, undisturbed: list[Answer]) -> None:
    head = cluster.head
    with cluster.join("third", "talker") as third:
        assert until(lambda: all_up(head, 6), UP_S)
        (name,) = {name for name in states(head) if name.startswith("talker")} - {"talker/0", "talker/1"}
        left: list[list[psutil.Process]] = []

        def leave() -> None:
            until(lambda: busy(head, name), 10)
            left.append(third.stop(signal.SIGTERM))

        assert during(head, "talker", leave) == undisturbed
        assert left == [[]] and third.status() == 0, third.tail()
        assert until(lambda: name not in states(head))
    assert until(lambda: all_up(head, 5) and idle(head), UP_S)


@pytest.mark.extended
def test_replicas_of_the_frontend_join_die_and_leave(cluster: Cluster, undisturbed: list[Answer]) -> None:
    """The head has two of its own; the third is another process's, which starts it again when it is killed."""
    head, name = cluster.head, "thinker/2"
    with cluster.join("thinker", "thinker") as joined:
        assert until(lambda: states(head).get(name) == "UP" and all_up(head, 6), UP_S), states(head)

        def harm() -> None:
            until(lambda: busy(head, name), 10)
            kill(head, name)

        assert during(head, "thinker", harm) == undisturbed
        assert until(lambda: replicas(head).get(name, {}).get("restarts") == 1, UP_S), states(head)
        assert until(lambda: all_up(head, 6) and idle(head), UP_S), states(head)
        assert until(lambda: used(ask_all(head, BODIES, AT_ONCE))[name])

        def leave() -> None:
            until(lambda: busy(head, name), 10)
            assert joined.stop(signal.SIGTERM) == []

        assert during(head, "thinker", leave) == undisturbed
        assert joined.status() == 0, joined.tail()
    assert until(lambda: all_up(head, 5) and idle(head), UP_S)


def test_a_killed_host_is_replaced(cluster: Cluster, undisturbed: list[Answer]) -> None:
    """Last but one: the only vocoder's process is killed, and another joins."""
    head = cluster.head
    engines = [process for process in cluster.vocoder.processes() if process.pid != cluster.vocoder.pid]

    def replace() -> None:
        os.kill(cluster.vocoder.pid, signal.SIGKILL)
        assert until(lambda: not any(map(alive, engines)), GONE_S)
        assert until(lambda: get(head, "/health")[0] == 503)
        cluster.vocoder = cluster.join("second_vocoder", "code2wav")
        cluster.vocoder.start()

    try:
        assert during(head, "thinker", replace) == undisturbed
        assert until(lambda: all_up(head, 5), FORGOTTEN_S + UP_S), states(head)
        assert until(lambda: idle(head))
    finally:
        cluster.vocoder.stop()


def test_sigterm_ends_every_headless_process(cluster: Cluster) -> None:
    """Last."""
    assert not cluster.head.stop(signal.SIGTERM)
    assert not cluster.talkers.stop(signal.SIGTERM)


def test_headless_replicas_wait_for_a_head_with_a_limit(tiny: Path, tmp_path: Path) -> None:
    """Waiting has an end, by itself or by a signal."""
    port = free_ports(PORTS)
    # A replica that gives up is started again, each time later.
    short = Headless(
        tiny, tmp_path / "short", "talker", port, "--omni-startup-timeout", "2", "--omni-restart-limit", "1"
    )
    long = Headless(tiny, tmp_path / "long", "talker", port)
    with short, long:
        assert until(lambda: short.status() is not None, UP_S)
        assert short.status() == 1 and f"no head answers at {HOST}:{port} (waited 2 s" in short.tail()
        assert long.status() is None and "starting talker" in long.tail()
        began = time.monotonic()
        assert not long.stop(signal.SIGTERM)
        assert time.monotonic() - began < SOON_S


def probes(head: Server) -> dict[str, int]:
    """The status of each probe."""
    return {name: get(head, f"/health/{name}")[0] for name in ("live", "ready", "startup")}


@pytest.mark.extended
@pytest.mark.needs("IPv6")
def test_replicas_join_a_head_that_starts_after_them(
    tiny: Path, tmp_path: Path, oracle: Oracle, expected: dict[str, Golden]
) -> None:
    """Two more hosts for a head that runs every stage itself, over IPv6; one leaves, then the head is killed."""
    port = free_ports(PORTS)
    needs_two = overrides(talker={"min_replicas": 2})
    head = Server(tiny, tmp_path / "head", [*LENGTH, "-oma", "::1", "-omp", str(port), *TIMES, *needs_two])
    with contextlib.ExitStack() as stack:
        members = [
            stack.enter_context(Headless(tiny, tmp_path / stage, stage, port, host="::1"))
            for stage in ("talker", "code2wav")
        ]
        time.sleep(1)  # they send requests by now, or will do so while the head starts
        stack.enter_context(head)
        assert until(lambda: all_up(head, 5), UP_S), states(head)
        check_parity(head, oracle, expected, ["text"])
        every = {"thinker/0", "talker/0", "talker/1", "code2wav/0", "code2wav/1"}
        assert set(used(ask_all(head, BODIES, AT_ONCE))) == every
        # A heartbeat may be late if other tests run: then all probes are sent again.
        assert until(lambda: probes(head) == {"live": 200, "ready": 200, "startup": 200}, SOON_S), states(head)
        talker = members.pop(0)
        assert not talker.stop(signal.SIGTERM)
        assert until(lambda: probes(head)["ready"] == 503, UP_S)
        assert b"stage 'talker' has 1 of the 2 replicas it needs" in get(head, "/health/ready")[1]
        assert probes(head) == {"live": 200, "ready": 503, "startup": 200}
        check_parity(head, oracle, expected, ["text"])
        assert len(head.processes()) >= 6  # itself, three replicas, an API server, the coordinator
        os.kill(head.pid, signal.SIGKILL)
        assert until(lambda: not head.processes(), GONE_S)
        for member in members:
            assert member.status() is None
            began = time.monotonic()
            assert not member.stop(signal.SIGTERM)
            assert time.monotonic() - began < SOON_S


SOUNDS = itertools.count(100)
"""Seeds."""


def crossed(head: Server, ways: set[Any]) -> bool:
    """Whether prompts with sound were read on each host and spoken on the other, all with the same answer.

    Each call has a sound of its own: a sound stays with the thinker that has received it.

    Args:
        ways: results of earlier calls; grows.
    """
    message = {"role": "user", "content": [{"type": "audio", "audio": audio(0.5, seed=next(SOUNDS))}]}
    fields = body("", 12, 12) | {"messages": openai_messages([message])}
    answers = ask_all(head, [fields] * AT_ONCE, AT_ONCE)
    assert all(answer == answers[0] for answer in answers)
    ways |= {(answer.where["thinker"], answer.where["talker"]) for answer in answers}
    ways |= {("server", answer.server) for answer in answers}
    both = sum(way[0] == "server" for way in ways) == 2
    return both and {("thinker/0", "talker/1"), ("thinker/1", "talker/0")} <= ways


@pytest.mark.extended
@pytest.mark.needs("two hosts")
def test_two_hosts(tiny: Path, tmp_path: Path, oracle: Oracle, expected: dict[str, Golden]) -> None:
    """Real addresses: the talker's is found by routing, the thinker's is set on its host.

    Both API servers of the head send requests to all of them, and hidden states go over the wire in both directions.
    """
    port = free_ports(PORTS)
    with contextlib.ExitStack() as stack:
        here, there = stack.enter_context(two_hosts())
        second = there.add_address("10.77.0.3")
        words = ["--api-server-count", "2", "-oma", here.address, "-omp", str(port), *TIMES]
        head = Server(tiny, tmp_path / "head", [*LENGTH, *words])
        head.words[:0] = here.words
        head.start()
        stack.callback(head.stop)
        copied = tmp_path / "cluster.secret"
        flags = [*SECRET_FILE, str(copied)]
        talker = Headless(tiny, tmp_path / "talker", "talker", port, *flags, host=here.address)
        named = ["--omni-replica-address", second]
        thinker = Headless(tiny, tmp_path / "thinker", "thinker", port, *flags, *named, host=here.address)
        assert until(lambda: "cluster secret:" in head.log.read_text(), UP_S), head.tail()
        (said,) = [line for line in head.log.read_text().splitlines() if line.startswith("cluster secret:")]
        source = Path(said.partition("scp ")[2].split()[0])
        assert source == default_file() and SECRET_FILE[0] in said
        subprocess.run(["cp", "--preserve=mode", source, copied], check=True)
        for joining in (talker, thinker):
            joining.words[:0] = there.words
            stack.enter_context(joining)
        here.call(head.wait)
        assert here.call(lambda: until(lambda: all_up(head, 5), UP_S)), thinker.tail()
        here.call(lambda: check_parity(head, oracle, expected, ["text", "audio"]))
        hosts = {name: each["host"] for name, each in here.call(lambda: replicas(head)).items()}
        assert (hosts["talker/1"], hosts["thinker/1"]) == (there.address, second)
        ways: set[Any] = set()
        assert here.call(lambda: until(lambda: crossed(head, ways), UP_S * pace())), ways
        assert not talker.stop(signal.SIGTERM)
        assert here.call(lambda: until(lambda: "talker/1" not in states(head)))
