"""The thinker's worker: exports the layer that the talker reads, and encodes each request's sound in a separate call.

The audio encoder of Qwen3-Omni pads the last piece of every clip to the longest piece of the call. Biases of its
convolutions turn the padding into nonzero values. The end of a short clip would therefore depend on the other clips of
the call, by much more than rounding. Transformers encodes the clips of one prompt together; so does this worker.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from vllm_omni_ext.engine.worker import HiddenStatesExportWorker

PADDED = "audio"
"""The modality whose items the encoder pads to the longest item of a call; images and videos are not padded."""

Due = Mapping[str, list[int]]
"""By request, the indices of the items to encode, as in `SchedulerOutput.scheduled_encoder_inputs`."""


class ThinkerWorker(HiddenStatesExportWorker):
    """Exports the output of `talker_config.accept_hidden_layer` at multimodal positions."""

    def layer_to_export(self) -> int:
        return int(self.vllm_config.model_config.hf_config.talker_config.accept_hidden_layer)

    def load_model(self, **kwargs: Any) -> None:
        super().load_model(**kwargs)
        encode_apart(self.model_runner)


def encode_apart(runner: Any) -> None:
    """Make a runner (V1 or V2, with its model loaded) call its encoder once for each request with sound."""
    if hasattr(runner, "model_state"):
        runner.model_state.execute_mm_encoder = by_request_v2(runner)
    else:
        runner._execute_mm_encoder = by_request(runner)


def by_request(runner: Any) -> Callable[[Any], list[Any]]:
    """Return a V1 runner's `_execute_mm_encoder` with a call for each request with sound, and one for all others."""
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
    """Return what `by_request` returns, for the `execute_mm_encoder` of Model Runner V2's model state."""
    execute = runner.model_state.execute_mm_encoder

    def execute_apart(due: Due) -> None:
        for part in _parts(due, lambda req_id: runner.encoder_cache.mm_features[req_id]):
            execute(part)

    return execute_apart


def _parts(due: Due, features_of: Callable[[str], Sequence[Any]]) -> Iterator[Due]:
    """Yield the items of each encoder call: one call per request with sound, if there are several such requests."""

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
