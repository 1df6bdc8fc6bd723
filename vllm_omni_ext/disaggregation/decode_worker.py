"""Receives KV blocks in a decode worker: vLLM's Mooncake worker with bounded waits and reports of settled transfers.

A transfer is settled when no write of it into this worker's blocks can follow.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable
from contextvars import ContextVar
from queue import SimpleQueue
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (
    MooncakeConnectorWorker,
    MooncakeXferResponse,
    PullReqMeta,
)

from vllm_omni_ext.disaggregation.block_hold import Settled
from vllm_omni_ext.disaggregation.peer_liveness import PeerLiveness, has_unread_input
from vllm_omni_ext.disaggregation.pending_transfers import PendingTransfers, Transfer

log = logging.getLogger(__name__)

SETTLE_S = 1.0
"""Seconds that sent data may be on its way after the sender has failed or ended. Also the pause between two checks for
unread data."""

MOST_SETTLE_S = 60.0
"""Seconds after which a failed transfer counts as settled even if data is unread, so that its blocks are freed."""

_unanswered: ContextVar[dict[str, Transfer]] = ContextVar("unanswered")
"""Transfers of the current task's query for which the prefill worker has not answered yet, by request id."""

Metas = dict[str, PullReqMeta]
"""vLLM's metadata of the pulls from one prefill replica, by request id in that replica."""


