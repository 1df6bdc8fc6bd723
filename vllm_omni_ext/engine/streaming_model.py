"""Base class of models whose input embeddings come from an `InputProvider`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

RowSource = Callable[[Sequence[str] | None], Tensor]


class StreamingInputBase:
    """The part of `engine.input_provider.StreamingInputModel` that does not depend on the model.

    A subclass is also a vLLM model (`nn.Module`). It has an attribute `input_provider`, sets `sampled_hidden` in
    `compute_logits`, and returns `input_rows(None)` from `embed_input_ids` while `in_step`.

    Attributes:
        sampled_hidden: hidden states [requests, hidden] from which the last step was sampled.
        opened: requests that the runner is about to add in this step, in order.
    """

    sampled_hidden: Tensor | None = None
    opened: Sequence[str] = ()
    _rows: RowSource | None = None

    @staticmethod
    def get_model_state_cls() -> type:
        """Return the class of the model state with which Model Runner V2 reads the input embeddings."""
        from vllm_omni_ext.engine.model_state import StreamingInputModelState

        return StreamingInputModelState

    def after_load(self) -> None:
        """Allocate permanent buffers; there are none here."""

    def begin_step(self, *, rows: RowSource, opened: list[str]) -> None:
        self._rows, self.opened = rows, list(opened)

    def end_step(self) -> None:
        self._rows, self.opened = None, []

    @property
    def in_step(self) -> bool:
        """Whether a step of `StreamingInput` is running, as opposed to vLLM's profiling and warm-up steps."""
        return self._rows is not None

    def input_rows(self, order: Sequence[str] | None) -> Tensor:
        """Return the running step's input embeddings in batch order (None: the V1 runner's own order)."""
        assert self._rows is not None, "input embeddings exist inside a step only"
        return self._rows(order)
