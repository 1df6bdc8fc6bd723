"""Runs vLLM's Mooncake bootstrap server in the first worker of a prefill replica.

Decode replicas query the server for the addresses of the prefill replica's workers. The server starts and ends with
these workers, so a restarted replica has no stale registrations. Unlike vLLM's, the server listens on one address only.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_utils import MooncakeBootstrapServer
from vllm.distributed.parallel_state import get_world_group

from vllm_omni_ext.ports import bind_within


@dataclass(frozen=True)
class TransferEndpoint(KVConnectorHandshakeMetadata):
    """The address from which the blocks of a prefill replica can be fetched.

    Attributes:
        engine_id: unique per process, so that a decode replica never uses cached addresses of an earlier process.
        address: `host:port` of the replica's bootstrap server.
    """

    engine_id: str
    address: str

    @property
    def url(self) -> str:
        """URL of the bootstrap server, as in the parameters of a decode request."""
        return f"http://{self.address}"


def _started(server: MooncakeBootstrapServer) -> MooncakeBootstrapServer:
    server.start()
    return server


class Bootstrap:
    """Provides a prefill worker with its replica's `TransferEndpoint`; the first worker runs the server until `close`.

    Args:
        host: address on which the server listens.
        ports: first and last port on which the server may listen; None: any.

    Attributes:
        place: the replica's endpoint, equal in all workers.
    """

    def __init__(self, host: str, ports: tuple[int, int] | None = None) -> None:
        workers = get_world_group()
        self._server: MooncakeBootstrapServer | None = None
        place = None
        if workers.rank_in_group == 0:
            self._server = bind_within(ports, lambda port: _started(MooncakeBootstrapServer(host, port)))
            named = f"[{host}]" if ":" in host else host
            place = TransferEndpoint(uuid.uuid4().hex, f"{named}:{self._server.port}")
        self.place: TransferEndpoint = workers.broadcast_object(place, src=0)

    def close(self) -> None:
        """Stop the server. May be called twice."""
        if self._server is not None:
            self._server.shutdown()
            self._server = None
