"""Where decode replicas ask for the workers of a prefill replica: vLLM's own server, inside the replica's first worker.

So it starts and ends with the workers it knows, and a replica that is started again does not meet its predecessor's
registrations. It is bound to one address, not to all.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_utils import MooncakeBootstrapServer
from vllm.distributed.parallel_state import get_world_group


@dataclass(frozen=True)
class Place(KVConnectorHandshakeMetadata):
    """Where the blocks of a prefill replica are to be had.

    Attributes:
        engine_id: made with the process and never used again: what others remember of an earlier one is not met.
        address: `host:port` of its bootstrap server.
    """

    engine_id: str
    address: str

    @property
    def url(self) -> str:
        """As a decode request carries it."""
        return f"http://{self.address}"


class Bootstrap:
    """The place of this replica; the first of its workers also runs the server, until `close`."""

    def __init__(self, host: str, port: int = 0) -> None:
        workers = get_world_group()
        self._server: MooncakeBootstrapServer | None = None
        place = None
        if workers.rank_in_group == 0:
            self._server = MooncakeBootstrapServer(host, port)
            self._server.start()
            named = f"[{host}]" if ":" in host else host
            place = Place(uuid.uuid4().hex, f"{named}:{self._server.port}")
        self.place: Place = workers.broadcast_object(place, src=0)

    def close(self) -> None:
        """End the server. May be called twice."""
        if self._server is not None:
            self._server.shutdown()
            self._server = None
