"""Sound of different requests is encoded in different calls, so that nobody hears the others.

The encoder of Qwen3-Omni pads the last piece of every clip to the longest piece of the call, and its convolutions see
what their biases make of the padding: the end of a short clip depends on who else is in the call, by much more than
rounding. Transformers, and whoever asks alone, encodes the clips of one prompt together.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

PADDED = "audio"
"""The modality whose items are padded to each other; images and videos are not."""

Due = Mapping[str, list[int]]
"""Items to encode by request, as `SchedulerOutput.scheduled_encoder_inputs` says it."""


def encode_apart(runner: Any) -> None:
    """Make a runner of either kind, whose model is loaded, call its encoder once for each request with sound."""
    if hasattr(runner, "model_state"):
        runner.model_state.execute_mm_encoder = by_request_v2(runner)
    else:
        runner._execute_mm_encoder = by_request(runner)


def by_request(runner: Any) -> Callable[[Any], list[Any]]:
    """A V1 runner's `_execute_mm_encoder` that calls it once for each request with sound, and once for all others."""
    execute = runner._execute_mm_encoder

    def execute_apart(step: Any) -> list[Any]:
        outputs: list[Any] = []
        for part in _parts(step.scheduled_encoder_inputs, lambda req_id: runner.requests[req_id].mm_features):
            some = copy.copy(step)
            some.scheduled_encoder_inputs = part
            outputs += execute(some)
        return outputs

    return execute_apart


def by_request_v2(runner: Any) -> Callable[[Due], None]:
    """The same for the `execute_mm_encoder` of Model Runner V2's model state."""
    execute = runner.model_state.execute_mm_encoder

    def execute_apart(due: Due) -> None:
        for part in _parts(due, lambda req_id: runner.encoder_cache.mm_features[req_id]):
            execute(part)

    return execute_apart


def _parts(due: Due, features_of: Callable[[str], Sequence[Any]]) -> Iterator[Due]:
    """What goes into each call of the encoder."""

    def padded(req_id: str, items: list[int]) -> bool:
        features = features_of(req_id)
        return any(features[item].modality == PADDED and features[item].data is not None for item in items)

    apart = [req_id for req_id, items in due.items() if padded(req_id, items)]
    if len(apart) < 2:
        yield due
        return
    yield {req_id: items for req_id, items in due.items() if req_id not in apart}
    for req_id in apart:
        yield {req_id: due[req_id]}
