"""Sends KV blocks from a prefill worker to decode workers: extends vLLM's Mooncake worker.

`SendMixin` frees blocks that no decode worker fetches, and sleeps between status queries of a running transfer.
"""

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
"""First and longest pause between status queries, in seconds. Mooncake has no callbacks, and its blocking call uses a
whole core."""


class SendMixin(MooncakeConnectorWorker):
    """Frees blocks that will not be fetched: after `kv_retention_s`, and at once when a transfer has failed."""

    def start_sending(self, kv_retention_s: float) -> None:
        """Initialize this mixin; must be called once, before the first transfer.

        Args:
            kv_retention_s: seconds that blocks are kept for a decode replica after the prompt was computed.
        """
        self._kv_retention_s = kv_retention_s
        self._failed_while_sending: set[str] = set()

    async def record_send_reqs(self, metadata: MooncakeConnectorMetadata) -> None:
        """Record the scheduler's report on this step's requests: begun, finished (with blocks), or not to be sent."""
        for request, (transfer_id, blocks) in metadata.reqs_to_send.items():
            entry = self.reqs_need_send.get(transfer_id)
            if entry is None:
                entry = SendBlockMeta(request, transfer_id, [], asyncio.Event())
                self.reqs_need_send[transfer_id] = entry
            if not blocks:
                entry.p_req_id = entry.p_req_id or request
            elif entry.ready.is_set():
                log.error("transfer %s exists already: the blocks of %s are freed", transfer_id, request)
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
            failed = {meta.req_blocks[name][0] for name in answers.failed if name in meta.req_blocks}
            self._drop(failed | self._failed_while_sending.intersection(each for each, _ in meta.req_blocks.values()))
            self.news.set()

    def _drop(self, transfers: Iterable[str]) -> None:
        """Free the blocks of failed transfers, which decode workers do not query again.

        Blocks that are being sent to another decode worker are freed at the end of that worker's query.
        """
        for transfer_id in transfers:
            entry = self.reqs_need_send.get(transfer_id)
            if entry is not None and entry.sending:
                self._failed_while_sending.add(transfer_id)
                continue
            self._failed_while_sending.discard(transfer_id)
            if entry is None:
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
        """Write blocks into a decode worker's memory; return 0, or `FAILED` if any write has failed.

        Args:
            remote_session: name of the decode worker's Mooncake engine.
            src_ptrs, dst_ptrs, lengths: addresses here and there, and number of bytes, of each write. All writes have
                ended when the method returns.
        """
        since = time.perf_counter()
        statuses = self._write(remote_session, src_ptrs, dst_ptrs, lengths)
        if all(status == DONE for status in statuses):
            self.xfer_stats.record_transfer(time.perf_counter() - since, sum(lengths), len(lengths))
            return 0
        self.xfer_stats.record_failed_transfer()
        log.warning("sending %d bytes to %s failed (%s)", sum(lengths), remote_session, sorted(set(statuses)))
        return FAILED

    def _write(self, session: str, src_ptrs: list[int], dst_ptrs: list[int], lengths: list[int]) -> list[int]:
        """Start all writes, wait for the end of each, and return their final statuses (see `DONE`).

        Every write is a batch of its own: Mooncake reports the status of a batch's first write as that of the batch.
        """
        engine, statuses, pause = self.engine, [], FIRST_LOOK_S
        batches = [
            engine.batch_transfer_async_write(session, [src], [dst], [length])
            for src, dst, length in zip(src_ptrs, dst_ptrs, lengths, strict=True)
        ]
        for batch in batches:
            while batch and (status := engine.transfer_check_status(batch)) == PENDING:
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_LOOK_S)
            statuses.append(status if batch else FAILED)
        return statuses


class _Answers:
    """Stands in for the socket of vLLM's `send_kv_to_decode`: forwards its answers to a decode worker's query.

    Attributes:
        failed: ids of the requests whose blocks were not transferred, by the answers.
        all_failed: an answer reports an error for the whole query.
    """

    def __init__(self, socket: Any, decoder: Any) -> None:
        self._socket, self._decoder = socket, decoder
        self.failed: set[str] = set()
        self.all_failed = False

    async def send_multipart(self, parts: Any) -> None:
        answer = self._decoder.decode(parts[-1])
        self.failed.update(answer.err_reqs or ())
        self.all_failed |= answer.status == MooncakeXferResponseStatus.ERROR
        await self._socket.send_multipart(parts)
