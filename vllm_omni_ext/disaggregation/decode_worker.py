"""A worker that receives blocks: vLLM's, whose every wait ends, and which knows when nobody writes any more."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable
from queue import SimpleQueue
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (
    MooncakeConnectorWorker,
    MooncakeXferResponse,
    PullReqMeta,
)

from vllm_omni_ext.disaggregation.guard import Settled
from vllm_omni_ext.disaggregation.line import Lines
from vllm_omni_ext.disaggregation.pulls import Pulls, Transfer

log = logging.getLogger(__name__)

SETTLE_S = 1.0
"""How long what a sender has sent may lie in this host's buffers after the sender has failed or is gone."""

Metas = dict[str, PullReqMeta]
"""Of one prefill replica, by request."""


class ReceiveMixin(MooncakeConnectorWorker):
    """Gives up after `transfer_timeout_s`, or as soon as the sender is gone; tells apart "failed" and "settled"."""

    def start_receiving(self, timeout_s: float) -> None:
        """Call once, before anything is received."""
        self._timeout_s = timeout_s
        self._pulls = Pulls()
        self._settled: SimpleQueue[Transfer] = SimpleQueue()
        self._lines: Lines | None = None
        # By request instead of by block: blocks that were given up must not be computed into either.
        self._is_hma_required = True

    def settled(self) -> Settled | None:
        """Transfers into this worker's blocks that are over since the last call."""
        counts = Counter(self._settled.get() for _ in range(self._settled.qsize()))
        return Settled(counts) if counts else None

    def hang_up(self) -> None:
        """End all connections of `Lines`, whose tasks have ended."""
        if self._lines is not None:
            self._lines.close()

    async def _start_load_kv(self, reqs_to_recv: dict[str, Metas]) -> None:
        loop = asyncio.get_running_loop()
        for metas in reqs_to_recv.values():
            for meta in metas.values():
                if any(meta.local_block_ids):
                    self._pulls.begin(_transfer(meta), time.monotonic())
            loop.call_later(self._timeout_s, self._give_up, metas)
        await super()._start_load_kv(reqs_to_recv)

    async def handle_new_engine_id(self, remote_engine_id: str, pull_metas: Metas) -> None:
        """Ask the bootstrap server, then the workers it names."""
        await super().handle_new_engine_id(remote_engine_id, pull_metas)
        self._report(self._pulls.settle(_transfers(pull_metas)))

    def receive_kv(self, remote_engine_id: str, pull_metas: Metas) -> None:
        """Ask the workers of a prefill replica."""
        wanted = {name: meta for name, meta in pull_metas.items() if not meta.failed}
        try:
            super().receive_kv(remote_engine_id, wanted)
        except (AssertionError, KeyError) as error:  # sizes that do not go together, or a worker that is not there yet
            self._remote_agents.pop(remote_engine_id, None)
            self._handle_failed_recv(wanted, list(wanted), f"{remote_engine_id} cannot be asked: {error!r}")
        else:
            for meta in wanted.values():
                self._pulls.ask([_transfer(meta)], meta.pull_tasks_count)
        self._report(self._pulls.settle(_transfers(pull_metas)))

    async def receive_kv_from_single_worker(self, worker_addr: str, pull_metas: Metas) -> None:
        """Ask one worker, and listen until it has answered for all requests or is gone, however late that is."""
        if self._lines is None:
            self._lines = Lines()
        asked = asyncio.create_task(super().receive_kv_from_single_worker(worker_addr, pull_metas))
        gone = self._lines.gone(worker_addr)
        await asyncio.wait((asked, gone), return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            asked.cancel()
            await asyncio.wait((asked,))
            self._forget(worker_addr)
            self._handle_failed_recv(pull_metas, list(pull_metas), f"the prefill worker at {worker_addr} is gone")
        self._report(self._pulls.answer(_transfers(pull_metas)))

    def process_pulling_result(self, response: MooncakeXferResponse, pull_metas: Metas) -> None:
        """Take one answer; it may be one of several."""
        super().process_pulling_result(response, pull_metas)
        for name in response.ok_reqs or ():
            meta = pull_metas[name]
            transfer = _transfer(meta)
            if self._pulls.waits(transfer) and meta.pull_tasks_count == 0 and not meta.failed:
                self.xfer_stats.record_received(self._pulls.arrived(transfer, time.monotonic()))
        self.news.set()

    def _handle_failed_recv(self, pull_metas: Metas, req_ids: Collection[str], reason: str) -> None:
        # A request whose blocks have come does not wait any more: reporting it again would end the engine.
        waiting = [name for name in req_ids if self._concerns(pull_metas[name])]
        super()._handle_failed_recv(pull_metas, waiting, reason)
        for name in waiting:
            if self._pulls.waits(transfer := _transfer(pull_metas[name])):
                self._pulls.failed(transfer)
        self.news.set()

    def _concerns(self, meta: PullReqMeta) -> bool:
        return not any(meta.local_block_ids) or self._pulls.waits(_transfer(meta))

    def _give_up(self, metas: Metas) -> None:
        late = [name for name, meta in metas.items() if self._pulls.waits(_transfer(meta))]
        if late:
            self._handle_failed_recv(metas, late, f"no blocks within {self._timeout_s:g} s")
            self._report(self._pulls.settle(_transfers(metas)))

    def _forget(self, address: str) -> None:
        """Ask a bootstrap server again for whoever had this worker."""
        for engine_id, ranks in list(self._remote_agents.items()):
            if any(address in stages.values() for stages in ranks.values()):
                del self._remote_agents[engine_id]

    def _report(self, settled: tuple[list[Transfer], list[Transfer]]) -> None:
        good, failed = settled
        self._put(good)
        if failed:
            asyncio.get_running_loop().call_later(SETTLE_S, self._put, failed)

    def _put(self, transfers: Iterable[Transfer]) -> None:
        for transfer in transfers:
            self._settled.put(transfer)
        self.news.set()


def _transfer(meta: PullReqMeta) -> Transfer:
    return meta.d_req_id, meta.transfer_id


def _transfers(metas: Metas) -> list[Any]:
    return [_transfer(meta) for meta in metas.values()]
