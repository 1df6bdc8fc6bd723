"""Records the replica of the last request of a session or with a media item. Pure, of bounded size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b

from vllm_omni_ext.ids import ReplicaId

REMEMBERED = 8192
"""Sessions and media items that one stage's pool keeps; the least recently used are dropped first."""

_DIGEST_BYTES = 16
"""Keys are stored as digests: clients choose the text, which may be long."""


class Affinity:
    """Maps sessions and media items to replicas.

    Args:
        limit: most keys that are kept.
    """

    def __init__(self, limit: int = REMEMBERED) -> None:
        self._limit = limit
        self._places: OrderedDict[bytes, ReplicaId] = OrderedDict()

    def __len__(self) -> int:
        return len(self._places)

    def places(self, keys: Sequence[bytes]) -> Iterator[ReplicaId]:
        """Replicas to which requests with these keys were sent, in the order of the keys."""
        return (self._places[key] for key in keys if key in self._places)

    def remember(self, keys: Sequence[bytes], replica: ReplicaId) -> None:
        """Map these keys to `replica` from now on."""
        for key in keys:
            self._places[key] = replica
            self._places.move_to_end(key)
        while len(self._places) > self._limit:
            self._places.popitem(last=False)

    def forget(self, replica: ReplicaId) -> None:
        """Drop all keys of a replica that is gone: its caches are lost."""
        for key in [key for key, place in self._places.items() if place == replica]:
            del self._places[key]


def keys(session: str | None, media: Sequence[str]) -> tuple[bytes, ...]:
    """Return the keys of a request in order of preference: its session, then its media items."""
    named = [] if session is None else [("session", session)]
    return tuple(_digest(kind, text) for kind, text in (*named, *(("media", item) for item in media)))


def _digest(kind: str, text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES, person=kind.encode()).digest()
