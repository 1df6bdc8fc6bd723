"""The ends of an edge inside a stage's worker. Neither is opened before a request needs it: text never does."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch

from vllm_omni_ext.config.schema import SENDS, TAKES
from vllm_omni_ext.connectors.base import (
    ChunkKey,
    Connector,
    ConnectorConfig,
    ConnectorError,
    Consumer,
    Forgotten,
    Producer,
)
from vllm_omni_ext.connectors.registry import connector
from vllm_omni_ext.coordinator.keys import Keys
from vllm_omni_ext.engine.exporter import Cut
from vllm_omni_ext.wire.enrollment import Enrollment
from vllm_omni_ext.wire.rows import Given, Notice

MOST_OF_ID = 256
"""Characters of a request's id that are part of its name: the last ones, where vLLM makes it unique."""


@dataclass
class _Sent:
    """One request in a producer."""

    name: str
    chunks: int = 0
    whole: bool = False


class Sender:
    """Puts a stage's rows where the next stage takes them.

    Args:
        edge: its name.
        made: how it is connected.
    """

    def __init__(self, edge: str, made: Connector) -> None:
        self._edge = edge
        self._made = made
        self._producer: Producer | None = None
        self._sent: dict[str, _Sent] = {}
        self._numbers = itertools.count()

    @property
    def opened(self) -> bool:
        """Whether there is a producer."""
        return self._producer is not None

    def send(self, req_id: str, cut: Cut) -> Notice | None:
        """Put the next rows of a request; None if nobody wants them any more. What goes wrong is in the notice."""
        sent = self._sent.get(req_id)
        if sent is None:  # an id may come again, but a producer takes a name once
            sent = self._sent[req_id] = _Sent(f"{next(self._numbers)}/{req_id[-MOST_OF_ID:]}")
        source = ""
        try:
            source = self._open().address
            self._open().put(ChunkKey(sent.name, self._edge, sent.chunks), [cut.rows], last=cut.last)
        except Forgotten:
            return None
        except (ConnectorError, ValueError) as error:  # no room, or no place to listen: of this request alone
            return Notice(source=source, name=sent.name, first=cut.first, count=0, failed=str(error))
        sent.chunks += 1
        sent.whole = cut.last
        return Notice(source=source, name=sent.name, first=cut.first, count=cut.rows.shape[0])

    def ended(self, req_id: str) -> None:
        """The stage has ended a request. Its rows stay, unless some are missing; unknown ids are ignored."""
        sent = self._sent.pop(req_id, None)
        if sent is not None and not sent.whole:
            self.forget([sent.name])

    def forget(self, names: Iterable[str]) -> None:
        """Free the rows of requests, by their names."""
        if self._producer is not None:
            for name in names:
                self._producer.forget(name)

    def held(self) -> int:
        """Requests whose rows are kept."""
        return 0 if self._producer is None else self._producer.stats().requests

    def _open(self) -> Producer:
        if self._producer is None:
            self._producer = self._made.producer(self._edge)
        return self._producer


@dataclass(frozen=True)
class Lost:
    """Rows that were promised will not come."""

    reason: str


@dataclass
class _Taken:
    """One request in a consumer: `rows` were taken in all, `seen` of them or others from this source."""

    given: Given
    rows: int
    chunks: int = 0
    seen: int = 0


class Taker:
    """Takes a stage's rows from wherever they are.

    Args:
        edge: its name.
        made: how it is connected.
        deadline_s: how long one `take` waits at most.
    """

    def __init__(self, edge: str, made: Connector, deadline_s: float) -> None:
        self._edge = edge
        self._made = made
        self._deadline_s = deadline_s
        self._consumer: Consumer | None = None
        self._taken: dict[str, _Taken] = {}

    @property
    def opened(self) -> bool:
        """Whether there is a consumer."""
        return self._consumer is not None

    def given(self, req_id: str, given: Given) -> None:
        """So many rows of a request can be taken from now on; what was taken elsewhere before still counts."""
        consumer = self._open()
        known = self._taken.get(req_id)
        if known is not None and (known.given.source, known.given.name) == (given.source, given.name):
            known.given = given
            return
        if known is not None:
            consumer.forget(known.given.name)
        self._taken[req_id] = _Taken(given, 0 if known is None else known.rows)
        consumer.open(given.name, given.source)

    def take(self, req_ids: Iterable[str]) -> dict[str, list[torch.Tensor] | Lost]:
        """New rows of these requests, [count, width] each, in order. They have been put already: the wait is short."""
        found: dict[str, list[torch.Tensor] | Lost] = {}
        deadline = time.monotonic() + self._deadline_s
        for req_id in req_ids:
            known = self._taken.get(req_id)
            if known is None or known.rows >= known.given.count:
                continue
            try:
                found[req_id] = self._take(known, deadline)
            except ConnectorError as error:
                found[req_id] = Lost(str(error))
        return found

    def forget(self, req_id: str) -> None:
        """A request has ended: its rows are freed here and where they come from. Unknown ids are ignored."""
        known = self._taken.pop(req_id, None)
        if known is not None:
            self._open().forget(known.given.name)

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._taken

    def __len__(self) -> int:
        return len(self._taken)

    def _take(self, known: _Taken, deadline: float) -> list[torch.Tensor]:
        pieces = []
        while known.rows < known.given.count:
            key = ChunkKey(known.given.name, self._edge, known.chunks)
            rows = self._open().get(key, max(0.0, deadline - time.monotonic())).parts[0]
            known.chunks += 1
            known.seen += rows.shape[0]
            if known.seen > known.rows:
                pieces.append(rows[rows.shape[0] - (known.seen - known.rows) :])
                known.rows = known.seen
        return pieces

    def _open(self) -> Consumer:
        if self._consumer is None:
            self._consumer = self._made.consumer(self._edge)
        return self._consumer


def sender_of(additional: Mapping[str, Any]) -> Sender:
    """The writing end of the one edge that leaves a stage, from vLLM's `additional_config`.

    Raises:
        ConfigError: its connector cannot be used here.
    """
    ((edge, config),) = _edges(additional, SENDS).items()
    return Sender(edge, connector(config))


def taker_of(additional: Mapping[str, Any]) -> Taker:
    """The reading end of the one edge that leads to a stage; as `sender_of`."""
    ((edge, config),) = _edges(additional, TAKES).items()
    return Taker(edge, connector(config), config.deadline_s)


def _edges(additional: Mapping[str, Any], key: str) -> dict[str, ConnectorConfig]:
    enrolled = Enrollment.read()
    # Where nothing is said, it depends on the process: a crew's replicas listen where their crew is reached.
    here = {"host": enrolled.host} if enrolled is not None and enrolled.host else {}
    keys = None if enrolled is None else Keys.read(enrolled.secret_file)
    secret: dict[str, Any] = {} if keys is None else {"listening": keys.listening, "connecting": keys.connecting}
    return {
        edge: replace(msgspec.convert({**here, **plain}, ConnectorConfig), **secret)
        for edge, plain in additional[key].items()
    }
