"""Stores exported hidden states, i.e. those for another stage, in its own thread after the step that computed them.

The thread waits for the copy from the device, keeps the hidden states of prompt blocks for later prompts
(`kept_exports`), and puts the hidden states into the connector (`edges.EdgeSender`). Only this thread uses the sender
and the kept hidden states. The step's output is returned after its hidden states are stored, so a message never
announces hidden states that cannot be read.
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
    """Hidden states that a request exports from kept blocks (`kept_exports`), instead of computing them.

    Attributes:
        first: index of the first hidden state that is exported now, among all that the request exports. Earlier ones
            were exported before.
        slots: slots of the kept blocks, in prompt order. Their first row is the request's hidden state 0.
        last: the request exports no hidden states after these.
    """

    first: int
    slots: Sequence[int]
    last: bool


@dataclass(frozen=True)
class StepExports:
    """The work that one step gives to the thread of `ExportQueue`. The thread does it in the order of the attributes.

    Attributes:
        ended: ids of requests that have ended.
        orphaned: names in the connector of hidden states that are freed, since no stage will receive them.
        restored: by request id, hidden states that are exported from kept blocks.
        computed: by request id, exported hidden states that the step has computed.
        keep: by request id, (rows of `computed`, slot) for each block in which hidden states are kept.
        free: slots of kept blocks that are freed.
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
    """Stores the exported hidden states of all steps, in step order, in one thread.

    `worker.HiddenStatesExportWorker` owns one queue. The thread starts with the first work.

    Args:
        sender: sender of the stage's outgoing edge.
        copies: copies hidden states from the worker's device to the host.
    """

    def __init__(self, sender: EdgeSender, copies: HostCopies) -> None:
        self._sender = sender
        self._copies = copies
        self._kept = KeptHiddenStates()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="omni-export")
        self._steps: list[Future[dict[str, torch.Tensor]]] = []

    def submit(self, step: StepExports) -> None:
        """Queue the work of a step, and start to copy its computed hidden states to the host. Never waits."""
        if step:
            copies = {req_id: self._copies.begin(each.hidden_states) for req_id, each in step.computed.items()}
            self._steps.append(self._thread.submit(self._store, step, copies))

    def take(self) -> Callable[[], dict[str, torch.Tensor]] | None:
        """Return a function that waits for the work since the last call; None if no work was queued since then.

        The function returns, by request id, the packed `HiddenStatesChunkReady` (a uint8 tensor) that announces the
        request's new hidden states.
        """
        steps, self._steps = self._steps, []
        if not steps:
            return None
        return lambda: {req_id: message for step in steps for req_id, message in step.result().items()}

    def forget(self, names: Sequence[str]) -> None:
        """Wait for the queued work, then free stored hidden states, given their names in the connector."""
        self._call(lambda: self._sender.forget(names))

    def held(self) -> int | None:
        """Wait for the queued work; return the number of requests with stored hidden states, None before any export."""
        return self._call(self._sender.held)

    def kept(self) -> int:
        """Wait for the queued work; return the number of prompt blocks whose hidden states are kept."""
        return self._call(lambda: len(self._kept))

    def close(self) -> None:
        """Wait for the queued work, and end the thread."""
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
        """Return (exported hidden states of a request in host memory, whether `copy.free` frees their memory).

        The rows that `step.keep` names are copied into their slots.
        """
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
