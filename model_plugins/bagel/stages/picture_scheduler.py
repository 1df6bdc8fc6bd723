"""Keeps all tokens of a picture in one step: they attend to each other.

vLLM's `disable_chunked_mm_input` alone does not: a picture is still divided if a step begins with its first token, e.g.
at the beginning of a prompt, when other requests leave too few tokens of the step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from vllm_omni_ext.engine.scheduler import scheduler_factory


class WholePictures(Scheduler):
    """Ends a chunk of a prompt before a picture that does not fit."""

    def _try_schedule_encoder_inputs(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int, *given: Any, **named: Any
    ) -> Any:
        places = ((each.mm_position.offset, each.mm_position.length) for each in request.mm_features)
        fitting = tokens_before_a_part(places, num_computed_tokens, num_new_tokens)
        return super()._try_schedule_encoder_inputs(request, num_computed_tokens, fitting, *given, **named)


def tokens_before_a_part(places: Iterable[tuple[int, int]], computed: int, new: int) -> int:
    """Return how many of the next tokens can be computed without dividing a picture.

    Args:
        places: first position and number of tokens of each picture.
        computed: number of tokens that have been computed.
        new: number of next tokens for which the step has room.
    """
    for start, length in places:
        if computed < start + length and start < computed + new < start + length:
            return max(0, start - computed)
    return new


picture_scheduler = scheduler_factory(WholePictures)
"""The `scheduler_cls` of the stage `ar`."""
