"""Interfaces of a model whose input arrives in chunks; `engine.worker.StreamingInputWorker` calls them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from vllm.v1.core.sched.output import SchedulerOutput


@dataclass(frozen=True, slots=True)
class Span:
    """`count` consecutive positions of one request, from absolute position `start`."""

    req_id: str
    start: int
    count: int


def scheduled_starts(step: SchedulerOutput) -> dict[str, int]:
    """Return, by request id, the first position that each scheduled request computes in this step."""
    cached = step.scheduled_cached_reqs
    starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    starts.update((new.req_id, new.num_computed_tokens) for new in step.scheduled_new_reqs)
    return starts


def spans_of(order: list[str], step: SchedulerOutput) -> list[Span]:
    """Return the positions that a step computes, one `Span` for each request, in the runner's batch order `order`."""
    starts = scheduled_starts(step)
    return [Span(req_id, starts[req_id], step.num_scheduled_tokens[req_id]) for req_id in order]


@dataclass(frozen=True, slots=True)
class Ended:
    """Result of `InputProvider.sampled` that ends a request; the scheduler sets its finish reason to "stop".

    Attributes:
        output: the request's output tensor; None for no output.
    """

    output: torch.Tensor | None = None


class InputProvider(Protocol):
    """Computes the input embeddings and the outputs of a stage's requests, in the worker, for both model runners.

    An input embedding must depend only on the request's own input and tokens. Preemption, chunked prefill and the batch
    order then do not change the embeddings.

    Attributes:
        payloads: type to which the messages of the plugin's flow are converted: a `msgspec.Struct`, or a union of
            tagged structs.
    """

    payloads: Any

    def open(self, req_id: str, payload: Any, hidden_spans: Sequence[tuple[int, int]], params: Any) -> None:
        """Start a request. The call does nothing if the request is open: vLLM adds a preempted request a second time.

        Args:
            payload: the message of the plugin's flow that came with the request; None if there is none.
            hidden_spans: ranges [start, stop) of prompt positions whose input is hidden states.
            params: the request's vLLM `SamplingParams`.
        """

    def extend(self, req_id: str, payload: Any) -> None:
        """Add the next input chunk of an open request: `payload` is the message that describes it."""

    def add_hidden_states(self, req_id: str, hidden: torch.Tensor) -> None:
        """Add the next hidden states [n, width] of a request, in the order of its `hidden_spans`."""

    def blank(self, req_id: str) -> None:
        """Use zeros for all missing hidden states of a request; they are lost, and the request ends with an error."""

    def close(self, req_id: str) -> None:
        """Free the state of a request; unknown ids are ignored (vLLM may report an end twice)."""

    def rows(self, spans: Sequence[Span]) -> torch.Tensor:
        """Return input embeddings of the spans in order: [sum of counts, hidden], model dtype."""

    def positions(self, req_id: str, length: int) -> tuple[torch.Tensor, int]:
        """Return the prompt's M-RoPE positions int64 [3, length] and the delta that is added to later positions."""

    def sampled(
        self, req_ids: Sequence[str], tokens: Sequence[Sequence[int]], hidden: torch.Tensor
    ) -> Sequence[torch.Tensor | Ended | None]:
        """Return an output for each request of a step: a tensor, None for no output, or `Ended`.

        The worker calls this method after sampling. `Ended` ends the request after this step, also if the
        sampled token does not. With tensor parallelism all ranks must return equal outputs.

        Args:
            tokens: sampled tokens of each request; empty if the step has computed only a piece of its prompt.
            hidden: hidden states [requests, hidden] from which the step was sampled; row i belongs to request i.
        """


class StreamingInputModel(Protocol):
    """A vLLM model whose input embeddings come from its `InputProvider`.

    `streaming_model.StreamingInputBase` implements all that does not depend on the model.

    Attributes:
        sampled_hidden: hidden states [requests, hidden] from which the last step was sampled.
    """

    input_provider: InputProvider
    sampled_hidden: torch.Tensor | None

    def after_load(self) -> None:
        """Allocate the permanent buffers; called after loading, before vLLM measures the memory."""

    def begin_step(self, *, rows: Callable[[Sequence[str] | None], torch.Tensor], opened: list[str]) -> None:
        """Prepare the model for a step.

        Args:
            rows: returns the step's input embeddings for a batch order (None: the V1 runner's own order).
            opened: requests that the runner is about to add, in order.
        """

    def end_step(self) -> None:
        """End the step: drop the references to the arguments of `begin_step`."""
