"""A stand-in for CUDA graphs: repeats the operators of one call on the memory of that call, without its Python.

Errors of a graph occur here too. Numbers and shapes that Python worked out are those of the recorded call. Memory from
outside is looked up by its address; memory that has been freed since is an error, because a graph would read other
data there. Memory made inside is filled with rubbish before each repetition. Operations that a capture refuses are
refused: values that are read on the host, shapes that depend on values, and random numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

REFUSED = {
    "item",
    "is_nonzero",
    "_local_scalar_dense",
    "nonzero",
    "equal",
    "masked_select",
    "unique",
    "repeat_interleave.Tensor",
}
RANDOM = {"uniform_", "rand", "normal_", "randn", "bernoulli_", "multinomial", "random_", "randint", "exponential_"}
RUBBISH = 77


@dataclass(frozen=True)
class _Address:
    """A tensor in memory that was not made by the recorded call."""

    storage: StorageWeakRef
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    operator: str

    @classmethod
    def of(cls, tensor: Tensor, operator: str) -> _Address:
        storage = StorageWeakRef(tensor.untyped_storage())
        return cls(
            storage, tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()), operator
        )

    def tensor(self) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        assert storage is not None, f"{self.operator} reads memory of shape {self.size} that has been freed"
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self._inside: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[-1]
        if {name, f"{name}.{func._overloadname}"} & (REFUSED | RANDOM):
            raise RuntimeError(f"{name} cannot be captured")
        known = {_where(each) for each in _tensors((args, kwargs))}
        written = tree_map_only(Tensor, lambda tensor: self._note(tensor, name), (args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        made = [each for each in _tensors(result) if _where(each) not in known and _where(each) not in self._inside]
        self._inside |= {_where(each): each for each in made}
        if made or func._schema.is_mutable:
            self.calls.append((func, *written, made))
        return result

    def _note(self, tensor: Tensor, name: str) -> Tensor | _Address:
        return tensor if _where(tensor) in self._inside else _Address.of(tensor, name)


def _where(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in torch.utils._pytree.tree_leaves(tree) if isinstance(each, Tensor) and each.numel()]


class TapeRecorder:
    """Implements `engine.graphs.Recorder` on a CPU."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        """Operators in each recording, views not counted."""
        self.repeated = 0

    @torch.inference_mode()
    def record(self, body: Callable[[], None]) -> Callable[[], None]:
        with _Tape() as tape:
            body()
        self.calls.append(len(tape.calls))
        calls = tape.calls

        @torch.inference_mode()
        def replay() -> None:
            self.repeated += 1
            for *_, made in calls:
                for each in made:
                    each.fill_(RUBBISH)
            for func, args, kwargs, made in calls:
                args, kwargs = tree_map_only(_Address, _Address.tensor, (args, kwargs))
                fresh = [each for each in _tensors(func(*args, **kwargs)) if each.numel()]
                for old, new in zip(made, fresh, strict=False):
                    old.copy_(new)

        return replay
