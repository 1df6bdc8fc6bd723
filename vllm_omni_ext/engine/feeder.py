"""What an engine asks of a stage whose inputs are handed over by another stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True, slots=True)
class Span:
    """`count` consecutive positions of one request, from absolute position `start`."""

    req_id: str
    start: int
    count: int


class Feeder(Protocol):
    """Per-request inputs of a stage; lives in the worker, knows nothing of schedulers or runners.

    Every row is a function of the request's own history, so preemption, chunked prefill and any batch order
    give the same rows.
    """

    def open(self, req_id: str, prompt: Mapping[str, Any], sampling: Any) -> None:
        """Start a request from the `handoff` payload it was added with. A known id is kept as it is."""

    def extend(self, req_id: str, chunk: Mapping[str, Any], rows: torch.Tensor | None) -> None:
        """Take one more chunk of a request that is open."""

    def blank(self, req_id: str) -> None:
        """Rows of a request will not come. It runs on as if they were zero until its end, which follows."""

    def close(self, req_id: str) -> None:
        """Forget a request; unknown ids are ignored (vLLM may report an end twice)."""

    def rows(self, spans: Sequence[Span]) -> torch.Tensor:
        """Input embeddings of the spans in order: [sum of counts, hidden], model dtype."""

    def positions(self, req_id: str, length: int) -> tuple[torch.Tensor, int]:
        """M-RoPE positions int64 [3, length] and the delta added to later positions."""

    def sampled(
        self, req_ids: Sequence[str], tokens: Sequence[Sequence[int]], hidden: torch.Tensor
    ) -> list[torch.Tensor | None]:
        """Turn what was sampled (row i of `hidden` [requests, hidden] belongs to request i) into stage outputs."""
