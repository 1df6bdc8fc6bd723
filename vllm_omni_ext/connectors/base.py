"""Interface of connectors, which transfer tensors from one stage's process to another's, outside the request messages.

A connector is a write-once store. The producer of an edge `put`s chunks and consumers `get` them, by the key
`(request, edge, index)`:

- Chunks may be put and read in any order; each key is put once. The chunk with the highest index is marked `last`.
- Chunks are immutable, and the producer keeps them until the request is forgotten. Any consumer may read them any
  number of times: after a failover, the new replica can read all chunks, also those that were read before.
- `forget` in a consumer frees the request on both sides, unless another consumer has the request open; `forget` in the
  producer always frees it. A request that no consumer has open is dropped `retention_s` after its last use.
- Memory is bounded: a chunk that does not fit raises `BackPressure` at once. No `put` waits.
- Every `get` ends: with the chunk, with the producer's reason (`ChunkFailed`), when the connection to the producer is
  lost (`ProducerLost`, within a second if its process has died), or at its deadline (`DeadlinePassed`).
- A producer has an address, a text that is sent with the request: it names which of several replicas has
  the chunks. One producer serves many consumers, and one consumer reads from many producers.

Parts of a chunk are torch tensors of any dtype, shape and device, or bytes. The caller must not change them after
`put`, since some connectors send them without a copy. `get` returns them in host memory, bytes as a `memoryview`. A
connector inside one process may return the producer's own tensors, which must not be changed either.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from vllm_omni_ext.errors import ConfigError, OmniError

Part: TypeAlias = "Any"
"""A torch tensor, or bytes (anything with the buffer protocol)."""

MAX_META_BYTES = 16 * 1024
"""Longest metadata of a chunk; larger data must be a part."""

MAX_PARTS = 256
"""Most parts of one chunk."""

MAX_NAME = 512
"""Longest request or edge name, in characters."""

MIB = 1024 * 1024


class ConnectorError(OmniError):
    """Base class of the errors of connectors."""


class BackPressure(ConnectorError):
    """The producer's memory is full; the chunk was not stored. Try again when a request has been forgotten."""


class Forgotten(ConnectorError):
    """The request was forgotten, or dropped because no consumer had it open."""


