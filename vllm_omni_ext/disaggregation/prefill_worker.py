"""vLLM's worker that sends blocks, with freeing of unclaimed blocks, and waits that do not use a core."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (
    MooncakeConnectorMetadata,
    MooncakeConnectorWorker,
    MooncakeXferMetadata,
    MooncakeXferResponseStatus,
    SendBlockMeta,
)

log = logging.getLogger(__name__)

DONE = 1
PENDING = 0
FAILED = -1
"""Mooncake's status codes of a transfer; any other number is a failure too."""

FIRST_LOOK_S = 0.0002
LONGEST_LOOK_S = 0.02
"""First and longest pause between status queries. Mooncake has no callbacks, and its waiting call uses a whole core."""


class SendMixin(MooncakeConnectorWorker):
    """Frees blocks that will not be fetched: after `kv_retention_s`, and at once when a transfer has failed."""

    def start_sending(self, kv_retention_s: float) -> None:
        """Initialize; must be called once, before the first transfer."""
        self._kv_retention_s = kv_retention_s

    async def record_send_reqs(self, metadata: MooncakeConnectorMetadata) -> None:
        """Record the scheduler's state of this step's requests: running, finished, or not to be sent."""
        for request, (transfer_id, blocks) in metadata.reqs_to_send.items():
            entry = self.reqs_need_send.get(transfer_id)
            if entry is None:
                entry = SendBlockMeta(request, transfer_id, [], asyncio.Event())
                self.reqs_need_send[transfer_id] = entry
            if not blocks:
                entry.p_req_id = entry.p_req_id or request
            elif entry.ready.is_set():
                log.error("transfer %s is there already: the blocks of %s are freed", transfer_id, request)
                self._finished(request)
            else:
                entry.p_req_id, entry.local_block_ids = request, blocks
                entry.expire_time = time.perf_counter() + self._kv_retention_s
                entry.ready.set()
        for transfer_id in metadata.reqs_not_processed:
            self.reqs_need_send.pop(transfer_id, None)

    async def send_kv_to_decode(self, identity: bytes, sock: Any, meta: MooncakeXferMetadata) -> None:
        """Answer a decode worker for all requests in its query."""
        answers = _Answers(sock, self._xfer_resp_decoder)
        try:
            await super().send_kv_to_decode(identity, answers, meta)
        except Exception:
            for transfer_id, _ in meta.req_blocks.values():
                if entry := self.reqs_need_send.get(transfer_id):
                    entry.sending = 0
            answers.failed.update(meta.req_blocks)
            raise
        finally:
            if answers.all_failed:
                answers.failed.update(meta.req_blocks)
            self._drop(meta.req_blocks[name][0] for name in answers.failed if name in meta.req_blocks)
            self.news.set()

    def _drop(self, transfers: Iterable[str]) -> None:
        """Free the blocks of failed transfers: decode does not query them again."""
        for transfer_id in transfers:
            entry = self.reqs_need_send.get(transfer_id)
            if entry is None or entry.sending:
                continue
            if entry.ready.is_set():
                del self.reqs_need_send[transfer_id]
                self._finished(entry.p_req_id)
            elif not entry.p_req_id:
                del self.reqs_need_send[transfer_id]

    def _finished(self, request: str) -> None:
        self.finished_sending_reqs.add(request)
        self.news.set()

    def _send_blocks(self, remote_session: str, src_ptrs: list[int], dst_ptrs: list[int], lengths: list[int]) -> int:
        """Write blocks. Returns when all are written (0), or when it is certain that no write can follow (not 0)."""
        since = time.perf_counter()
        batch = self.engine.batch_transfer_async_write(remote_session, src_ptrs, dst_ptrs, lengths)
        status, pause = (PENDING if batch else FAILED), FIRST_LOOK_S
        while batch and (status := self.engine.transfer_check_status(batch)) == PENDING:
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_LOOK_S)
        if status == DONE:
            self.xfer_stats.record_transfer(time.perf_counter() - since, sum(lengths), len(lengths))
            return 0
        self.xfer_stats.record_failed_transfer()
        log.warning("sending %d bytes to %s failed (%d)", sum(lengths), remote_session, status)
        return FAILED


class _Answers:
    """Forwards answers, and records the requests whose blocks were not transferred."""

    def __init__(self, socket: Any, decoder: Any) -> None:
        self._socket, self._decoder = socket, decoder
        self.failed: set[str] = set()
        self.all_failed = False

    async def send_multipart(self, parts: Any) -> None:
        answer = self._decoder.decode(parts[-1])
        self.failed.update(answer.err_reqs or ())
        self.all_failed |= answer.status == MooncakeXferResponseStatus.ERROR
        await self._socket.send_multipart(parts)
