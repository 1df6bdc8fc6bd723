"""Replaces torch's gloo process groups by groups without network connections, in engines of a single process.

vLLM makes more than a dozen process groups even for a single process. Each gloo group of torch listens on a TCP port,
keeps every incoming connection open for ever, and has a thread that polls its socket every 10 ms.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C._distributed_c10d import FakeProcessGroup

GLOO = "gloo"

BACKEND = "omni_alone"
"""A torch backend for groups with one member: its collectives return without communication."""


@contextmanager
def alone() -> Iterator[None]:
    """Replace torch's functions that create process groups, inside the `with` block.

    `worker.StageWorker` initializes its device inside the block. A group of one process gets `BACKEND` in place of
    gloo. If the world group has `BACKEND` (on CPU), each new group is the world group.
    """
    distributed = torch.distributed
    start, make = distributed.init_process_group, distributed.new_group

    def init_process_group(backend: Any = None, *args: Any, world_size: int = -1, **kwargs: Any) -> None:
        start(_instead_of(backend, world_size), *args, world_size=world_size, **kwargs)

    def new_group(*args: Any, **kwargs: Any) -> Any:
        count = distributed.get_world_size()
        if count == 1 and distributed.get_backend() == BACKEND:
            return distributed.group.WORLD
        if "backend" in kwargs:
            kwargs["backend"] = _instead_of(kwargs["backend"], count)
        return make(*args, **kwargs)

    _register()
    distributed.init_process_group, distributed.new_group = init_process_group, new_group
    try:
        yield
    finally:
        distributed.init_process_group, distributed.new_group = start, make


def _instead_of(backend: Any, world_size: int) -> Any:
    return BACKEND if backend == GLOO and world_size == 1 else backend


def _register() -> None:
    if not torch.distributed.is_backend_available(BACKEND):
        torch.distributed.Backend.register_backend(BACKEND, _make, extended_api=True, devices=["cpu"])


def _make(common: Any, options: Any) -> Any:
    """Return a group whose collectives leave every tensor as it is, which is correct for a single member."""
    if common.group_size != 1:
        raise ValueError(f"{BACKEND}: a group of one process, not of {common.group_size}")
    make: Any = FakeProcessGroup._create_internal  # torch's stub of the method lacks the options
    return make(common.group_rank, common.group_size, options)
