"""State that processes started inside a block inherit: environment, threads, garbage collector, temporary folder."""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
from collections.abc import Iterator, Mapping

import torch

from vllm_omni_ext.memory import malloc_trim


@contextlib.contextmanager
def compute_threads(count: int) -> Iterator[None]:
    """Let processes forked inside the block compute with `count` threads.

    Set in the parent, because a child reads OMP_NUM_THREADS too late. With 1, OpenMP starts no team. If the parent has
    had a team, a child that starts one waits for ever for threads that it does not have.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def frozen_heap(*, keep: bool) -> Iterator[None]:
    """Keep the garbage collector of processes forked inside the block off the objects shared with this process.

    The collector writes into every object it visits, and the kernel copies each page written to: hundreds of MB per
    process.

    Args:
        keep: freeze the objects for good, in this process too.
    """
    gc.collect()
    malloc_trim()
    gc.freeze()
    try:
        yield
    finally:
        if not keep:
            gc.unfreeze()


@contextlib.contextmanager
def temporary_files_in(folder: str) -> Iterator[None]:
    """Make replicas started inside the block put their temporary files into `folder`."""
    before, tempfile.tempdir = tempfile.tempdir, folder
    try:
        with environment({"TMPDIR": folder}, defaults={}):
            yield
    finally:
        tempfile.tempdir = before


@contextlib.contextmanager
def environment(values: Mapping[str, str], *, defaults: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for processes started inside the block; `defaults` do not override set variables."""
    before = dict(os.environ)
    os.environ.update({**defaults, **before, **values})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
