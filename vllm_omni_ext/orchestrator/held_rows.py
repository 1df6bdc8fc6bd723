"""Rows that replicas of the text stage keep for requests. Who takes them frees them; for the others it is done here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from vllm.v1.engine.exceptions import EngineDeadError

from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.runtime.replica import Replica
from vllm_omni_ext.wire.rows import Notice

log = logging.getLogger(__name__)

FORGET_ROWS = "forget_rows"
"""The worker's method."""


class HeldRows:
    """Which replica keeps what, by request.

    Args:
        replicas: those that are there, by id.
    """

    def __init__(self, replicas: Mapping[ReplicaId, Replica]) -> None:
        self._replicas = replicas
        self._held: dict[str, set[tuple[ReplicaId, str, str]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._held)

    def noticed(self, request_id: str, replica: ReplicaId, payload: Any) -> None:
        """A replica has given an output; if it is a notice of rows, they are kept there from now on."""
        if isinstance(payload, Notice):
            self._held.setdefault(request_id, set()).add((replica, payload.source, payload.name))

    def unwanted(self, replica: ReplicaId, payload: Any) -> None:
        """As `noticed`, of a request that has ended or is another replica's: what is kept there is freed."""
        if isinstance(payload, Notice):
            self._free(replica, payload.name)

    def finished(self, request_id: str, *, taken: bool) -> None:
        """A request needs its rows no more.

        Args:
            taken: one replica has taken them from one place, and has told whoever keeps them there. Others are told
                here.
        """
        held = self._held.pop(request_id, set())
        for replica, _, name in held if len(held) > taken else ():
            self._free(replica, name)

    def _free(self, replica: ReplicaId, name: str) -> None:
        if replica in self._replicas:
            task = asyncio.ensure_future(self._forget(self._replicas[replica], name))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _forget(self, replica: Replica, name: str) -> None:
        try:
            await replica.call("collective_rpc_async", FORGET_ROWS, None, ([name],))
        except EngineDeadError:
            log.debug("the rows of %s are gone with %s", name, replica.id)
