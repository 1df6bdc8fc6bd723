"""What a flow emits, as callers get it."""

from __future__ import annotations

import numpy as np

from vllm_omni_ext.orchestrator.flow import Emit
from vllm_omni_ext.outputs import AudioOutput


def audio_output(request_id: str, emit: Emit) -> AudioOutput:
    """A piece of sound; `emit.data` is None for none, or float samples in any shape."""
    return AudioOutput(
        request_id=request_id,
        samples=np.zeros(0, np.float32) if emit.data is None else emit.data.float().reshape(-1).numpy(),
        sample_rate=emit.facts["sample_rate"],
        frames=np.asarray(emit.facts["frames"], np.int64),
        finished=emit.last,
        note=emit.facts["note"],
    )
