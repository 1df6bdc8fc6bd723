"""vLLM's MooncakeConnector, adapted for replicas. vLLM finds it through `kv_connector_module_path`.

Differences from vLLM's own: it starts without an accelerator; the answer to a prefill request contains the location of
its blocks; all waits are bounded; a request with unusable parameters is computed locally instead of crashing the
engine; blocks into which a late transfer may still write are not reused (`block_hold.py`).

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
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import MooncakeConnector

from vllm_omni_ext.disaggregation.block_hold import Settled
from vllm_omni_ext.disaggregation.bootstrap import Bootstrap, TransferEndpoint
from vllm_omni_ext.disaggregation.decode_worker import ReceiveMixin
from vllm_omni_ext.disaggregation.mooncake_scheduler import OmniMooncakeScheduler
from vllm_omni_ext.disaggregation.parameters import CONNECTORS, HOST, LOOPBACK, TransferSettings
from vllm_omni_ext.disaggregation.prefill_worker import SendMixin
from vllm_omni_ext.disaggregation.transfer_stats import TransferStats
from vllm_omni_ext.engine.replica_identity import own_ports
from vllm_omni_ext.ports import bind_within

log = logging.getLogger(__name__)

IDLE_STEP_S = 0.005
"""How long a step without tokens waits for progress of transfers: otherwise an idle engine uses a whole core. A new
request waits at most this long for its first step."""

SHUTDOWN_S = 5.0
"""How long the tasks of a thread may take to end."""

NO_LIMIT_S = 1_000_000
"""Limit of vLLM's waits that our own limits end earlier; vLLM converts it to milliseconds in 32 bits."""

BOOTSTRAP_ADDRESS = "bootstrap_server_address"
"""vLLM's key for the server at which a prefill worker registers; if it is set, vLLM starts no server of its own."""


def _context_within(ports: tuple[int, int]) -> zmq.asyncio.Context:
    """Return a context whose sockets listen on ports of a range where vLLM binds them to a random one."""

    class Socket(zmq.asyncio.Socket):
        def bind_to_random_port(self, addr: str, *args: Any, **kwargs: Any) -> int:
            def bind(port: int) -> int:
                self.bind(f"{addr}:{port}")
                return port

            return bind_within(ports, bind)

    class Context(zmq.asyncio.Context):
        _socket_class = Socket

    return Context()


class OmniMooncakeWorker(ReceiveMixin, SendMixin):
    """The worker's half of the connector, for either role."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: Any) -> None:
        _check_library()
        config = vllm_config.kv_transfer_config
        extra = config.kv_connector_extra_config
        timeout_s = float(extra.get("transfer_timeout_s", TransferSettings.transfer_timeout_s))
        host = extra.get(HOST, LOOPBACK)
        _tell_vllm(host, timeout_s, sends=config.is_kv_producer)
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
        """Announce a step of the engine; `idle`: the step computes nothing."""
        self._idle = idle

    def get_transfer_results(self) -> KVConnectorTransferResults:
        """As in vLLM; in an idle step, first wait up to `IDLE_STEP_S` for progress."""
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
        self.hang_up()
        super().shutdown()
        if self.bootstrap is not None:
            self.bootstrap.close()


class OmniMooncakeConnector(MooncakeConnector):
    """The connector as vLLM constructs it, with the scheduler's or the worker's half."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any) -> None:
        # Not the constructor of MooncakeConnector, which would build vLLM's own halves.
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        self.engine_id = vllm_config.kv_transfer_config.engine_id
        self.connector_scheduler: Any = None
        self.connector_worker: Any = None
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = OmniMooncakeScheduler(vllm_config, self.engine_id, kv_cache_config)
        else:
            self.connector_worker = OmniMooncakeWorker(vllm_config, kv_cache_config)

    def get_handshake_metadata(self) -> TransferEndpoint | None:
        """The transfer endpoint, which the scheduler's half needs; None in a decode replica."""
        bootstrap = self.connector_worker.bootstrap
        return None if bootstrap is None else bootstrap.place

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Take the workers' endpoint: equal for all workers of a prefill replica, absent in a decode replica."""
        self.connector_scheduler.place = next(iter(metadata.values()), None)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Set the block pool whose blocks are held during transfers."""
        self.connector_scheduler.guard.bind(gpu_block_pool)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Pass this step's transfers to the worker's threads."""
        self.connector_worker.step_begins(idle=self._connector_metadata.idle_step)
        super().start_load_kv(forward_context, **kwargs)

    def build_connector_worker_meta(self) -> Settled | None:
        """Transfers after which no write of this worker can follow."""
        return self.connector_worker.settled()

    def update_connector_output(self, connector_output: Any) -> None:
        """Apply the workers' reports of this step."""
        settled = connector_output.kv_connector_worker_meta
        if isinstance(settled, Settled):
            self.connector_scheduler.guard.settle(settled.counts)

    def has_pending_push_work(self) -> bool:
        """True while blocks are held: the engine must keep stepping, since only a step can free them."""
        return bool(self.connector_scheduler.guard)

    def totals(self) -> dict[str, float]:
        """This worker's counters since its start."""
        return dict(self.connector_worker.xfer_stats.totals)

    def shutdown(self) -> None:
        """Shut the worker's half down."""
        if self.connector_worker is not None:
            self.connector_worker.shutdown()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TransferStats:
        """Return the statistics received from another process."""
        return TransferStats(data=data or {})


async def _end_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _check_library() -> None:
    """Raise if Mooncake cannot be imported, with the reason, which vLLM's own error omits."""
    try:
        importlib.import_module(CONNECTORS["mooncake"].module)
    except ImportError as error:
        raise RuntimeError(f"mooncake cannot be imported ({error}); {CONNECTORS['mooncake'].install}") from error


def _tell_vllm(host: str, timeout_s: float, *, sends: bool) -> None:
    """Set environment variables that vLLM's connector reads later in this process, in place of settings."""
    os.environ.setdefault("VLLM_HOST_IP", host)
    # Sender: how long a decode worker's query waits for the request. Receiver: our own limit ends the wait earlier.
    os.environ["VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"] = str(max(1, math.floor(timeout_s)) if sends else NO_LIMIT_S)
    if not sends:
        os.environ["VLLM_MOONCAKE_CONNECTOR_TIMEOUT"] = str(timeout_s)


@contextlib.contextmanager
def device_index() -> Iterator[None]:
    """Make torch report device index 0 without an accelerator: vLLM's constructor needs one, and torch raises."""
    if torch.accelerator.is_available():
        yield
        return
    original = torch.accelerator.current_device_index
    torch.accelerator.current_device_index = lambda: 0
    try:
        yield
    finally:
        torch.accelerator.current_device_index = original
