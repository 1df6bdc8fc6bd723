"""Keeps exported hidden states of full prompt blocks, so that a later prompt with the same prefix computes neither
its KV cache nor its hidden states again.

A turn of a conversation begins with all earlier turns, and vLLM's prefix cache has the KV cache of their blocks. The
next stage needs the hidden states of their multimodal positions too. The scheduler (`KeptExports`) decides which blocks
are kept, under the hash of vLLM's prefix cache, and shortens a prefix cache hit to the blocks whose hidden states are
kept. It sends its decisions to the worker with each step (`StepChanges`). The worker (`KeptHiddenStates`) stores the
hidden states of each block in a numbered slot.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from vllm_omni_ext.config.schema import OUTGOING
from vllm_omni_ext.connectors.base import ConnectorConfig
from vllm_omni_ext.engine.input_provider import scheduled_starts
from vllm_omni_ext.wire.stage_input import export_ranges, exported_before

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Positions [start, stop), ascending."""

BlockKey: TypeAlias = tuple[Hashable, Ranges]
"""Hash of a block in vLLM's prefix cache, and the block's exported positions relative to its first position."""

Part: TypeAlias = tuple[int, int, int]
"""(start, stop, slot): one step computes the positions [start, stop) of one block of a request, and the worker stores
their hidden states in the slot."""


@dataclass
class StepChanges:
    """Operations on kept hidden states that the worker does in a step, in this order.

    Attributes:
        restore: by request id, (first position that the step computes, slots of the kept blocks before that position).
        keep: by request id, the positions whose hidden states are stored, and their slots.
        free: slots to free. A slot number is never used again.
    """

    restore: dict[str, tuple[int, list[int]]] = field(default_factory=dict)
    keep: dict[str, list[Part]] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)


class RequestBlocks:
    """The full blocks of one prompt that have exported positions (positions whose hidden states another stage gets).

    Args:
        ranges: exported positions.
        hashes: hashes of the prompt's full blocks.
        size: tokens in a block.

    Attributes:
        keys: keys of the blocks, by block index.
        end: position after the last block with exported positions; 0 if there is none.
        computed: positions before this one have been computed for this request.
        begun: slots of partly computed blocks, by block index.
    """

    def __init__(self, ranges: Ranges, hashes: Sequence[Hashable], size: int) -> None:
        self.keys: dict[int, BlockKey] = {}
        for index, name in enumerate(hashes):
            first, end = index * size, (index + 1) * size
            inside = tuple((max(a, first) - first, min(b, end) - first) for a, b in ranges if a < end and b > first)
            if inside:
                self.keys[index] = name, inside
        self.end = (max(self.keys) + 1) * size if self.keys else 0
        self.computed = 0
        self.begun: dict[int, int] = {}


