"""Work on many items with a few resources, such as copies of the repository."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Resource = TypeVar("Resource")
Result = TypeVar("Result")


def with_each(
    work: Callable[[Item, Resource], Result], items: Sequence[Item], resources: Sequence[Resource]
) -> list[Result]:
    """Return `work(item, resource)` of each item, in threads; a resource is used by one item at a time."""
    free: queue.SimpleQueue[Resource] = queue.SimpleQueue()
    for resource in resources:
        free.put(resource)

    def one(item: Item) -> Result:
        resource = free.get()
        try:
            return work(item, resource)
        finally:
            free.put(resource)

    with ThreadPoolExecutor(len(resources)) as pool:
        return list(pool.map(one, items))
