"""vLLM's MooncakeConnector, adapted for replicas. vLLM finds it through `kv_connector_module_path`.

Differences from vLLM's connector: it starts without an accelerator; the final output of a prefill request contains the
location of the request's blocks; all waits are bounded; a request with invalid transfer parameters is computed locally
instead of crashing the engine; blocks into which a late transfer may still write are not reused (`block_hold.py`).

Mooncake's engine listens on all interfaces without authentication: use it in private networks only.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import math
import os
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import zmq
import zmq.asyncio
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (
    MooncakeConnector,
    MooncakeConnectorScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.stats import MooncakeKVConnectorStats

from vllm_omni_ext.disaggregation.block_hold import BlockHold, Settled
from vllm_omni_ext.disaggregation.bootstrap import Bootstrap, TransferEndpoint
from vllm_omni_ext.disaggregation.decode_worker import ReceiveMixin
from vllm_omni_ext.disaggregation.parameters import CONNECTORS, HOST, LOOPBACK, TransferSettings, answer, understood
from vllm_omni_ext.disaggregation.prefill_worker import SendMixin
from vllm_omni_ext.engine.replica_identity import own_ports
from vllm_omni_ext.ids import DECODE, PREFILL
from vllm_omni_ext.ports import bind_within

log = logging.getLogger(__name__)

IDLE_STEP_S = 0.005
"""Seconds that a step without tokens waits for progress of transfers. Without the wait, an idle engine would use a
whole core. A new request waits at most this long for its first step."""

SHUTDOWN_S = 5.0
"""Seconds that the tasks of a thread may take to end."""

NO_LIMIT_S = 1_000_000
"""Value in seconds of a vLLM timeout that must never apply, since a shorter timeout of this package applies first. In
milliseconds it must fit into 32 bits."""

BOOTSTRAP_ADDRESS = "bootstrap_server_address"
"""vLLM's key for the address of the bootstrap server; if it is set, vLLM does not start a bootstrap server."""


WAITED = "wait_duration"
"""Statistics column: seconds from the start of a transfer until its blocks arrived, in a decode replica."""


def _context_within(ports: tuple[int, int]) -> zmq.asyncio.Context:
    """Return a ZeroMQ context for vLLM's connector whose sockets bind no random port, but one within `ports`.

    Args:
        ports: first and last allowed port.
    """

    class Socket(zmq.asyncio.Socket):
        def bind_to_random_port(self, addr: str, *args: Any, **kwargs: Any) -> int:
            def bind(port: int) -> int:
                self.bind(f"{addr}:{port}")
                return port

            return bind_within(ports, bind)

    class Context(zmq.asyncio.Context):
        _socket_class = Socket

    return Context()


