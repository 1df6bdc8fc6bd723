"""Bytes that are no message, for sockets that listen."""

from __future__ import annotations

import random
from collections.abc import Sequence


def garbage(rng: random.Random, longest: int) -> bytes:
    """Anything at all, also longer than is allowed."""
    return rng.randbytes(rng.choice((0, 1, 2, 10, 100, 1000, longest + 1)))


def mutated(rng: random.Random, harmless: Sequence[bytes]) -> bytes:
    """A message with some bytes changed, added or cut off."""
    data = bytearray(rng.choice(harmless))
    for _ in range(rng.randint(1, 4)):
        match rng.randrange(3):
            case 0:
                data[rng.randrange(len(data))] = rng.randrange(256)
            case 1:
                del data[rng.randrange(len(data)) :]
            case _:
                data.insert(rng.randrange(len(data) + 1), rng.randrange(256))
        data = data or bytearray(b"\0")
    return bytes(data)
