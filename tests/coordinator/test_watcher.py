"""The watcher of an API server, with a socket of the test."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import zmq
from msgspec.structs import replace

from tests.coordinator.conftest import PATIENCE_S
from vllm_omni_ext.coordinator.members import Attach, Entry, Leave, Member, State, View
from vllm_omni_ext.coordinator.watcher import Watcher
from vllm_omni_ext.encoding import encode
from vllm_omni_ext.pool.load import Load

MEMBER = Member("talker", 0, 1)
VIEW = View(generation=1, settled=True, timeout_s=0.2, replicas=(Entry(MEMBER, State.UP, Load(1, 1, 0.1)),))


class Publisher:
    """An XPUB socket that waits for its subscriber."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self.address = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"

    async def ready(self) -> None:
        assert await asyncio.to_thread(self._socket.poll, PATIENCE_S * 1000)
        self._socket.recv()

    def say(self, data: bytes) -> None:
        self._socket.send(data)

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    other = Publisher()
    yield other
    other.close()


async def following(watcher: Watcher) -> tuple[View, list]:
    async with asyncio.timeout(PATIENCE_S):
        return await watcher.__anext__()


async def test_views_arrive_and_become_outdated(publisher: Publisher) -> None:
    watcher = Watcher(publisher.address)
    await publisher.ready()
    publisher.say(encode(VIEW))
    assert await following(watcher) == (VIEW, [Attach(MEMBER)])
    assert watcher.fresh and watcher.view == VIEW
    stale, changes = await following(watcher)
    assert (stale.replicas, changes) == ((Entry(MEMBER, State.UP, None),), [])
    assert not watcher.fresh and watcher.age() >= VIEW.timeout_s
    with pytest.raises(TimeoutError):  # it is reported once
        async with asyncio.timeout(3 * VIEW.timeout_s):
            await watcher.__anext__()
    publisher.say(encode(VIEW))
    assert await following(watcher) == (VIEW, [])
    assert watcher.fresh
    watcher.close()


async def test_a_delay_of_this_process_is_not_counted_as_silence(
    publisher: Publisher, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    watcher = Watcher(publisher.address, clock=lambda: now)
    await publisher.ready()
    publisher.say(encode(VIEW))
    await following(watcher)
    waiting = asyncio.create_task(following(watcher))
    await asyncio.sleep(0)
    now = 54.0  # the loop was busy, messages are not read yet
    await asyncio.sleep(1.5 * VIEW.timeout_s)
    assert not waiting.done() and not caplog.messages
    publisher.say(encode(VIEW))
    assert (await waiting)[0].replicas == VIEW.replicas, "its loads are trusted"
    now += 2 * VIEW.timeout_s
    assert (await following(watcher))[0].replicas[0].load is None and "no message" in caplog.text
    watcher.close()


async def test_messages_that_are_no_views_are_ignored_and_counted(publisher: Publisher) -> None:
    watcher = Watcher(publisher.address)
    await publisher.ready()
    strange = replace(VIEW, replicas=(Entry(MEMBER, "asleep"),))
    for at, data in enumerate((b"noise", encode(strange), encode(Leave(MEMBER)))):
        publisher.say(data)
        task = asyncio.create_task(watcher.__anext__())
        async with asyncio.timeout(PATIENCE_S):
            while watcher.dropped <= at:
                await asyncio.wait([task], timeout=0.1)
        task.cancel()
        await asyncio.wait([task])
    publisher.say(encode(VIEW))
    assert (await following(watcher))[0] == VIEW
    assert watcher.dropped == 3
    watcher.close()


async def test_closing_ends_the_iteration(publisher: Publisher) -> None:
    watcher = Watcher(publisher.address)

    async def follow() -> list:
        return [view async for view in watcher]

    task = asyncio.create_task(follow())
    await publisher.ready()
    watcher.close()
    async with asyncio.timeout(PATIENCE_S):
        assert await task == []
