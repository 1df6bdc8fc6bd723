"""Where the last request with the same session or the same media went. Pure, of bounded size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b

from vllm_omni_ext.ids import ReplicaId

REMEMBERED = 8192
"""Sessions and media items one stage's pool remembers; the least recently used are forgotten first."""

_DIGEST_BYTES = 16
"""A key is stored as a digest: clients choose the text, and it may be long."""


class Affinity:
    """Replica by session and by media item.

    Args:
        limit: how many keys are kept.
    """

    def __init__(self, limit: int = REMEMBERED) -> None:
        self._limit = limit
        self._places: OrderedDict[bytes, ReplicaId] = OrderedDict()

    def __len__(self) -> int:
        return len(self._places)

    def places(self, keys: Sequence[bytes]) -> Iterator[ReplicaId]:
        """Where requests with these keys went, in the order of the keys."""
        return (self._places[key] for key in keys if key in self._places)

    def remember(self, keys: Sequence[bytes], replica: ReplicaId) -> None:
        """Requests with these keys go to `replica` from now on."""
        for key in keys:
            self._places[key] = replica
            self._places.move_to_end(key)
        while len(self._places) > self._limit:
            self._places.popitem(last=False)

    def forget(self, replica: ReplicaId) -> None:
        """The replica is gone, and what it had cached with it."""
        for key in [key for key, place in self._places.items() if place == replica]:
            del self._places[key]


def keys(session: str | None, media: Sequence[str]) -> tuple[bytes, ...]:
    """Keys of a request, the strongest first: its session, then its media items."""
    named = [] if session is None else [("session", session)]
    return tuple(_digest(kind, text) for kind, text in (*named, *(("media", item) for item in media)))


def _digest(kind: str, text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES, person=kind.encode()).digest()
