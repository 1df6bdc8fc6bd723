"""Inside the engines of the KV transfer tests: a replica's worker and scheduler, with counters."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group

from vllm_omni_ext.engine.scheduler import export_scheduler
from vllm_omni_ext.engine.worker import StageWorker
from vllm_omni_ext.model_plugins.bagel.stages.scheduler import picture_scheduler
from vllm_omni_ext.model_plugins.qwen2_5_omni.thinker_worker import ThinkerWorker as ThinkerWorker2_5
from vllm_omni_ext.model_plugins.qwen3_omni.thinker_worker import ThinkerWorker

_schedulers: list[Any] = []


def probe_scheduler(**kwargs: Any) -> Any:
    """The replica's scheduler; the worker, in the same process, can look into it."""
    _schedulers[:] = [export_scheduler(**kwargs)]
    return _schedulers[0]


def picture_probe_scheduler(**kwargs: Any) -> Any:
    """The same for BAGEL's `ar`."""
    _schedulers[:] = [picture_scheduler(**kwargs)]
    return _schedulers[0]


class StageProbe(StageWorker):
    """Counts the steps in which an encoder ran, and tokens."""

    encoded = tokens = 0

    def execute_model(self, scheduler_output: Any) -> Any:
        self.tokens += scheduler_output.total_num_scheduled_tokens
        self.encoded += bool(scheduler_output.scheduled_encoder_inputs)
        return super().execute_model(scheduler_output)

    def encoder_steps(self) -> int:
        return self.encoded

    def computed_tokens(self) -> int:
        return self.tokens

    def used_blocks(self) -> int:
        """Blocks that are not free, without vLLM's own null block."""
        pool = _schedulers[0].kv_cache_manager.block_pool
        return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()

    def held_requests(self) -> int:
        return len(_schedulers[0].requests)

    def be_patient(self, transfer_timeout_s: float, kv_retention_s: float) -> None:
        """Change how long this replica's Mooncake connector waits."""
        connector = get_kv_transfer_group().connector_worker
        connector._timeout_s, connector._kv_retention_s = transfer_timeout_s, kv_retention_s


class ProbeWorker(StageProbe, ThinkerWorker):
    """The same for the thinker."""


class ProbeWorker2_5(StageProbe, ThinkerWorker2_5):
    """The same for Qwen2.5-Omni's thinker."""