class ReceiveMixin(MooncakeConnectorWorker):
    """Extends vLLM's Mooncake worker: limits the time of a transfer, and reports transfers that are settled.

    A transfer fails after `transfer_timeout_s`, or when its sender ends. The request then no longer waits for it, but a
    failed transfer is not settled as long as data may still be written into its blocks.
    """

    def start_receiving(self, timeout_s: float) -> None:
        """Initialize this mixin; must be called once, before the first transfer.

        Args:
            timeout_s: seconds after which a transfer fails (`TransferSettings.transfer_timeout_s`).
        """
        self._timeout_s = timeout_s
        self._pulls = PendingTransfers()
        self._settled: SimpleQueue[Transfer] = SimpleQueue()
        self._liveness: PeerLiveness | None = None
        # Makes vLLM report failures by request instead of by block: it must not recompute into abandoned blocks.
        self._is_hma_required = True

    def settled(self) -> Settled | None:
        """Return the transfers that were settled since the last call (no write into this worker's blocks can follow).

        The result is None if no transfer was settled.
        """
        counts = Counter(self._settled.get() for _ in range(self._settled.qsize()))
        return Settled(counts) if counts else None

    def close_connections(self) -> None:
        """Close all connections of `PeerLiveness`; its tasks must have ended."""
        if self._liveness is not None:
            self._liveness.close()

    async def _start_load_kv(self, reqs_to_recv: dict[str, Metas]) -> None:
        loop = asyncio.get_running_loop()
        for metas in reqs_to_recv.values():
            for meta in metas.values():
                if any(meta.local_block_ids):
                    self._pulls.begin(_transfer(meta), time.monotonic())
            loop.call_later(self._timeout_s, self._time_out, metas)
        await super()._start_load_kv(reqs_to_recv)

    async def handle_new_engine_id(self, remote_engine_id: str, pull_metas: Metas) -> None:
        """Query the bootstrap server of a prefill replica, then pull the blocks from that replica's workers."""
        transfers = _transfers(pull_metas)
        await super().handle_new_engine_id(remote_engine_id, pull_metas)
        self._report(self._pulls.settle(transfers))

    def receive_kv(self, remote_engine_id: str, pull_metas: Metas) -> None:
        """Pull the blocks of these requests from the workers of a prefill replica."""
        transfers = _transfers(pull_metas)
        wanted = {name: meta for name, meta in pull_metas.items() if not meta.failed}
        try:
            if wanted:  # a prefill worker never answers an empty query
                super().receive_kv(remote_engine_id, wanted)
        except (AssertionError, KeyError) as error:  # sizes that do not match, or a worker that is not registered yet
            self._remote_agents.pop(remote_engine_id, None)
            self._handle_failed_recv(wanted, list(wanted), f"{remote_engine_id} cannot be queried: {error!r}")
        else:
            for meta in wanted.values():
                self._pulls.queried([_transfer(meta)], meta.pull_tasks_count)
        self._report(self._pulls.settle(transfers))

    async def receive_kv_from_single_worker(self, worker_addr: str, pull_metas: Metas) -> None:
        """Pull the requests' blocks from one prefill worker.

        Returns when the worker has answered for all requests or its process has ended; there is no other time limit.
        """
        _unanswered.set(unanswered := {name: _transfer(meta) for name, meta in pull_metas.items()})
        if self._liveness is None:
            self._liveness = PeerLiveness()
        transfer = asyncio.create_task(super().receive_kv_from_single_worker(worker_addr, pull_metas))
        gone = self._liveness.gone(worker_addr)
        await asyncio.wait((transfer, gone), return_when=asyncio.FIRST_COMPLETED)
        if not transfer.done():
            transfer.cancel()
            await asyncio.wait((transfer,))
            self._forget(worker_addr)
            self._handle_failed_recv(pull_metas, list(pull_metas), f"the prefill worker at {worker_addr} is gone")
        self._report(self._pulls.answer(unanswered.values()))

    def process_pulling_result(self, response: MooncakeXferResponse, pull_metas: Metas) -> None:
        """Handle an answer of a prefill worker: record the requests whose blocks have arrived.

        Each answer to a query settles its transfers. The others may wait for a prompt that no replica computes.
        """
        unanswered = _unanswered.get({})
        names = [*(response.ok_reqs or ()), *(response.err_reqs or ())]
        answered = [unanswered.pop(name) for name in names if name in unanswered]
        # A failed request is already reported; blocks that arrive later change nothing.
        response.ok_reqs = [name for name in response.ok_reqs or () if self._waits_for(pull_metas.get(name))]
        arrived = [pull_metas[name] for name in response.ok_reqs]
        super().process_pulling_result(response, pull_metas)
        for meta in arrived:
            if meta.pull_tasks_count == 0 and self._pulls.waits(transfer := _transfer(meta)):
                self.xfer_stats.record_received(self._pulls.arrived(transfer, time.monotonic()))
        self._report(self._pulls.answer(answered))

    def _handle_failed_recv(self, pull_metas: Metas, req_ids: Collection[str], reason: str) -> None:
        # Only requests that still wait for blocks: reporting one whose blocks have arrived would crash the engine.
        waiting = {name: pull_metas[name] for name in req_ids if self._waits_for(pull_metas.get(name))}
        for meta in waiting.values():
            meta.pull_tasks_count = min(meta.pull_tasks_count, 1)  # the first failure is the request's failure
        super()._handle_failed_recv(dict(waiting), list(waiting), reason)
        for meta in waiting.values():
            if self._pulls.waits(transfer := _transfer(meta)):
                self._pulls.failed(transfer)
        self.news.set()

    def _waits_for(self, meta: PullReqMeta | None) -> bool:
        if meta is None:
            return False
        return not any(meta.local_block_ids) or self._pulls.waits(_transfer(meta))

    def _time_out(self, metas: Metas) -> None:
        late = [name for name, meta in metas.items() if self._pulls.waits(_transfer(meta))]
        if late:
            self._handle_failed_recv(metas, late, f"no blocks within {self._timeout_s:g} s")
            self._report(self._pulls.settle(_transfers(metas)))

    def _forget(self, address: str) -> None:
        """Drop the cached addresses of the prefill replica whose worker has this address.

        The next transfer then queries the replica's bootstrap server again.
        """
        for engine_id, ranks in list(self._remote_agents.items()):
            if any(address in stages.values() for stages in ranks.values()):
                del self._remote_agents[engine_id]

    def _report(self, settled: tuple[list[Transfer], list[Transfer]]) -> None:
        good, failed = settled
        self._put(good)
        if failed:
            loop = asyncio.get_running_loop()
            loop.call_later(SETTLE_S, self._put_failed, failed, loop.time() + MOST_SETTLE_S)

    def _put_failed(self, transfers: list[Transfer], latest: float) -> None:
        """Report failed transfers as settled, i.e. that the decode scheduler may use their blocks for other requests.

        While a closed connection still has data that this worker has not read, which could be written into the blocks,
        the report is delayed by `SETTLE_S` seconds at a time.

        Args:
            latest: time of the event loop after which the report is not delayed any more.
        """
        loop = asyncio.get_running_loop()
        if has_unread_input():
            if loop.time() < latest:
                loop.call_later(SETTLE_S, self._put_failed, transfers, latest)
                return
            log.error("a closed connection to this worker is not read; the blocks of %s are freed", transfers)
        self._put(transfers)

    def _put(self, transfers: Iterable[Transfer]) -> None:
        for transfer in transfers:
            self._settled.put(transfer)
        self.news.set()


def _transfer(meta: PullReqMeta) -> Transfer:
    return meta.d_req_id, meta.transfer_id


def _transfers(metas: Metas) -> list[Any]:
    return [_transfer(meta) for meta in metas.values()]
