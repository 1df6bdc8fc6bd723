"""Coordinator, replicas and API server's side as real processes, with a timeout of one second."""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import replace

import pytest

from tests.coordinator.conftest import CONFIG, KEY, PATIENCE_S, TIMEOUT_S, states, watching
from tests.support.pace import pace
from vllm_omni_ext.coordinator.keys import Keys
from vllm_omni_ext.coordinator.members import Attach, Detach, State
from vllm_omni_ext.coordinator.server import CoordinatorConfig, listening
from vllm_omni_ext.errors import OmniError
from vllm_omni_ext.pool.load import Load

UP, DOWN, SUSPECT, DRAINING = State.UP, State.DOWN, State.SUSPECT, State.DRAINING


pytestmark = pytest.mark.engine


async def test_a_replica_joins_falls_silent_and_comes_back(coordinator, replica, freeze) -> None:
    control = coordinator()
    frozen = replica(control.events)
    async with watching(control.views) as witness:
        view = await witness.states(talker_0=UP)
        assert view.pid == control.process.pid and view.replicas[0].load is not None
        assert replace(view.replicas[0].load, report=0) == Load(1, 2, 0.5)
        member = view.replicas[0].member
        replica(control.events, "thinker")
        await witness.states(talker_0=UP, thinker_0=UP)

        freeze(frozen.pid)
        since = time.monotonic()
        view = await witness.states(talker_0=SUSPECT, thinker_0=UP)
        assert view.replicas[0].load is None
        await witness.states(talker_0=DOWN, thinker_0=UP)
        assert time.monotonic() - since < 3 * TIMEOUT_S * pace()
        os.kill(frozen.pid, signal.SIGCONT)
        view = await witness.states(talker_0=UP, thinker_0=UP)
        assert view.replicas[0].member == member
        assert [change for change in witness.changes if change.member == member] == [
            Attach(member),
            Detach(member, "it is down"),
            Attach(member),
        ]


@pytest.mark.needs("IPv6")
@pytest.mark.parametrize("secret", [None, "an old and long secret"])
async def test_a_replica_that_ends_leaves_over_ipv6(coordinator, replica, tmp_path, secret: str | None) -> None:
    file = None
    if secret is not None:
        file = tmp_path / "secret"
        file.write_text(secret)
        file.chmod(0o600)
    config = replace(CONFIG, events="tcp://[::1]:*", views="tcp://[::1]:*", secret_file=file and str(file))
    control = coordinator(config)
    assert control.events.startswith("tcp://[::1]:") and control.views.startswith("tcp://[::1]:")
    leaving = replica(control.events, secret=file or "")
    async with watching(control.views, Keys.read(config.secret_file)) as witness:
        await witness.states(talker_0=UP)
        since = time.monotonic()
        leaving.stdin.close()
        await witness.states()
        assert time.monotonic() - since < 5 * TIMEOUT_S * pace(), "it was noticed by its silence only"
        assert leaving.wait(PATIENCE_S) == 0
    assert control.end() == 0


async def test_a_restarted_coordinator_finds_all_replicas(coordinator, replica) -> None:
    # In which replicas must get to register again. A delayed watcher takes two of it, a restarted coordinator settles
    # after one: each must fit into `PATIENCE_S`, also if the machine paused during the measurement of `pace`.
    timeout_s = min(3 * TIMEOUT_S * pace(), PATIENCE_S / 3)
    control = coordinator(replace(CONFIG, timing=replace(CONFIG.timing, timeout_s=timeout_s)))
    for stage, index in (("talker", 0), ("talker", 1), ("thinker", 0)):
        replica(control.events, stage, index=index)
    all_up = {"talker_0": UP, "talker_1": UP, "thinker_0": UP}
    async with watching(control.views) as witness:
        before = await witness.states(**all_up)
        assert witness.watcher.fresh and witness.watcher.age() < timeout_s
        control.process.kill()
        control.process.join()

        stale = await witness.until(lambda view: all(entry.load is None for entry in view.replicas))
        assert states(stale) == states(before)
        assert witness.watcher.age() >= timeout_s and not witness.watcher.fresh

        control.start()
        after = await witness.until(lambda view: view.settled and view.generation != before.generation)
        assert [entry.member for entry in after.replicas] == [entry.member for entry in before.replicas]
        assert states(after) == states(before) and witness.watcher.fresh
        assert {type(change) for change in witness.changes} == {Attach} and len(witness.changes) == 3


async def test_a_delayed_coordinator_removes_no_replica(coordinator, replica, freeze) -> None:
    control = coordinator()
    control.end()
    replica(control.events)  # before the coordinator
    async with watching(control.views) as witness:
        assert witness.watcher.view is None and witness.watcher.age() == float("inf") and not witness.watcher.fresh
        control.start()
        await witness.states(talker_0=UP)
        freeze(control.process.pid)
        await witness.until(lambda view: view.replicas[0].load is None)
        control.signal(signal.SIGCONT)
        await witness.until(lambda view: view.replicas[0].load is not None)
        assert len(witness.changes) == 1


def test_a_coordinator_that_cannot_listen_reports_the_reason(coordinator) -> None:
    control = coordinator()
    taken = control.events
    flags = " (--omni-master-address, --omni-master-port)" if taken.startswith("tcp:") else ""
    with pytest.raises(OmniError, match=re.escape(f"cannot listen on {taken}{flags}: Address already in use")):
        coordinator(CoordinatorConfig(timing=CONFIG.timing, key=KEY, events=taken))
    foreign = "tcp://192.0.2.77:9101"
    with pytest.raises(OmniError, match=re.escape(f"{foreign} (--omni-master-address, --omni-master-port): Cannot")):
        coordinator(CoordinatorConfig(timing=CONFIG.timing, key=KEY, events=foreign))
    with pytest.raises(OmniError, match=r"has not started within 0\.1 s"):
        listening(control.control, 0.1)
