"""What every connector is: how tensors pass from one stage's process to another's, outside the request messages.

A connector is a store that is written once. The producer of an edge `put`s chunks, a consumer `get`s them, and both
name them by `(request, edge, index)`:

- Chunks may be put and read in any order; each key is put once. The chunk with the highest index is marked `last`.
- What was put is immutable and is kept by the producer until the request is forgotten. It may be read any number of
  times, by any consumer: a replica that takes a request over opens it and finds everything there, also what its
  predecessor has read.
- `forget` in the consumer frees the request on both sides, unless another consumer has it open; in the producer it
  frees it on both sides for everybody. What nobody has open is dropped `keep_s` after it was last touched.
- Memory is bounded: what does not fit raises `BackPressure` at once. No `put` waits.
- Every `get` ends: with the chunk, with the producer's reason (`ChunkFailed`), when the connection to the producer is
  gone (`ProducerLost`, within a second if its process has died), or at its deadline (`DeadlinePassed`).
- Producers have an address, a text that travels with the request: that is how a consumer knows which of several
  replicas has its chunks. One producer serves many consumers, and one consumer reads from many producers.

Parts of a chunk are torch tensors of any dtype, shape and device, or bytes. A put takes them over: they must not be
changed afterwards, since some connectors send them from where they are. What a `get` returns is on the host; bytes come
back as a `memoryview`. Tensors returned by a connector inside one process are the producer's own and are not to be
changed either.
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
"""Longest metadata of a chunk; larger things are parts."""

MAX_PARTS = 256
"""Parts of one chunk."""

MAX_NAME = 512
"""Longest request or edge name, in characters."""

MIB = 1024 * 1024


class ConnectorError(OmniError):
    """Base of what a connector raises."""


class BackPressure(ConnectorError):
    """The producer holds as much as it may; nothing was taken. Try again when something has been forgotten."""


class Forgotten(ConnectorError):
    """The request was forgotten, or dropped because nobody had it open."""


class ChunkFailed(ConnectorError):
    """The producer has said that it cannot produce the request's chunks.

    Attributes:
        reason: in the producer's words.
    """

    def __init__(self, message: str, *, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class ProducerLost(ConnectorError):
    """There is no connection to the producer: it has ended, was never there, or does not accept this consumer."""


class DeadlinePassed(ConnectorError):
    """The chunk did not come in time."""


class NoSuchChunk(ConnectorError):
    """The index lies behind the chunk that was marked as the last."""


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
    """How an edge's tensors travel.

    Attributes:
        name: a name of `registry`, or `package.module:Class` of another connector.
        capacity_bytes: what a producer holds at most, all requests together.
        window_bytes: what is sent to a consumer at most, for each request, ahead of its reading (`tcp`); the landing
            area of a consumer (`mooncake`).
        max_requests: requests that a producer knows at most.
        deadline_s: how long a `get` waits if it is not told otherwise.
        keep_s: how long a request is kept that no consumer has open.
        host: where a producer listens (`tcp`, `mooncake`). Anything but loopback should have keys.
        port: of the producer; 0: any.
        protocol: of mooncake: "tcp" or "rdma".
        device: of mooncake: network device; empty: any.
        listening: ZeroMQ options of TCP sockets that listen, by libzmq's number of the option: CURVE keys.
        connecting: the same for TCP sockets that connect. Never part of a configuration: each process finds its own.
    """

    name: str
    capacity_bytes: int = 256 * MIB
    window_bytes: int = 64 * MIB
    max_requests: int = 65536
    deadline_s: float = 10.0
    keep_s: float = 120.0
    host: str = "127.0.0.1"
    port: int = 0
    protocol: str = "tcp"
    device: str = ""
    listening: Mapping[int, Any] = field(default_factory=dict, repr=False, hash=False)
    connecting: Mapping[int, Any] = field(default_factory=dict, repr=False, hash=False)

    def __post_init__(self) -> None:
        for name in ("capacity_bytes", "window_bytes", "max_requests", "deadline_s", "keep_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"connector.{name}: must be positive, got {getattr(self, name)}")
        if self.protocol not in ("tcp", "rdma"):
            raise ConfigError(f"connector.protocol: must be tcp or rdma, got '{self.protocol}'")
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"connector.port: must be a port, got {self.port}")


@dataclass(slots=True)
class Stats:
    """What an endpoint holds now, and what it has seen.

    Attributes:
        requests: known requests.
        chunks: chunks whose memory is in use.
        held_bytes: their size, rounded as they are stored.
        links: consumers of a producer, producers of a consumer.
        dropped: messages that were none, or of nobody who may send them.
        moved_bytes: written by a producer, read by a consumer, since it was made.
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
        """What a consumer needs to find this producer. Holds a secret: whoever knows it may read."""

    @abstractmethod
    def put(self, key: ChunkKey, parts: Sequence[Part], *, meta: bytes = b"", last: bool = False) -> None:
        """Hand a chunk over. Returns when the parts have been taken over, and does not wait for anybody.

        Raises:
            BackPressure: no room now.
            Forgotten: nobody wants the request's chunks any more; there is no need for further ones.
            ChunkFailed: `fail` was called for the request.
            ValueError: wrong edge, a key that was put before, an index behind the last, or a chunk that can never fit.
        """

    @abstractmethod
    def fail(self, request: str, reason: str) -> None:
        """Say that the request's chunks will not come: every `get` of it raises `ChunkFailed` from now on."""

    @abstractmethod
    def forget(self, request: str) -> None:
        """Free everything of a request, on both sides. Unknown requests are ignored."""

    @abstractmethod
    def stats(self) -> Stats:
        """What is held."""

    @abstractmethod
    def close(self) -> None:
        """Free everything; consumers get `ProducerLost`. May be called twice."""

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Consumer(ABC):
    """The reading end of an edge, in one process. May be used from any thread."""

    @abstractmethod
    def open(self, request: str, source: str) -> None:
        """Begin to receive a request's chunks from the producer at the address `source`. Returns at once.

        A request that is open already stays as it is, except if its producer was lost: then it is tried again.

        Raises:
            ValueError: `source` is no address of this connector.
        """

    @abstractmethod
    def get(self, key: ChunkKey, deadline_s: float | None = None) -> Received:
        """Return a chunk of an open request, as soon as it is there.

        Args:
            deadline_s: seconds from now; None: the configured one. 0: only if it is there.

        Raises:
            ConnectorError: it will not come, or not in time; the subclass says why.
            ValueError: the request is not open, or the edge is another.
        """

    @abstractmethod
    def forget(self, request: str) -> None:
        """End the request here, and at its producer unless another consumer has it open. Unknown ones are ignored."""

    @abstractmethod
    def stats(self) -> Stats:
        """What is held."""

    @abstractmethod
    def close(self) -> None:
        """End everything; producers keep what they have. May be called twice."""

    def __enter__(self) -> Consumer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


Arrived: TypeAlias = "Callable[[str], None]"
"""Called with a request's name, in a connector's thread, when a `get` of it may have another answer than before."""


def ignore(request: str) -> None:
    """For consumers that wait in `get`."""


@dataclass(frozen=True)
class Connector(ABC):
    """Makes the ends of edges. Subclasses say how tensors travel."""

    config: ConnectorConfig

    @abstractmethod
    def producer(self, edge: str) -> Producer:
        """The writing end of `edge` for this process."""

    @abstractmethod
    def consumer(self, edge: str, arrived: Arrived = ignore) -> Consumer:
        """The reading end of `edge` for this process."""
