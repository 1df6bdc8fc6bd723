"""Reads hidden states that replicas of another stage have stored, outside of the engine's steps.

`EdgeReceiver` has one thread for each source, i.e. for each replica that stores hidden states. The thread reads the
announced chunks one after the other. The scheduler (`scheduler.StreamingInput`) takes the results between two steps;
each result wakes the engine. A request whose hidden states are still being read is not scheduled. A source that does
not reply delays only requests of that source.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TypeAlias

import torch

from vllm_omni_ext.connectors.base import Connector, ConnectorError, Consumer
from vllm_omni_ext.wire.stage_input import HiddenStatesRef

IDLE_SOURCES = 8
"""Number of sources without a request whose connection and thread are kept. Beyond it, the source that was used least
recently is closed."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Lost:
    """The result of a read that has failed: the announced hidden states are lost, for this reason."""

    reason: str


@dataclass(frozen=True)
class Arrival:
    """The result of one read of a request's hidden states, for the scheduler (see `EdgeReceiver.arrivals`).

    Attributes:
        count: number of the request's hidden states, from the first one on, that are read or lost by now. It exceeds
            the announced count if that ends within a chunk. After a failed read, all later ones are lost too:
            `sys.maxsize`.
        found: the hidden states [n, width] that follow those of the request's earlier arrivals, in host memory; `Lost`
            if the read has failed.
    """

    req_id: str
    count: int
    found: torch.Tensor | Lost


@dataclass(eq=False)
class _Reading:
    """A request whose hidden states are read from one source.

    Attributes:
        name: the request's name in the source's connector.
        seen: number of the request's hidden states up to the last one that was read; written by the source's thread.
        announced: number of the request's hidden states that the source was ordered to read; written by the engine's
            thread.
        chunks: number of chunks that were read; written by the source's thread.
        ended: the request has ended or has other sources, so that further results are dropped.
    """

    req_id: str
    name: str
    seen: int
    announced: int = 0
    chunks: int = 0
    ended: bool = False


@dataclass(eq=False)
class _Request:
    """A request with announced hidden states; used by the engine's thread only.

    Attributes:
        ref: the last announced location.
        received: number of hidden states that were read.
        readings: (source, reading) by (address of the source, name).
        lost: a read has failed.
    """

    ref: HiddenStatesRef
    received: int = 0
    readings: dict[tuple[str, str], tuple[_Source, _Reading]] = field(default_factory=dict)
    lost: bool = False


@dataclass(frozen=True)
class _Read:
    reading: _Reading
    count: int
    announced_at: float


@dataclass(frozen=True)
class _Result:
    """The result of a read: a request's hidden states from index `first` on, or a failure."""

    reading: _Reading
    first: int
    found: torch.Tensor | Lost


_Order: TypeAlias = _Read | str | None
"""A command to a source's thread. `_Read`: read hidden states. str: free the hidden states of the request with this
name in the connector. None: end the thread."""


@dataclass(eq=False)
class _Source:
    """The thread that reads hidden states from one source.

    Attributes:
        address: address of the source's producer (see `connectors.base`).
        open_consumer: creates the connector's consumer.
        arrived: called in this thread with the result of each read.
        readings: number of requests that read from the source; used by the engine's thread only.
        orders: commands from the engine's thread.
    """

    address: str
    open_consumer: Callable[[], Consumer]
    timeout_s: float
    arrived: Callable[[_Result], None]
    readings: int = 0
    orders: SimpleQueue[_Order] = field(default_factory=SimpleQueue)

    def start(self, edge: str) -> None:
        threading.Thread(target=self._run, name=f"omni-receiver-{edge}", daemon=True).start()

    def _run(self) -> None:
        self._consumer: Consumer | None = None
        self._replied_at = 0.0
        while (order := self.orders.get()) is not None:
            if isinstance(order, _Read):
                if order.count <= order.reading.seen:  # an earlier count ended within a chunk
                    continue
                first, found = order.reading.seen, self._found(order)
                self.arrived(_Result(order.reading, first, found))
                continue
            try:
                self._open().forget(self.address, order)
            except Exception:  # nothing waits for it: the source drops unused hidden states
                log.warning("Hidden states of %s were not freed at their source", order, exc_info=True)
        if self._consumer is not None:
            self._consumer.close()

    def _open(self) -> Consumer:
        if self._consumer is None:
            self._consumer = self.open_consumer()
        return self._consumer

    def _found(self, order: _Read) -> torch.Tensor | Lost:
        try:
            return self._read(order)
        except (ConnectorError, ValueError) as error:
            return Lost(str(error))
        except Exception as error:  # a bug: the request must not wait for it
            log.exception("Hidden states of %s were not read", order.reading.req_id)
            return Lost(f"{type(error).__name__}: {error}")

    def _read(self, order: _Read) -> torch.Tensor:
        reading, pieces = order.reading, []
        while reading.seen < order.count:
            # Requests that wait behind a request without a reply have the same deadline as that one.
            deadline = max(order.announced_at, self._replied_at) + self.timeout_s
            left = max(0.0, deadline - time.monotonic())
            chunk = self._open().get(self.address, reading.name, reading.chunks, left)
            self._replied_at = time.monotonic()
            pieces.append(chunk)
            reading.chunks += 1
            reading.seen += chunk.shape[0]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


