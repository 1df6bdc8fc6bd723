"""Sender of hidden states over an edge (a connection from one stage to another), and factories of sender and receiver.

Either end opens the edge's connector (`connectors.base`) when the first request exports or receives hidden states.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from vllm_omni_ext.config.schema import INCOMING, OUTGOING
from vllm_omni_ext.connectors.base import Connector, ConnectorConfig, ConnectorError, Forgotten, Producer
from vllm_omni_ext.connectors.registry import connector
from vllm_omni_ext.coordinator.keys import Keys
from vllm_omni_ext.engine.edge_receiver import EdgeReceiver
from vllm_omni_ext.engine.exporter import ExportedSlice
from vllm_omni_ext.engine.replica_identity import ReplicaIdentity
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.wire.envelope import HiddenStatesChunkReady

MOST_OF_ID = 256
"""Most characters of a request id that a name in the connector contains: the last ones, as vLLM makes the end of an id
unique."""


@dataclass
class _Sent:
    """A request in an `EdgeSender`.

    Attributes:
        name: its name in the connector.
        start: index of its first hidden state here, among all that are exported for it.
        chunks: number of its chunks.
        whole: all its hidden states are stored.
    """

    name: str
    start: int
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

    def send(self, req_id: str, cut: ExportedSlice, *, borrowed: bool = False) -> HiddenStatesChunkReady | None:
        """Store the next hidden states of a request; return the message that announces them to the next stage.

        The result is None if the next stage has freed the request's hidden states. After a connector error, the message
        has the error as `failed`.

        Args:
            cut: the hidden states, in prompt order and without gaps after those of earlier calls.
            borrowed: the caller overwrites the memory of the hidden states after this call.
        """
        sent = self._sent.get(req_id)
        if sent is None:  # a request id may be reused, a producer's name may not
            sent = self._sent[req_id] = _Sent(f"{next(self._numbers)}/{req_id[-MOST_OF_ID:]}", cut.first)
        source, count, failed = "", cut.hidden_states.shape[0], ""
        try:
            source = self._open().address
            rows = cut.hidden_states.clone() if borrowed and self._open().keeps_tensors else cut.hidden_states
            self._open().put(sent.name, sent.chunks, rows)
        except Forgotten:
            return None
        except (ConnectorError, ValueError) as error:  # no space, or no address to listen on
            count, failed = 0, str(error)
        else:
            sent.chunks += 1
            sent.whole = cut.last
        return HiddenStatesChunkReady(
            source=source, name=sent.name, first=cut.first, count=count, failed=failed, start=sent.start
        )

    def ended(self, req_id: str) -> None:
        """Remove a request that has ended in this stage. Unknown ids are ignored.

        If not all of its hidden states were stored, the stored ones are freed. Otherwise they stay for the next stage.
        """
        sent = self._sent.pop(req_id, None)
        if sent is not None and not sent.whole:
            self.forget([sent.name])

    def forget(self, names: Iterable[str]) -> None:
        """Free stored hidden states, given their names in the connector (`HiddenStatesChunkReady.name`)."""
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


def edge_receiver(additional: Mapping[str, Any], edge: str = "", *, wake: Callable[[], None]) -> EdgeReceiver:
    """Return the receiver of a stage's incoming edge; other arguments and errors are those of `edge_sender`.

    Args:
        wake: wakes the engine; called in threads of the receiver.
    """
    name, config = _edge(additional, INCOMING, edge)
    return EdgeReceiver(name, connector(config), config.timeout_s, wake)


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
