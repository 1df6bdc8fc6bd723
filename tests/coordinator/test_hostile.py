"""Hostile input at the coordinator's ports."""

from __future__ import annotations

import asyncio
import random
import socket
from functools import partial
from pathlib import Path

import psutil
import pytest
import zmq

from tests.coordinator.conftest import CONFIG, KEY, TIMEOUT_S, states, watching
from tests.support import noise
from vllm_omni_ext.coordinator import members as msg
from vllm_omni_ext.coordinator.keys import Keys
from vllm_omni_ext.coordinator.members import TO_COORDINATOR, Member, State
from vllm_omni_ext.coordinator.server import CoordinatorConfig
from vllm_omni_ext.encoding import MAX_MESSAGE_BYTES, Malformed, encode
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.pool.load import Load

pytestmark = pytest.mark.engine

NOBODY = Member("talker", 0, 1)
HARMLESS = (
    encode(msg.Heartbeat(member=NOBODY, load=Load(9, 9, 0.9))),
    encode(msg.Leave(member=NOBODY, drain=False)),
    encode(msg.Heartbeat(member=NOBODY, load=Load(9, 9, 0.9), proof=NOBODY.proof("another head's"))),
)
"""Well formed; none of them may change anything, with any of their bytes altered."""

EACH, AT_ONCE = 500, 100
GROWTH_BYTES = 8 * 1024 * 1024

garbage = partial(noise.garbage, longest=MAX_MESSAGE_BYTES)
mutated = partial(noise.mutated, harmless=HARMLESS)


def is_malformed(data: bytes) -> bool:
    try:
        TO_COORDINATOR.decode(data)
    except Malformed:
        return True
    return False


def attack(context: zmq.Context, address: str, messages: list[bytes]) -> list[zmq.Socket]:
    """Send messages, from a new connection after each `AT_ONCE`. The connections are returned open."""
    pushers = []
    for start in range(0, len(messages), AT_ONCE):
        pushers.append(pusher := context.socket(zmq.PUSH))
        pusher.connect(address)
        for data in messages[start : start + AT_ONCE]:
            pusher.send(data)
    return pushers


def raw_noise(address: str, rng: random.Random) -> None:
    """Bytes that are not even ZeroMQ."""
    host, port = address.removeprefix("tcp://").split(":")
    for _ in range(50):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(rng.randbytes(200))


async def test_noise_changes_nothing(coordinator, replica) -> None:
    rng = random.Random(1)
    control = coordinator()
    replica(control.events)
    process = psutil.Process(control.process.pid)
    async with watching(control.views) as witness:
        before = await witness.states(talker_0=State.UP)
        counts = []
        for make in (garbage, mutated):
            messages = [make(rng) for _ in range(EACH)]
            counts.append(sum(map(is_malformed, messages)))
            attackers = zmq.Context()
            pushers = await asyncio.to_thread(attack, attackers, control.events, messages)
            after = await witness.until(lambda view: view.dropped >= sum(counts))
            assert not any(pusher.closed for pusher in pushers)
            attackers.destroy(linger=0)
            assert after.dropped == sum(counts) > 0.9 * EACH * len(counts)
            if make is garbage:
                memory = process.memory_info().rss
        await asyncio.to_thread(raw_noise, control.events, rng)
        await asyncio.to_thread(raw_noise, control.views, rng)
        after = await witness.until(lambda view: view.replicas[0].load is not None)
        assert [entry.member for entry in after.replicas] == [entry.member for entry in before.replicas]
        assert states(after) == {"talker/0": State.UP} and len(witness.changes) == 1
        assert process.memory_info().rss - memory < GROWTH_BYTES


def with_secret(file: Path) -> CoordinatorConfig:
    return CoordinatorConfig(timing=CONFIG.timing, key=KEY, secret_file=str(file))


@pytest.fixture
def secret(tmp_path):
    file = tmp_path / "secret"
    file.write_text("correct horse battery staple\n")
    return file


async def receives_nothing(control, keys: Keys | None) -> None:
    async with watching(control.views, keys) as outsider:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(TIMEOUT_S):
                await outsider.watcher.__anext__()


async def test_only_holders_of_the_secret_register_and_receive_views(coordinator, replica, secret, tmp_path) -> None:
    control = coordinator(with_secret(secret))
    other = tmp_path / "other"
    other.write_text("another horse, another staple")
    right, wrong = Keys.read(str(secret)), Keys.read(str(other))
    assert right is not None and wrong is not None
    half = Keys(server=right.server, client=wrong.client)  # has the coordinator's public key only
    for outsider in ("", other):
        replica(control.events, "thinker", outsider)
    replica(control.events, "talker", secret)
    replica(control.events, "talker", secret, index=1, key="another head's")
    async with watching(control.views, right) as witness:
        await witness.states(talker_0=State.UP)
        await asyncio.gather(*(receives_nothing(control, keys) for keys in (None, wrong, half)))
        for _ in range(3):
            view = await witness.until(lambda view: True)
            assert states(view) == {"talker/0": State.UP} and view.dropped == 0


def test_keys_are_computed_from_the_secret(secret, tmp_path) -> None:
    one = Keys.read(str(secret))
    assert one == Keys.derive(b"  correct horse battery staple") and Keys.read(None) is None
    assert Keys.derive(b"correct horse battery staplf") != one
    assert len({one.server.private, one.client.private, one.server.public, one.client.public}) == 4
    assert one.server.private.decode() not in repr(one)
    with pytest.raises(ConfigError, match="coordinator secret: must have at least 16 bytes, got 5"):
        Keys.derive(b" short ")
    with pytest.raises(ConfigError, match=r"cannot read '.*nothing': No such file"):
        Keys.read(str(tmp_path / "nothing"))