class EdgeReceiver:
    """Reads hidden states that a request's input announces (`HiddenStatesRef`), from the replicas that store them.

    The scheduler owns one receiver, and calls all methods in the engine's thread.

    Args:
        edge: name of the edge, i.e. of the connection from the storing stage to this stage.
        settings: connector of the edge. Each source has a consumer of its own.
        timeout_s: seconds after which unread hidden states are lost, from their announcement or from the last chunk of
            their source, whichever is later.
        wake: wakes the engine; called in a source's thread after each result.
    """

    def __init__(self, edge: str, settings: Connector, timeout_s: float, wake: Callable[[], None]) -> None:
        self._edge = edge
        self._settings = settings
        self._timeout_s = timeout_s
        self._wake = wake
        self._results: deque[_Result] = deque()
        self._requests: dict[str, _Request] = {}
        self._sources: OrderedDict[str, _Source] = OrderedDict()  # by time of the last use

    def announce(self, req_id: str, ref: HiddenStatesRef) -> None:
        """Begin to read those of a request's first `ref.count` hidden states that are neither read nor being read.

        After a failover of the storing stage, `ref.source` is another replica. Hidden states that have arrived from the
        old replica are not returned a second time. After a `Lost`, further announcements of the request are ignored,
        because the request ends with an error.

        Hidden states with several locations (`HiddenStatesRef.before`) are read from one location after the other.
        """
        request = self._requests.setdefault(req_id, _Request(ref))
        request.ref = ref
        places = {(each.source, each.name): each.start for each, _ in ref.places()}
        for place in request.readings.keys() - places:
            self._end(*request.readings.pop(place))
        for place, start in places.items():
            if place not in request.readings:
                request.readings[place] = self._source(place[0]), _Reading(req_id, place[1], seen=start)
        self._read(request)

    def _read(self, request: _Request) -> None:
        """Begin to read from the location that has the next hidden states of the request."""
        following = (each for each in request.ref.places() if each[1] > request.received)
        place, end = next(following, (request.ref, 0))
        source, reading = request.readings[place.source, place.name]
        if end > reading.announced and not request.lost:
            reading.announced = end
            source.orders.put(_Read(reading, end, time.monotonic()))

    def arrivals(self) -> list[Arrival]:
        """Return the results of the reads that have ended since the last call, each request's in prompt order.

        Never waits. Results of requests that have ended are dropped.
        """
        found = []
        while self._results:
            result = self._results.popleft()
            req_id = result.reading.req_id
            if result.reading.ended or (request := self._requests[req_id]).lost:
                continue
            if isinstance(result.found, Lost):
                request.lost = True
                found.append(Arrival(req_id, sys.maxsize, result.found))
                continue
            if (new := result.found[max(0, request.received - result.first) :]).shape[0]:
                request.received += new.shape[0]
                found.append(Arrival(req_id, request.received, new))
            self._read(request)
        return found

    def forget(self, req_id: str) -> None:
        """Drop a request that has ended, and free its hidden states at their source. Unknown ids are ignored."""
        if (request := self._requests.pop(req_id, None)) is not None:
            for reading in request.readings.values():
                self._end(*reading)

    def held(self) -> int:
        """Return the number of unfinished requests for which hidden states were announced."""
        return len(self._requests)

    def close(self) -> None:
        """End the threads of all sources, each after its queued commands. Does not wait for their ends."""
        while self._sources:
            self._sources.popitem()[1].orders.put(None)

    def _source(self, address: str) -> _Source:
        source = self._sources.get(address)
        if source is None:
            idle = [each for each in self._sources.values() if not each.readings]
            for each in idle[: max(0, len(idle) - IDLE_SOURCES + 1)]:
                self._sources.pop(each.address).orders.put(None)
            source = _Source(address, lambda: self._settings.consumer(self._edge), self._timeout_s, self._arrived)
            source.start(self._edge)
            self._sources[address] = source
        self._sources.move_to_end(address)
        source.readings += 1
        return source

    def _end(self, source: _Source, reading: _Reading) -> None:
        reading.ended = True
        source.readings -= 1
        source.orders.put(reading.name)

    def _arrived(self, result: _Result) -> None:
        self._results.append(result)
        self._wake()
