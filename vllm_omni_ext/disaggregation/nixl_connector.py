"""vLLM's NixlConnector for replicas: a name of its own and a free port for each process, and requests are checked.

vLLM takes both from settings that replicas of a stage have in common. Everything else is vLLM's; its waits are not
bounded by `transfer_timeout_s`.
"""

from __future__ import annotations

import logging
import os
import socket
from typing import Any

import psutil
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector

from vllm_omni_ext.disaggregation.parameters import DECODE, HOST, LOOPBACK, PREFILL, understood

log = logging.getLogger(__name__)

GIVEN_ID = "given_engine_id"
"""In the extra config: the engine id as it was before it was made unique."""


class OmniNixlConnector(NixlConnector):
    """Either half, as vLLM constructs it."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any) -> None:
        config = vllm_config.kv_transfer_config
        extra = config.kv_connector_extra_config
        self._kind = PREFILL if config.is_kv_producer else DECODE
        given = extra.setdefault(GIVEN_ID, config.engine_id)
        config.engine_id = f"{given}-{_engine_process(vllm_config, role)}"
        host = extra.get(HOST, LOOPBACK)
        os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = host
        if role == KVConnectorRole.SCHEDULER and config.is_kv_producer:
            os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(_free_port(host))
        super().__init__(vllm_config, role, kv_cache_config)

    def on_new_request(self, request: Any) -> None:
        """A request that asks for what this replica cannot do is computed here."""
        params = request.kv_transfer_params
        if params is not None and not understood(self._kind, params, connector="nixl"):
            log.error("%s: kv_transfer_params that a %s replica cannot use: %r", request.request_id, self._kind, params)
            request.kv_transfer_params = None
        super().on_new_request(request)

    def totals(self) -> dict[str, float]:
        """vLLM counts for Prometheus only."""
        return {}


def _engine_process(vllm_config: VllmConfig, role: KVConnectorRole) -> str:
    """The process that has the scheduler, as a name that no other process has or had on this host."""
    process = psutil.Process()
    if role == KVConnectorRole.WORKER and vllm_config.parallel_config.distributed_executor_backend != "uni":
        process = process.parent()
    return f"{process.pid}-{int(process.create_time() * 1000)}"


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as probe:
        return int(probe.getsockname()[1])