class TransferStats(MooncakeKVConnectorStats):
    """Adds two things to vLLM's statistics of a worker's transfers: the column `WAITED`, and `totals`.

    Attributes:
        totals: counters since the start of the worker, by name; `reset` keeps them.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.totals: Counter[str] = Counter()

    def reset(self) -> None:
        super().reset()
        self.data[WAITED] = []

    def is_empty(self) -> bool:
        return super().is_empty() and not self.data[WAITED]

    def record_transfer(self, duration_s: float, total_bytes: int, num_descs: int) -> None:
        super().record_transfer(duration_s, total_bytes, num_descs)
        self._count(transfers=1, bytes=total_bytes, seconds=duration_s)

    def record_failed_transfer(self) -> None:
        super().record_failed_transfer()
        self._count(failed_transfers=1)

    def record_failed_recv(self) -> None:
        super().record_failed_recv()
        self._count(failed_receives=1)

    def record_kv_expired_req(self) -> None:
        super().record_kv_expired_req()
        self._count(expired=1)

    def record_received(self, seconds: float) -> None:
        with self._lock:
            self.data[WAITED].append(seconds)
        self._count(received=1, waited_seconds=seconds)

    def clone_and_reset(self) -> TransferStats:
        """Return the statistics since the last call, in a form that can be sent; reset all but `totals`."""
        with self._lock:
            data: dict[str, Any] = {name: list(column) for name, column in self.data.items()}
            self.reset()
        return TransferStats(data=data)

    def _count(self, **amounts: float) -> None:
        """Add to the totals of these names. Several threads send blocks at the same time."""
        with self._lock:
            for name, amount in amounts.items():
                self.totals[name] += amount  # type: ignore[assignment]


class OmniMooncakeScheduler(MooncakeConnectorScheduler):
    """Scheduler side of the connector: vLLM's `MooncakeConnectorScheduler` with a `BlockHold` and a transfer endpoint.

    Attributes:
        place: the endpoint from which blocks can be fetched; None in a decode replica.
        guard: holds the blocks into which a transfer may write.
    """

    def __init__(self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self.place: TransferEndpoint | None = None
        self.guard = BlockHold(vllm_config.parallel_config.world_size)
        self._role = PREFILL if self.is_kv_producer else DECODE

    def on_new_request(self, request: Any) -> None:
        """Drop transfer parameters that this replica cannot use; the request is then computed locally."""
        params = request.kv_transfer_params
        if params is not None and not understood(self._role, params):
            log.error("%s: kv_transfer_params that a %s replica cannot use: %r", request.request_id, self._role, params)
            request.kv_transfer_params = None
        super().on_new_request(request)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Handle a request's newly allocated blocks; hold them (`BlockHold`) if a transfer will write into them."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        expected = self._reqs_need_recv.get(request.request_id)
        if expected is not None and any(expected[1]):
            transfer = request.request_id, request.kv_transfer_params["transfer_id"]
            self.guard.hold(transfer, [block for group in blocks.blocks for block in group if not block.is_null])

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Return this step's metadata for the workers; its attribute `idle_step` is True if the step has no tokens."""
        metadata = super().build_connector_meta(scheduler_output)
        metadata.idle_step = not scheduler_output.total_num_scheduled_tokens
        return metadata

    def request_finished(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """Handle the end of a request.

        Returns:
            (whether the request's blocks are kept for a decode replica, `kv_transfer_params` for the final output).
        """
        kept, params = super().request_finished(request, block_ids)
        if kept:
            assert self.place is not None
            params = answer(request.kv_transfer_params["transfer_id"], self.place.engine_id, self.place.url)
        return kept, params


class OmniMooncakeWorker(ReceiveMixin, SendMixin):
    """Worker side of the connector, in prefill and decode replicas."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: Any) -> None:
        _check_library()
        config = vllm_config.kv_transfer_config
        extra = config.kv_connector_extra_config
        timeout_s = float(extra.get("transfer_timeout_s", TransferSettings.transfer_timeout_s))
        host = extra.get(HOST, LOOPBACK)
        _set_environment(host, timeout_s, sends=config.is_kv_producer)
        self.news = threading.Event()
        ports = own_ports()
        self.bootstrap = Bootstrap(host, ports) if config.is_kv_producer else None
        if self.bootstrap is not None:
            extra[BOOTSTRAP_ADDRESS] = self.bootstrap.place.address
        engine_id = config.engine_id if self.bootstrap is None else self.bootstrap.place.engine_id
        with device_index():
            super().__init__(vllm_config, engine_id, kv_cache_config)
        if ports is not None:
            self.async_zmq_ctx: Any = _context_within(ports)  # vLLM has made no socket yet
        self.xfer_stats = TransferStats()
        self.start_receiving(timeout_s)
        self.start_sending(float(extra.get("kv_retention_s", TransferSettings.kv_retention_s)))
        self._idle = False

    def step_begins(self, *, idle: bool) -> None:
        """Record that a step of the engine begins; `idle`: the step computes no tokens."""
        self._idle = idle

    def get_transfer_results(self) -> KVConnectorTransferResults:
        """Return vLLM's transfer results; in an idle step, first wait up to `IDLE_STEP_S` for progress."""
        if self._idle and (self._pulls or self.reqs_need_send):
            self.news.wait(IDLE_STEP_S)
        self.news.clear()
        return super().get_transfer_results()

    def shutdown(self) -> None:
        """End connections, threads and the bootstrap server. May be called twice."""
        if not hasattr(self, "_idle"):  # the constructor failed
            return
        # vLLM's own shutdown waits forever for sockets that its tasks have open.
        for name in ("sender_loop", "receiver_loop"):
            loop = getattr(self, name, None)
            if loop is not None and loop.is_running():
                asyncio.run_coroutine_threadsafe(_end_tasks(), loop).result(SHUTDOWN_S)
        self.close_connections()
        super().shutdown()
        if self.bootstrap is not None:
            self.bootstrap.close()


class OmniMooncakeConnector(MooncakeConnector):
    """The connector class that vLLM loads; by its `role`, an instance has the scheduler side or the worker side."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any) -> None:
        # Not the constructor of MooncakeConnector, which would build vLLM's own sides.
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        self.engine_id = vllm_config.kv_transfer_config.engine_id
        self.connector_scheduler: Any = None
        self.connector_worker: Any = None
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = OmniMooncakeScheduler(vllm_config, self.engine_id, kv_cache_config)
        else:
            self.connector_worker = OmniMooncakeWorker(vllm_config, kv_cache_config)

    def get_handshake_metadata(self) -> TransferEndpoint | None:
        bootstrap = self.connector_worker.bootstrap
        return None if bootstrap is None else bootstrap.place

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Store the `TransferEndpoint` of this replica's workers, which is equal for all; None in a decode replica."""
        self.connector_scheduler.place = next(iter(metadata.values()), None)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self.connector_scheduler.guard.bind(gpu_block_pool)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.connector_worker.step_begins(idle=self._connector_metadata.idle_step)
        super().start_load_kv(forward_context, **kwargs)

    def build_connector_worker_meta(self) -> Settled | None:
        """Return the transfers that were settled since the last call (no write into this worker's blocks can follow).

        The result is None if no transfer was settled. vLLM sends it to the scheduler's `update_connector_output`.
        """
        return self.connector_worker.settled()

    def update_connector_output(self, connector_output: Any) -> None:
        settled = connector_output.kv_connector_worker_meta
        if isinstance(settled, Settled):
            self.connector_scheduler.guard.settle(settled.counts)

    def has_pending_push_work(self) -> bool:
        """Return True while blocks are held: the engine must keep stepping, since only a step can free them."""
        return bool(self.connector_scheduler.guard)

    def totals(self) -> dict[str, float]:
        """Return this worker's transfer counters since its start, by name (`TransferStats.totals`)."""
        return dict(self.connector_worker.xfer_stats.totals)

    def shutdown(self) -> None:
        if self.connector_worker is not None:
            self.connector_worker.shutdown()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TransferStats:
        return TransferStats(data=data or {})


async def _end_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _check_library() -> None:
    """Raise RuntimeError with the reason if Mooncake cannot be imported; vLLM's own error omits the reason."""
    try:
        importlib.import_module(CONNECTORS["mooncake"].module)
    except ImportError as error:
        raise RuntimeError(f"mooncake cannot be imported ({error}); {CONNECTORS['mooncake'].install}") from error


def _set_environment(host: str, timeout_s: float, *, sends: bool) -> None:
    """Set the environment variables from which vLLM's connector reads its host and timeouts later."""
    os.environ.setdefault("VLLM_HOST_IP", host)
    # In a prefill replica: how long a decode worker's query waits for the request. In a decode replica: no limit, since
    # `transfer_timeout_s` ends the wait earlier.
    os.environ["VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"] = str(max(1, math.floor(timeout_s)) if sends else NO_LIMIT_S)
    if not sends:
        os.environ["VLLM_MOONCAKE_CONNECTOR_TIMEOUT"] = str(timeout_s)


@contextlib.contextmanager
def device_index() -> Iterator[None]:
    """Make torch return device index 0 without an accelerator, where it raises; vLLM's constructor reads the index."""
    if torch.accelerator.is_available():
        yield
        return
    original = torch.accelerator.current_device_index
    torch.accelerator.current_device_index = lambda: 0
    try:
        yield
    finally:
        torch.accelerator.current_device_index = original
