"""The thinker's worker: exports the model's output at all positions, from which the talker makes its input."""

from __future__ import annotations

from typing import Any

from vllm_omni_ext.engine.worker import HiddenStatesExportWorker
from vllm_omni_ext.model_plugins.qwen_omni.own_sounds import Clock, merge_by_modality, positions_by_time


class ThinkerWorker(HiddenStatesExportWorker):
    """Exports the hidden states after the final norm, of prompt and reply."""

    def layer_to_export(self) -> None:
        return None

    def load_model(self, **kwargs: Any) -> None:
        from vllm.model_executor.models import qwen2_5_omni_thinker

        merge_by_modality(qwen2_5_omni_thinker)
        super().load_model(**kwargs)
        model = self.model_runner.get_model()
        compute = model.get_mrope_input_positions
        times = Clock.of(self.vllm_config.model_config.hf_config.thinker_config, own_marks=False)
        model.get_mrope_input_positions = lambda tokens, features: positions_by_time(compute, tokens, features, times)
