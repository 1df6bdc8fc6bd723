"""vLLM's NixlConnector, adapted for replicas: a unique engine id and a free port per process, and checked parameters.

vLLM takes engine id and port from settings that all replicas of a stage share. A request with invalid transfer
parameters is computed locally. All other behaviour is vLLM's; `transfer_timeout_s` does not limit vLLM's waits.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from typing import Any

import psutil
import zmq
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector

from vllm_omni_ext.disaggregation.parameters import HOST, LOOPBACK, understood
from vllm_omni_ext.engine.replica_identity import own_ports
from vllm_omni_ext.ids import DECODE, PREFILL
from vllm_omni_ext.ports import ANY, bind_within

log = logging.getLogger(__name__)

GIVEN_ID = "given_engine_id"
"""Key of the connector's extra config for the configured engine id, without the suffix that makes it unique."""


class OmniNixlConnector(NixlConnector):
    """The connector class that vLLM loads; by its `role`, an instance has the scheduler side or the worker side."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any) -> None:
        config = vllm_config.kv_transfer_config
        extra = config.kv_connector_extra_config
        self._kind = PREFILL if config.is_kv_producer else DECODE
        given = extra.setdefault(GIVEN_ID, config.engine_id)
        config.engine_id = f"{given}-{_engine_process(vllm_config, role)}"
        os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = extra.get(HOST, LOOPBACK)
        super().__init__(vllm_config, role, kv_cache_config)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Listen for other replicas at a port that no process uses.

        vLLM waits for ever for a listener that cannot bind. A port that was free before may be in use: NIXL's library,
        here and in other replicas, takes ports of the same range.

        Raises:
            OSError: all ports are in use.
        """
        scheduler = self.connector_scheduler
        if scheduler._nixl_handshake_listener_t is not None:
            super().set_xfer_handshake_metadata_pp_aware(metadata)
            return
        listen = scheduler._nixl_handshake_listener

        def at(port: int) -> None:
            failed: list[zmq.ZMQError] = []

            def listener(data: Any, ready: threading.Event, *others: Any) -> None:
                try:
                    listen(data, ready, *others)
                except zmq.ZMQError as error:
                    if ready.is_set():
                        raise
                    failed.append(error)
                    ready.set()

            scheduler._nixl_handshake_listener = listener
            scheduler.side_channel_port = port or _free_port(scheduler.side_channel_host)
            scheduler.set_xfer_handshake_metadata(metadata)
            if failed:
                scheduler._nixl_handshake_listener_t = None
                raise failed[0]

        bind_within(own_ports(), at)

    def on_new_request(self, request: Any) -> None:
        """Drop transfer parameters that this replica cannot use; the request is then computed locally."""
        params = request.kv_transfer_params
        if params is not None and not understood(self._kind, params, connector="nixl"):
            log.error("%s: kv_transfer_params that a %s replica cannot use: %r", request.request_id, self._kind, params)
            request.kv_transfer_params = None
        super().on_new_request(request)

    def totals(self) -> dict[str, float]:
        """Return {}: vLLM's NIXL connector counts transfers for Prometheus only."""
        return {}


def _engine_process(vllm_config: VllmConfig, role: KVConnectorRole) -> str:
    """Return a unique name of the process that runs the scheduler: process id and start time."""
    process = psutil.Process()
    if role == KVConnectorRole.WORKER and vllm_config.parallel_config.distributed_executor_backend != "uni":
        process = process.parent()
    return f"{process.pid}-{int(process.create_time() * 1000)}"


def _free_port(host: str) -> int:
    with socket.create_server((host, ANY)) as probe:
        return int(probe.getsockname()[1])