class KeptBlocks:
    """Assigns slots to the blocks whose hidden states are kept, and frees the least recently used blocks. Pure.

    A slot is the number under which the worker stores the hidden states of a block (`KeptHiddenStates`).

    Args:
        capacity: largest number of hidden states that are kept.
        size: tokens in a block.
    """

    def __init__(self, capacity: int, size: int) -> None:
        self._capacity = capacity
        self._size = size
        self._slots: OrderedDict[BlockKey, int] = OrderedDict()
        self._rows = 0
        self._next = 0
        self._freed: list[int] = []

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def rows(self) -> int:
        """Number of hidden states in all slots, including those of partly computed blocks."""
        return self._rows

    def covered(self, blocks: RequestBlocks, hit: int) -> int:
        """Return to how many tokens a prefix cache hit of `hit` tokens is shortened.

        Exported hidden states of all these tokens are kept, so none of the tokens must be computed.
        """
        missing = (index for index, key in blocks.keys.items() if index * self._size < hit and key not in self._slots)
        return min(hit, next(missing, hit) * self._size)

    def restore(self, blocks: RequestBlocks, start: int) -> list[int]:
        """Return the slots of the blocks before position `start`, and mark these blocks as most recently used.

        The worker exports the hidden states in these slots instead of computing them.
        """
        keys = [key for index, key in blocks.keys.items() if index * self._size < start]
        for key in keys:
            self._slots.move_to_end(key)
        return [self._slots[key] for key in keys]

    def compute(self, blocks: RequestBlocks, start: int, stop: int) -> list[Part]:
        """Record that a step computes positions [start, stop) of a request; return those that the worker stores.

        Positions that were computed before for the same request are not exported, and so not stored, a second time.
        """
        start, blocks.computed = max(start, blocks.computed), max(stop, blocks.computed)
        parts = []
        for index in range(start // self._size, -(-stop // self._size)):
            key, first, end = blocks.keys.get(index), index * self._size, (index + 1) * self._size
            if key is None:
                continue
            if start <= first and key not in self._slots:
                self._begin(blocks, index, key)
            if (slot := blocks.begun.get(index)) is None:
                continue
            parts.append((max(start, first), min(stop, end), slot))
            if stop >= end:
                self._complete(blocks, index, key)
        return parts

    def _begin(self, blocks: RequestBlocks, index: int, key: BlockKey) -> None:
        rows = _count(key)
        while self._rows + rows > self._capacity and self._slots:
            self._free(*self._slots.popitem(last=False))
        if self._rows + rows <= self._capacity:
            blocks.begun[index], self._next = self._next, self._next + 1
            self._rows += rows

    def _complete(self, blocks: RequestBlocks, index: int, key: BlockKey) -> None:
        slot = blocks.begun.pop(index)
        if key in self._slots:  # another request computed the same block at the same time
            self._free(key, slot)
        else:
            self._slots[key] = slot

    def close(self, blocks: RequestBlocks) -> None:
        """Free the slots of the partly computed blocks of a request, which are not kept then."""
        while blocks.begun:
            index, slot = blocks.begun.popitem()
            self._free(blocks.keys[index], slot)

    def clear(self) -> None:
        """Free the slots of all completely computed blocks."""
        while self._slots:
            self._free(*self._slots.popitem())

    def take_freed(self) -> list[int]:
        """Return the slots that were freed since the last call."""
        freed, self._freed = self._freed, []
        return freed

    def _free(self, key: BlockKey, slot: int) -> None:
        self._rows -= _count(key)
        self._freed.append(slot)


def _count(key: BlockKey) -> int:
    return sum(stop - start for start, stop in key[1])


class KeptExports(Scheduler):
    """Scheduler that shortens the prefix cache hit of an exporting request to blocks whose hidden states are kept."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        model = self.vllm_config.model_config
        edges = self.vllm_config.additional_config.get(OUTGOING, {}).values()
        capacity = max((each.get("kept_bytes", ConnectorConfig.kept_bytes) for each in edges), default=0)
        row = model.get_hidden_size() * torch.empty(0, dtype=model.dtype).element_size()
        usable = self.cache_config.enable_prefix_caching and self.hash_block_size == self.block_size
        self._kept = KeptBlocks(capacity // row if usable else 0, self.block_size)
        self._exports: dict[str, RequestBlocks] = {}

    def add_request(self, request: Request) -> None:
        """Add a request, and record the blocks of its prompt whose hidden states are exported here."""
        extra = None if request.sampling_params is None else request.sampling_params.extra_args
        ranges = tuple(sorted(export_ranges(extra)))
        if ranges and exported_before(extra) < request.num_prompt_tokens:
            hashes = request.block_hashes[: request.num_prompt_tokens // self.block_size]
            self._exports[request.request_id] = RequestBlocks(ranges, hashes, self.block_size)
        super().add_request(request)

    def _get_local_prefix_cache_hit(self, request: Request, *limits: Any) -> Any:
        blocks = self._exports.get(request.request_id)
        if blocks is None or _needs_prompt_logits(request):
            return super()._get_local_prefix_cache_hit(request, *limits)
        # The flag is set for such requests, so that no connector loads KV cache without hidden states. The local prefix
        # cache is read.
        skips, request.skip_reading_prefix_cache = request.skip_reading_prefix_cache, False
        try:
            found, hit, boundary, diverged = super()._get_local_prefix_cache_hit(request, *limits)
        finally:
            request.skip_reading_prefix_cache = skips
        covered = self._kept.covered(blocks, hit)
        if covered < hit:
            found = self.kv_cache_manager.truncate_computed_blocks(found, covered)
        return found, covered, boundary, diverged

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule one step; the attribute `kept` of the output is the `StepChanges` for the worker."""
        output = super().schedule(throttle_prefills)
        changes = StepChanges()
        computing = {req_id: each for req_id, each in self._exports.items() if each.computed < each.end}
        if computing:
            self._plan(output, computing, changes)
        changes.free = self._kept.take_freed()
        output.kept = changes  # type: ignore[attr-defined]
        return output

    def _plan(self, output: SchedulerOutput, computing: Mapping[str, RequestBlocks], changes: StepChanges) -> None:
        starts = scheduled_starts(output)
        due = [(r, each, starts[r]) for r, each in computing.items() if output.num_scheduled_tokens.get(r)]
        for req_id, blocks, start in due:  # before `compute` frees blocks
            if start > blocks.computed and (slots := self._kept.restore(blocks, start)):
                changes.restore[req_id] = start, slots
        for req_id, blocks, start in due:
            parts = self._kept.compute(blocks, start, start + output.num_scheduled_tokens[req_id])
            if parts:
                changes.keep[req_id] = parts

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Reset the prefix cache, and free the kept hidden states, also those of partly computed blocks.

        The other hidden states of such a block are computed after the reset, e.g. with other weights.
        """
        self._kept.clear()
        for blocks in self._exports.values():
            self._kept.close(blocks)
        return bool(super().reset_prefix_cache(*args, **kwargs))

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if (blocks := self._exports.pop(request.request_id, None)) is not None:
            self._kept.close(blocks)
        return super()._free_request(request, *args, **kwargs)


def _needs_prompt_logits(request: Request) -> bool:
    """Return whether every prompt position must be computed, for logprobs of the prompt."""
    params = request.sampling_params
    return params is not None and (params.prompt_logprobs, params.prompt_logprob_token_ids) != (None, None)


class KeptHiddenStates:
    """Stores kept hidden states in the worker's host memory: tensors [count, width] by slot, in order of positions."""

    def __init__(self) -> None:
        self._pieces: dict[int, list[torch.Tensor]] = {}

    def __len__(self) -> int:
        return len(self._pieces)

    def restore(self, slots: Iterable[int]) -> torch.Tensor:
        """Return the hidden states [count, width] of these slots."""
        return torch.cat([piece for slot in slots for piece in self._pieces[slot]])

    def keep(self, slot: int, rows: torch.Tensor) -> None:
        """Append a copy of the hidden states `rows` [n, width], which are in host memory, to a slot."""
        self._pieces.setdefault(slot, []).append(rows.clone())

    def free(self, slots: Iterable[int]) -> None:
        """Free the hidden states in these slots; unknown slots are ignored."""
        for slot in slots:
            self._pieces.pop(slot, None)