class ChunkFailed(ConnectorError):
    """The producer cannot produce the request's chunks.

    Attributes:
        reason: as passed to `Producer.fail`.
    """

    def __init__(self, message: str, *, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class ProducerLost(ConnectorError):
    """There is no connection to the producer: it has ended, never existed, or refuses this consumer."""


class DeadlinePassed(ConnectorError):
    """The chunk did not arrive in time."""


class NoSuchChunk(ConnectorError):
    """The index is behind that of the last chunk."""


@dataclass(frozen=True, slots=True)
class ChunkKey:
    """Name of a chunk; `index` counts from 0 in each request and edge."""

    request: str
    edge: str
    index: int

    def __post_init__(self) -> None:
        if self.index < 0 or not 0 < len(self.request) <= MAX_NAME:
            raise ValueError(f"{self} is no chunk's name")

    def __str__(self) -> str:
        return f"{self.request}/{self.edge}/{self.index}"


@dataclass(frozen=True, slots=True)
class Received:
    """A chunk as it arrived: parts in the order in which they were put."""

    key: ChunkKey
    parts: tuple[Part, ...]
    meta: bytes
    last: bool


@dataclass(frozen=True, kw_only=True)
class ConnectorConfig:
    """How an edge transfers its tensors.

    Attributes:
        name: a name of `registry`, or `package.module:Class` of another connector.
        capacity_bytes: most bytes that a producer holds, for all requests together.
        window_bytes: most bytes per request that are sent to a consumer before it reads them (`tcp`); size of a
            consumer's receive buffer (`mooncake`).
        max_requests: most requests that a producer holds.
        timeout_s: how long a `get` waits by default.
        retention_s: how long a request is kept that no consumer has open.
        host: address on which a producer listens (`tcp`, `mooncake`). Addresses other than loopback should have keys.
        port: port on which a producer listens; 0: any of `ports`.
        protocol: transport of `mooncake`: "tcp" or "rdma".
        device: network device of `mooncake`; empty: any.
        listening: ZeroMQ options of listening TCP sockets, by libzmq option number: CURVE keys.
        connecting: the same for connecting TCP sockets. Never configured by the user: each process sets both itself.
        ports: first and last port on which this process may listen; None: any. Set as `connecting`.
    """

    name: str
    capacity_bytes: int = 256 * MIB
    window_bytes: int = 64 * MIB
    max_requests: int = 65536
    timeout_s: float = 10.0
    retention_s: float = 120.0
    host: str = "127.0.0.1"
    port: int = 0
    protocol: str = "tcp"
    device: str = ""
    listening: Mapping[int, Any] = field(default_factory=dict, repr=False, hash=False)
    connecting: Mapping[int, Any] = field(default_factory=dict, repr=False, hash=False)
    ports: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for name in ("capacity_bytes", "window_bytes", "max_requests", "timeout_s", "retention_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"connector.{name}: must be positive, got {getattr(self, name)}")
        if self.protocol not in ("tcp", "rdma"):
            raise ConfigError(f"connector.protocol: must be tcp or rdma, got '{self.protocol}'")
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"connector.port: must be a port, got {self.port}")


@dataclass(slots=True)
class Stats:
    """Statistics of a producer or consumer.

    Attributes:
        requests: known requests.
        chunks: chunks whose memory is in use.
        held_bytes: size of these chunks, rounded up as stored.
        links: connected consumers of a producer, or producers of a consumer.
        dropped: dropped messages: malformed, or from an unauthorized sender.
        moved_bytes: bytes written by a producer, or read by a consumer, since its start.
    """

    requests: int = 0
    chunks: int = 0
    held_bytes: int = 0
    links: int = 0
    dropped: int = 0
    moved_bytes: int = 0


class Producer(ABC):
    """The writing end of an edge, in one process. May be used from any thread."""

    @property
    @abstractmethod
    def address(self) -> str:
        """The address with which consumers connect. It contains a secret: every process that has it may read."""

    @abstractmethod
    def put(self, key: ChunkKey, parts: Sequence[Part], *, meta: bytes = b"", last: bool = False) -> None:
        """Store a chunk. Never waits for a consumer.

        Raises:
            BackPressure: no memory is free now.
            Forgotten: the request was forgotten; its further chunks are not needed.
            ChunkFailed: `fail` was called for the request.
            ValueError: wrong edge, a key that was put before, an index behind the last, or a chunk that can never fit.
        """

    @abstractmethod
    def fail(self, request: str, reason: str) -> None:
        """Mark a request as failed: from now on every `get` for it raises `ChunkFailed`."""

    @abstractmethod
    def forget(self, request: str) -> None:
        """Free all data of a request, on both sides. Unknown requests are ignored."""

    @abstractmethod
    def stats(self) -> Stats:
        """Return the current statistics."""

    @abstractmethod
    def close(self) -> None:
        """Free all data; consumers get `ProducerLost`. May be called twice."""

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Consumer(ABC):
    """The reading end of an edge, in one process. May be used from any thread."""

    @abstractmethod
    def open(self, request: str, source: str) -> None:
        """Start receiving a request's chunks from the producer at the address `source`. Returns at once.

        For a request that is open already this does nothing, unless its producer was lost: then it reconnects.

        Raises:
            ValueError: `source` is not an address of this connector.
        """

    @abstractmethod
    def get(self, key: ChunkKey, timeout_s: float | None = None) -> Received:
        """Return a chunk of an open request; wait until it has arrived.

        Args:
            timeout_s: seconds from now; None: the configured timeout; 0: do not wait.

        Raises:
            ConnectorError: the chunk cannot be read, or not in time; the subclass gives the reason.
            ValueError: the request is not open, or the key has another edge.
        """

    @abstractmethod
    def forget(self, request: str) -> None:
        """End a request here, and at its producer unless another consumer has it open. Unknown ones are ignored."""

    @abstractmethod
    def stats(self) -> Stats:
        """Return the current statistics."""

    @abstractmethod
    def close(self) -> None:
        """End all requests here; producers keep their chunks. May be called twice."""

    def __enter__(self) -> Consumer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


Arrived: TypeAlias = "Callable[[str], None]"
"""Called with a request's name, in a connector's thread, when the result of a `get` for it may have changed."""


def ignore(request: str) -> None:
    """The listener of consumers that wait in `get`: does nothing."""


@dataclass(frozen=True)
class Connector(ABC):
    """Makes producers and consumers of edges. Subclasses implement the transport."""

    config: ConnectorConfig

    @abstractmethod
    def producer(self, edge: str) -> Producer:
        """Make the producer of `edge` in this process."""

    @abstractmethod
    def consumer(self, edge: str, arrived: Arrived = ignore) -> Consumer:
        """Make a consumer of `edge` in this process."""
