"""Test processes side by side (pytest-xdist): groups of tests, their order, and folders that are not shared."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from multiprocessing.util import Finalize
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

PROCESSES = "tests/processes/"
SHARED = {
    **dict.fromkeys(("test_parity", "test_requests", "test_read_aloud", "test_text_only", "test_starved"), "omni"),
    **dict.fromkeys(("test_replicas", "test_hidden_states"), "twofold"),
    **dict.fromkeys(("test_bodies", "test_http"), "plain_server"),
}
"""Process tests by the engines of the session that they use: tests of one group start these engines once."""

APART = ("test_kv_transfer", "test_prefill_decode", "test_v2")
"""Process tests that are suites in processes of their own: each may run in parallel with the others."""

CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 1 << 18
"""Of unshare(2) and mount(2)."""


class Groups(LoadScopeScheduling):  # type: ignore[misc]
    """Gives each process whole groups, in the order of `longest_first`."""

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)

    def schedule(self) -> None:
        """Give work to all processes. A process runs a test when it has the next one too, or its shutdown."""
        super().schedule()
        # pytest-xdist leaves one that replaces a dead one waiting with a single test.
        for node in [each for each in self.nodes if not each.shutting_down]:
            while self.workqueue and self._pending_of(self.assigned_work[node]) < 2:
                self._assign_work_unit(node)
            if not self.workqueue:
                node.shutdown()

    def remove_node(self, node: Any) -> str | None:
        """Take the tests of a dead process back, without the one that ended it: pytest-xdist would run it again."""
        work = self.assigned_work.pop(node)
        left = [(unit, test) for unit in work.values() for test, done in unit.items() if not done]
        if not left:
            return None
        unit, ended = left[0]
        unit[ended] = True
        self.workqueue.update({group: unit for group, unit in work.items() if not all(unit.values())})
        for other in self.nodes:
            self._reschedule(other)
        return str(ended)


def group_of(nodeid: str) -> str:
    """Name of the group whose tests run in one process."""
    file, _, _ = nodeid.partition("::")
    if file.startswith("tests/serving/"):
        return "serving"  # one application of the session, made of all of vLLM's routes
    name = file.removeprefix(PROCESSES).removesuffix(".py")
    return nodeid if name in APART else SHARED.get(name, file)


def longest_first(items: list[pytest.Item]) -> None:
    """Sort tests by group: those with real engines first, or the last of these would run alone at the end."""
    groups = [group_of(item.nodeid) for item in items]
    engines = {group for group, item in zip(groups, items, strict=True) if item.get_closest_marker("engine")}
    sizes, first = Counter(groups), {group: -at for at, group in reversed(list(enumerate(groups)))}
    rank = {group: (group in engines, group in SHARED.values(), sizes[group], first[group]) for group in sizes}
    items.sort(key=lambda item: rank[group_of(item.nodeid)], reverse=True)


@contextlib.contextmanager
def own_folders() -> Iterator[None]:
    """A /dev/shm and a folder for temporary files that no other test process sees: tests look at the files left there.

    Without the right to mount, /dev/shm stays the one of all. The folder is not below pytest's: paths of sockets begin
    with it, and the kernel allows 107 characters.
    """
    _own_shared_memory()
    temporary = tempfile.mkdtemp(prefix="t-")
    # At the very end: multiprocessing removes a folder of its own in it when the process ends, with priority -100.
    Finalize(None, shutil.rmtree, (temporary,), {"ignore_errors": True}, exitpriority=-101)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", temporary)
        patch.setattr(tempfile, "tempdir", None)
        yield


def _own_shared_memory() -> None:
    """For this thread, and for the threads and processes that this thread starts."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) == 0 and libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None) == 0:
        libc.mount(b"tests", b"/dev/shm", b"tmpfs", 0, None)


def leave() -> None:
    """End this process once its exit handlers have run. Python would need 5 s more to free all modules."""
    atexit.unregister(leave)
    atexit._run_exitfuncs()
    os._exit(0)
