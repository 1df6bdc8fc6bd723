"""What processes started inside a block inherit: environment, threads, garbage collector, folder of temporary files."""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
from collections.abc import Iterator, Mapping

import torch

from vllm_omni_ext.memory import trim


@contextlib.contextmanager
def compute_threads(count: int) -> Iterator[None]:
    """Let processes forked inside the block compute with `count` threads.

    Set in the parent: a child reads OMP_NUM_THREADS too late. With 1, OpenMP starts no team; where the parent has had
    one, a child that wants one waits for threads that it does not have, for ever.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def frozen_heap(*, keep: bool) -> Iterator[None]:
    """Keep the garbage collector of processes forked inside the block off what they share with this one.

    It writes into every object it looks at, and each page written to is copied: hundreds of MB in every process.

    Args:
        keep: keep it off in this process too, for good.
    """
    gc.collect()
    trim()
    gc.freeze()
    try:
        yield
    finally:
        if not keep:
            gc.unfreeze()


@contextlib.contextmanager
def temporary_files_in(folder: str) -> Iterator[None]:
    """Let replicas started inside the block put their temporary files into `folder`."""
    before, tempfile.tempdir = tempfile.tempdir, folder
    try:
        with environment({"TMPDIR": folder}, defaults={}):
            yield
    finally:
        tempfile.tempdir = before


@contextlib.contextmanager
def environment(values: Mapping[str, str], *, defaults: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for what is started inside the block; `defaults` give way to what is set already."""
    before = dict(os.environ)
    os.environ.update({**defaults, **before, **values})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
