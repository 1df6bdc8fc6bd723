"""The thinker's worker: exports the model's output at all positions, from which the talker makes its input."""

from __future__ import annotations

from vllm_omni_ext.engine.worker import HiddenStatesExportWorker


class ThinkerWorker(HiddenStatesExportWorker):
    """Exports the hidden states after the final norm, of prompt and reply."""

    def layer_to_export(self) -> None:
        return None
