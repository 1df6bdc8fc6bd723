"""A worker that has nothing of vLLM's but the interface."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from optional_text_image.family import WEIGHTS
from optional_text_image.painter import Painter
from optional_text_image.payloads import Paint, PaintParams
from vllm_omni_ext.wire.envelope import StageError, StageProgress, pack
from vllm_omni_ext.wire.stage_input import PART, PartHeader


class Painting:
    """A picture on its way."""

    def __init__(self, new: NewRequestData) -> None:
        header = PartHeader.of(new.sampling_params.extra_args[PART])
        paint = msgspec.convert(header.payload, Paint)
        self.params = msgspec.convert(header.params or {}, PaintParams)
        self.tokens = list(new.prompt_token_ids)
        noise = torch.Generator().manual_seed(paint.seed)
        self.picture = torch.randn(paint.height, paint.width, 3, generator=noise)
        self.done = 0


class PainterWorker(WorkerBase):
    """Runs the painter on the CPU, or on the device that vLLM gave it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._running: dict[str, Painting] = {}

    def init_device(self) -> None:
        """Choose the device."""
        kind = self.current_platform.device_type
        self.device = torch.device(kind if kind == "cpu" else f"{kind}:{self.local_rank}")

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Read the weights."""
        self.model = Painter(vllm_config=self.vllm_config)
        self.model.load_state_dict(load_file(Path(self.model_config.model, WEIGHTS)))
        self.model.to(self.device)

    def get_model(self) -> Painter:
        """Return the model."""
        return self.model

    def get_kv_cache_spec(self) -> dict[str, Any]:
        """There is no KV cache."""
        return {}

    def determine_available_memory(self) -> int:
        """No memory is kept for a KV cache."""
        return 0

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """There is no KV cache."""

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Nothing has to be compiled."""
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Requests have sampling parameters."""
        return ("generate",)

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Do one step of the step's request."""
        for req_id in scheduler_output.finished_req_ids:
            self._running.pop(req_id, None)
        refused: dict[str, str] = {}
        for new in scheduler_output.scheduled_new_reqs:
            try:
                self._running[new.req_id] = Painting(new)
            except msgspec.ValidationError as error:
                refused[new.req_id] = str(error)
        ids = list(scheduler_output.num_scheduled_tokens)
        answers = [(pack(StageError(refused[r])), True) if r in refused else self._step(self._running[r]) for r in ids]
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={req_id: i for i, req_id in enumerate(ids)},
            sampled_token_ids=[[0] if ended else [] for _, ended in answers],
            pooler_output=[tensor for tensor, _ in answers],
        )

    def _step(self, painting: Painting) -> tuple[torch.Tensor, bool]:
        steps = painting.params.steps
        painting.picture = self.model.better(painting.picture.to(self.device), painting.tokens, steps)
        painting.done += 1
        if painting.done < steps:
            return pack(StageProgress(painting.done, steps)), False
        bright = (painting.picture * painting.params.contrast).clamp(-1, 1)
        return ((bright + 1) * 127.5).round().to(torch.uint8).cpu(), True
