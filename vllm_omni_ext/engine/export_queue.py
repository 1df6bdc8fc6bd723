"""Stores exported hidden states in a thread of its own, after the step that has computed them.

The thread waits for the copy from the device, keeps prompt blocks for later prompts, and puts the hidden states into
the connector. Only this thread uses the sender and the kept hidden states. The step's result is complete when its
hidden states are stored, so a message never announces hidden states that cannot be read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from vllm_omni_ext.engine.edges import EdgeSender
from vllm_omni_ext.engine.exporter import ExportedSlice
from vllm_omni_ext.engine.host_copies import HostCopies, HostCopy
from vllm_omni_ext.engine.kept_exports import KeptHiddenStates
from vllm_omni_ext.wire.envelope import pack

T = TypeVar("T")


@dataclass(frozen=True)
class Restored:
    """Exported hidden states of one request that are in kept blocks.

    Attributes:
        first: index of the first one that was not exported before, among all that the request exports.
        slots: slots of the kept blocks, whose hidden states begin with number 0.
        last: the request exports no further hidden states.
    """

    first: int
    slots: Sequence[int]
    last: bool


@dataclass(frozen=True)
class StepExports:
    """The work of one step, in the order in which it is done.

    Attributes:
        ended: requests that have ended.
        orphaned: names of hidden states that no stage will receive.
        restored: hidden states in kept blocks, by request.
        computed: hidden states that the step has computed, by request.
        keep: rows of `computed` that are kept, with their slots, by request.
        free: slots of kept blocks that are freed after all.
    """

    ended: Sequence[str] = ()
    orphaned: Sequence[str] = ()
    restored: Mapping[str, Restored] = field(default_factory=dict)
    computed: Mapping[str, ExportedSlice] = field(default_factory=dict)
    keep: Mapping[str, Sequence[tuple[slice, int]]] = field(default_factory=dict)
    free: Sequence[int] = ()

    def __bool__(self) -> bool:
        return bool(self.ended or self.orphaned or self.restored or self.computed or self.free)


class ExportQueue:
    """Stores the hidden states of steps, in their order, in one thread, which starts with the first work.

    Args:
        sender: sender of the edge.
        copies: copies from the worker's device.
    """

    def __init__(self, sender: EdgeSender, copies: HostCopies) -> None:
        self._sender = sender
        self._copies = copies
        self._kept = KeptHiddenStates()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="omni-export")
        self._steps: list[Future[dict[str, torch.Tensor]]] = []

    def submit(self, step: StepExports) -> None:
        """Queue the work of a step, and the copies of its hidden states. Never waits."""
        if step:
            copies = {req_id: self._copies.begin(each.hidden_states) for req_id, each in step.computed.items()}
            self._steps.append(self._thread.submit(self._store, step, copies))

    def take(self) -> Callable[[], dict[str, torch.Tensor]] | None:
        """Return a function that waits for the work since the last call; None if there was none.

        The function returns the packed `HiddenStatesChunkReady` of each request with new hidden states.
        """
        steps, self._steps = self._steps, []
        if not steps:
            return None
        return lambda: {req_id: message for step in steps for req_id, message in step.result().items()}

    def forget(self, names: Sequence[str]) -> None:
        """Free hidden states, by their names, after the work that is queued; wait for it."""
        self._call(lambda: self._sender.forget(names))

    def held(self) -> int | None:
        """Wait for the queued work; return the number of requests with stored hidden states, None before the first."""
        return self._call(self._sender.held)

    def kept(self) -> int:
        """Return the number of kept blocks after the work that is queued; wait for it."""
        return self._call(lambda: len(self._kept))

    def close(self) -> None:
        """End the thread after the work that is queued."""
        self._thread.shutdown()

    def _call(self, function: Callable[[], T]) -> T:
        return self._thread.submit(function).result()

    @torch.inference_mode()
    def _store(self, step: StepExports, copies: Mapping[str, HostCopy]) -> dict[str, torch.Tensor]:
        for req_id in step.ended:
            self._sender.ended(req_id)
        self._sender.forget(step.orphaned)
        messages = {}
        for req_id in dict.fromkeys((*step.restored, *step.computed)):
            copy = copies.get(req_id)
            exported, borrowed = self._joined(step, req_id, copy)
            message = self._sender.send(req_id, exported, borrowed=borrowed)
            if copy is not None:
                copy.free()
            if message is not None:
                messages[req_id] = pack(message)
        self._kept.free(step.free)
        return messages

    def _joined(self, step: StepExports, req_id: str, copy: HostCopy | None) -> tuple[ExportedSlice, bool]:
        """Return the exported hidden states of a request in host memory, and whether `copy.free` frees that memory."""
        restored, computed = step.restored.get(req_id), step.computed.get(req_id)
        kept = None if restored is None else self._kept.restore(restored.slots)[restored.first :]
        if computed is None or copy is None:
            assert restored is not None and kept is not None
            return ExportedSlice(restored.first, kept, restored.last), False
        rows = copy.tensor()
        for which, slot in step.keep.get(req_id, ()):
            self._kept.keep(slot, rows[which])
        if restored is None or kept is None:
            return ExportedSlice(computed.first, rows, computed.last), copy.page_locked
        return ExportedSlice(restored.first, torch.cat([kept, rows]), computed.last), False
