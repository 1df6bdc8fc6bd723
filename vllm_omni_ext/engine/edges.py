"""Sender and receiver of the hidden states of an edge (a connection between two stages), inside the stages' workers.

The first request that needs it opens the edge's connector.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch

from vllm_omni_ext.config.schema import INCOMING, OUTGOING
from vllm_omni_ext.connectors.base import Connector, ConnectorConfig, ConnectorError, Consumer, Forgotten, Producer
from vllm_omni_ext.connectors.registry import connector
from vllm_omni_ext.coordinator.keys import Keys
from vllm_omni_ext.engine.exporter import ExportedSlice
from vllm_omni_ext.engine.replica_identity import ReplicaIdentity
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.wire.envelope import HiddenStatesChunkReady
from vllm_omni_ext.wire.stage_input import HiddenStatesRef

MOST_OF_ID = 256
"""A name contains the last 256 characters of a request id at most: vLLM makes the end of an id unique."""


@dataclass
class _Sent:
    """A request in an `EdgeSender`: its name in the connector, the count of its chunks, and whether all are stored."""

    name: str
    chunks: int = 0
    whole: bool = False


class EdgeSender:
    """Stores a stage's hidden states in the producer of an edge's connector, from which the next stage reads them.

    Args:
        edge: name of the edge.
        settings: connector of the edge.
    """

    def __init__(self, edge: str, settings: Connector) -> None:
        self._edge = edge
        self._settings = settings
        self._producer: Producer | None = None
        self._sent: dict[str, _Sent] = {}
        self._numbers = itertools.count()

    def send(self, req_id: str, cut: ExportedSlice) -> HiddenStatesChunkReady | None:
        """Store the next hidden states of a request; return the message that announces them to the next stage.

        The result is None if the next stage has freed the request. A connector error is reported in the message.
        """
        sent = self._sent.get(req_id)
        if sent is None:  # a request id may be reused, a producer's name may not
            sent = self._sent[req_id] = _Sent(f"{next(self._numbers)}/{req_id[-MOST_OF_ID:]}")
        source = ""
        try:
            source = self._open().address
            self._open().put(sent.name, sent.chunks, cut.hidden_states)
        except Forgotten:
            return None
        except (ConnectorError, ValueError) as error:  # no space, or no address to listen on
            return HiddenStatesChunkReady(source=source, name=sent.name, first=cut.first, count=0, failed=str(error))
        sent.chunks += 1
        sent.whole = cut.last
        return HiddenStatesChunkReady(source=source, name=sent.name, first=cut.first, count=cut.hidden_states.shape[0])

    def ended(self, req_id: str) -> None:
        """End a request; free its hidden states if not all of them were stored. Unknown ids are ignored."""
        sent = self._sent.pop(req_id, None)
        if sent is not None and not sent.whole:
            self.forget([sent.name])

    def forget(self, names: Iterable[str]) -> None:
        """Free the hidden states of requests, by their names."""
        if self._producer is not None:
            for name in names:
                self._producer.forget(name)

    def held(self) -> int | None:
        """Return how many requests have stored hidden states; None before the first request."""
        return None if self._producer is None else self._producer.stats().requests

    def _open(self) -> Producer:
        if self._producer is None:
            self._producer = self._settings.producer(self._edge)
        return self._producer


@dataclass(frozen=True)
class Lost:
    """Result of `EdgeReceiver.take` for a request whose announced hidden states cannot be read."""

    reason: str


@dataclass
class _Taken:
    """A request in an `EdgeReceiver`.

    `count` is the number of hidden states that were read from all sources. `chunks` and `seen` count the chunks and the
    hidden states that were read from the current source. The first `tried` hidden states were read or are lost.
    Unlike `count`, `tried` is equal in all workers of a replica.
    """

    ref: HiddenStatesRef
    count: int
    tried: int
    chunks: int = 0
    seen: int = 0


class EdgeReceiver:
    """Reads the hidden states of another stage from the replicas that store them.

    Args:
        edge: name of the edge.
        settings: connector of the edge.
        timeout_s: longest wait of one `take`, in seconds.
    """

    def __init__(self, edge: str, settings: Connector, timeout_s: float) -> None:
        self._edge = edge
        self._settings = settings
        self._timeout_s = timeout_s
        self._consumer: Consumer | None = None
        self._taken: dict[str, _Taken] = {}

    def announce(self, req_id: str, ref: HiddenStatesRef) -> None:
        """Record the replica that stores a request's hidden states (`ref.source`), and how many it stores.

        After a failover `ref` has another source; hidden states that were read from the old source are skipped there.
        """
        taken = self._taken.get(req_id)
        if taken is not None and (taken.ref.source, taken.ref.name) == (ref.source, ref.name):
            taken.ref = ref
            return
        if taken is not None:
            self._open().forget(taken.ref.source, taken.ref.name)
        self._taken[req_id] = _Taken(ref, 0, 0) if taken is None else _Taken(ref, taken.count, taken.tried)

    def take(
        self, req_ids: Iterable[str], *, lost_anywhere: Callable[[dict[str, str]], dict[str, str]] = lambda lost: lost
    ) -> dict[str, list[torch.Tensor] | Lost]:
        """Read the announced hidden states that these requests have not received yet, [count, width], in order.

        Announced hidden states are stored at their source, so the wait is short.

        Args:
            lost_anywhere: takes the requests whose hidden states are lost in this worker, with the reasons; returns the
                requests whose hidden states are lost in any worker of the replica. All workers call it in equal steps.
        """
        due = [(r, taken) for r in req_ids if (taken := self._taken.get(r)) and taken.tried < taken.ref.count]
        if not due:
            return {}
        found: dict[str, list[torch.Tensor] | Lost] = {}
        lost: dict[str, str] = {}
        deadline = time.monotonic() + self._timeout_s
        for req_id, taken in due:
            taken.tried = taken.ref.count
            try:
                found[req_id] = self._take(taken, deadline)
            except ConnectorError as error:
                lost[req_id] = str(error)
        return found | {req_id: Lost(reason) for req_id, reason in lost_anywhere(lost).items()}

    def forget(self, req_id: str) -> None:
        """End a request: free its hidden states here and at their source. Unknown ids are ignored."""
        taken = self._taken.pop(req_id, None)
        if taken is not None:
            self._open().forget(taken.ref.source, taken.ref.name)

    def held(self) -> int | None:
        """Return how many requests receive hidden states; None before the first request."""
        return None if self._consumer is None else len(self._taken)

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._taken

    def _take(self, taken: _Taken, deadline: float) -> list[torch.Tensor]:
        pieces = []
        while taken.count < taken.ref.count:
            left = max(0.0, deadline - time.monotonic())
            chunk = self._open().get(taken.ref.source, taken.ref.name, taken.chunks, left)
            taken.chunks += 1
            taken.seen += chunk.shape[0]
            if taken.seen > taken.count:
                pieces.append(chunk[chunk.shape[0] - (taken.seen - taken.count) :])
                taken.count = taken.seen
        return pieces

    def _open(self) -> Consumer:
        if self._consumer is None:
            self._consumer = self._settings.consumer(self._edge)
        return self._consumer


def edge_sender(additional: Mapping[str, Any], edge: str = "") -> EdgeSender:
    """Return the sender of a stage's outgoing edge.

    Args:
        additional: vLLM's `additional_config` of the stage.
        edge: name of the edge; "": the stage's only outgoing edge.

    Raises:
        ConfigError: the stage has no such edge, or the edge's connector cannot be used here.
    """
    name, config = _edge(additional, OUTGOING, edge)
    return EdgeSender(name, connector(config))


def edge_receiver(additional: Mapping[str, Any], edge: str = "") -> EdgeReceiver:
    """Return the receiver of a stage's incoming edge; arguments and errors are those of `edge_sender`."""
    name, config = _edge(additional, INCOMING, edge)
    return EdgeReceiver(name, connector(config), config.timeout_s)


def _edge(additional: Mapping[str, Any], key: str, edge: str) -> tuple[str, ConnectorConfig]:
    edges = additional.get(key, {})
    names = [edge] if edge else list(edges)
    if len(names) != 1 or names[0] not in edges:
        available = ", ".join(edges) or "none"
        raise ConfigError(f"edges: {key} hidden states go over {available}; its worker needs {edge or 'one edge'}")
    identity = ReplicaIdentity.read()
    # Default host: the replicas of a headless node listen on the address under which the node is reachable.
    here = {"host": identity.host} if identity is not None and identity.host else {}
    keys = None if identity is None else Keys.read(identity.secret_file)
    own: dict[str, Any] = {} if keys is None else {"listening": keys.listening, "connecting": keys.connecting}
    own["ports"] = None if identity is None else identity.ports
    return names[0], replace(msgspec.convert({**here, **edges[names[0]]}, ConnectorConfig), **own)
