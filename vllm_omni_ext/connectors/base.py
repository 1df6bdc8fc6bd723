"""Interface of connectors, which transfer tensors from one stage's process to another's, outside the request messages.

An edge is a connection from one stage to another. Its producer, in the sending process, stores the tensors of a request
(the request's chunks), and consumers in receiving processes read them:

- A request's chunks are put in order, and are immutable. A chunk can be read as soon as `put` has returned. The
  producer's process announces it in a message after that, and a consumer reads announced chunks only.
- A producer has an address, a text that is sent with the request and identifies the replica that has the chunks.
  One producer serves many consumers, and one consumer reads from many producers.
- The producer keeps the chunks until `forget` is called for the request. Any consumer may read them any number of
  times: after a failover, the new replica reads all chunks, also those that were read before.
- `forget` of the consumer that read the request last frees its chunks. `forget` of the producer also frees them. A
  request without a `put` or `get` for `retention_s` is dropped.
- Memory is bounded: a chunk that does not fit raises `BackPressure` at once. No `put` waits.
- Every `get` returns the chunk or raises an error: if the request was freed (`Forgotten`), the connection to the
  producer is lost (`ProducerLost`, within a second if its process has died), or the deadline has passed
  (`DeadlinePassed`).

Chunks are torch tensors of any dtype, shape and device; `get` returns them in host memory. The caller must not change a
tensor after `put`, since some connectors send it without a copy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_omni_ext.errors import ConfigError, OmniError

if TYPE_CHECKING:
    import torch

MAX_NAME = 512
"""Longest request name, in characters."""

MIB = 1024 * 1024


class ConnectorError(OmniError):
    """Base class of the errors of connectors."""


class BackPressure(ConnectorError):
    """The connector's memory is full: a chunk was not stored, or not read. Try again when a request has been freed."""


class Forgotten(ConnectorError):
    """The request's chunks were freed (`forget`, or `retention_s`), or the request never had this chunk."""


class ProducerLost(ConnectorError):
    """There is no connection to the producer: it has ended, never existed, or rejects this consumer."""


class DeadlinePassed(ConnectorError):
    """The chunk did not arrive within `timeout_s`."""


@dataclass(frozen=True, kw_only=True)
class ConnectorConfig:
    """Settings of an edge's connector.

    Attributes:
        name: a key of `registry.CONNECTORS`, or `package.module:Class` of another connector.
        capacity_bytes: most bytes that a producer holds, for all requests together.
        kept_bytes: most bytes of hidden states that a sending replica keeps for later prompts with the same prefix.
        window_bytes: size of a consumer's receive buffer (`mooncake`).
        timeout_s: seconds that a stage waits for announced hidden states.
        retention_s: seconds that a producer keeps the chunks of a request after the last `put` or `get`.
        host: address on which a producer listens (`tcp`, `mooncake`). Use `listening` and `connecting` keys with any
            address but loopback.
        port: port on which a producer listens; 0: any of `ports`.
        protocol: transport of `mooncake`: "tcp" or "rdma".
        device: network device of `mooncake`; empty: any.
        listening: CURVE keys of listening TCP sockets, as ZeroMQ options by libzmq option number. Each process sets
            `listening`, `connecting` and `ports` itself; users do not configure them.
        connecting: CURVE keys of connecting TCP sockets, as ZeroMQ options by libzmq option number.
        ports: first and last port on which this process may listen; None: any.
    """

    name: str
    capacity_bytes: int = 256 * MIB
    kept_bytes: int = 512 * MIB
    window_bytes: int = 64 * MIB
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
        for name in ("capacity_bytes", "window_bytes", "timeout_s", "retention_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"connector.{name}: must be positive, got {getattr(self, name)}")
        if self.kept_bytes < 0:
            raise ConfigError(f"connector.kept_bytes: must not be negative, got {self.kept_bytes}")
        if self.protocol not in ("tcp", "rdma"):
            raise ConfigError(f"connector.protocol: must be tcp or rdma, got '{self.protocol}'")
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"connector.port: must be a port, got {self.port}")


@dataclass(slots=True)
class Stats:
    """Statistics of a producer.

    Attributes:
        requests: number of requests with stored chunks.
        held_bytes: bytes of memory that these chunks take, in whole cache lines.
        dropped: number of dropped messages, which were malformed or had a wrong token.
    """

    requests: int = 0
    held_bytes: int = 0
    dropped: int = 0


class Producer(ABC):
    """Stores the chunks that an edge sends, in one process. Used by one thread.

    Attributes:
        keeps_tensors: True: `put` may keep a reference to the tensor's memory; False: `put` copies the tensor.
    """

    keeps_tensors = True

    @property
    @abstractmethod
    def address(self) -> str:
        """The address to which consumers connect. It contains a secret: every process that has the address may read."""

    @abstractmethod
    def put(self, request: str, index: int, chunk: torch.Tensor) -> None:
        """Store the next chunk of a request, with its index from 0. Never waits for a consumer.

        Raises:
            BackPressure: no memory is free now.
            Forgotten: `forget` was called for the request; its further chunks are not needed.
            ValueError: the index is not the next one, or the chunk can never fit.
        """

    @abstractmethod
    def forget(self, request: str) -> None:
        """Free the chunks of a request. Unknown requests are ignored."""

    @abstractmethod
    def stats(self) -> Stats:
        """Return the current statistics."""

    @abstractmethod
    def close(self) -> None:
        """Free all chunks, and end the connections: `get` of consumers raises `ProducerLost`. May be called twice."""

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Consumer(ABC):
    """Reads the chunks that an edge sends, in one process. Used by one thread."""

    @abstractmethod
    def get(self, source: str, request: str, index: int, timeout_s: float) -> torch.Tensor:
        """Return a chunk of the producer at the address `source`.

        Raises:
            ConnectorError: the chunk cannot be read, or not within `timeout_s`; the subclass gives the reason.
            ValueError: `source` is not an address of this connector.
        """

    @abstractmethod
    def forget(self, source: str, request: str) -> None:
        """Free the chunks of a request at the producer with the address `source`. Unknown requests are ignored.

        If another consumer has read the request later than this one, the chunks stay.
        """

    @abstractmethod
    def close(self) -> None:
        """Close all connections; producers keep their chunks. May be called twice."""

    def __enter__(self) -> Consumer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass(frozen=True)
class Connector(ABC):
    """Creates producers and consumers of edges. Subclasses implement the transport."""

    config: ConnectorConfig

    @abstractmethod
    def producer(self, edge: str) -> Producer:
        """Create the producer of `edge` in this process."""

    @abstractmethod
    def consumer(self, edge: str) -> Consumer:
        """Create a consumer of `edge` in this process."""
