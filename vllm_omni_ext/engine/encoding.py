"""Sound of different requests is encoded in different calls, so that nobody hears the others.

The encoder of Qwen3-Omni pads the last piece of every clip to the longest piece of the call, and its convolutions see
what their biases make of the padding: the end of a short clip depends on who else is in the call, by much more than
rounding. Transformers, and whoever asks alone, encodes the clips of one prompt together.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

PADDED = "audio"
"""The modality whose items are padded to each other; images and videos are not."""


def by_request(runner: Any) -> Callable[[Any], list[Any]]:
    """A runner's `_execute_mm_encoder` that calls it once for each request with sound, and once for all others."""
    execute = runner._execute_mm_encoder

    def padded(req_id: str, items: list[int]) -> bool:
        features = runner.requests[req_id].mm_features
        return any(features[item].modality == PADDED and features[item].data is not None for item in items)

    def execute_apart(step: Any) -> list[Any]:
        due = step.scheduled_encoder_inputs
        apart = [req_id for req_id, items in due.items() if padded(req_id, items)]
        if len(apart) < 2:
            made: list[Any] = execute(step)
            return made
        together = {req_id: items for req_id, items in due.items() if req_id not in apart}
        outputs: list[Any] = []
        for part in (together, *({req_id: due[req_id]} for req_id in apart)):
            some = copy.copy(step)
            some.scheduled_encoder_inputs = part
            outputs += execute(some)
        return outputs

    return execute_apart
