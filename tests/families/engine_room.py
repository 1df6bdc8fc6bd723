"""A family's stage without an engine: its scheduler and its worker, step by step, in this process."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from safetensors.torch import load_file
from vllm import SamplingParams
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.request import Request, RequestStatus

from vllm_omni_ext.engine.plain_stage import PlainWorker
from vllm_omni_ext.plugins.flow import Produced, Submit
from vllm_omni_ext.plugins.spec import StageSpec, resolve
from vllm_omni_ext.wire.envelope import unpack
from vllm_omni_ext.wire.stage_input import FILLER, PART, PartHeader


class EngineRoom:
    """One stage's scheduler and worker, made as vLLM makes them."""

    def __init__(self, stage: StageSpec, folder: Path, seats: int = 2) -> None:
        config = SimpleNamespace(**json.loads((folder / "config.json").read_text()))
        vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(hf_config=config, model=str(folder), max_model_len=64),
            scheduler_config=SimpleNamespace(max_num_seqs=seats, async_scheduling=False),
        )
        self.scheduler: Any = resolve_obj_by_qualname(stage.engine["scheduler_cls"])(
            vllm_config=vllm_config, kv_cache_config=None, structured_output_manager=None, log_stats=False
        )
        worker_cls = resolve_obj_by_qualname(stage.engine["worker_cls"])
        self.worker: Any = worker_cls.__new__(worker_cls)
        if issubclass(worker_cls, PlainWorker):
            model = resolve(next(iter(stage.models.values())))(vllm_config=vllm_config)
            model.load_weights(load_file(folder / "model.safetensors").items())
            self.model = model
            self.worker.model_runner = SimpleNamespace(get_model=lambda: model)
        else:
            self.worker._running = {}
            self.worker.vllm_config = vllm_config
            self.worker.model_config = vllm_config.model_config
            self.worker.device = "cpu"
            self.worker.load_model()

    @property
    def requests(self) -> list[str]:
        """Those that the scheduler holds."""
        scheduler = self.scheduler
        held = [scheduler.requests] if hasattr(scheduler, "requests") else [scheduler._running, scheduler._waiting]
        return [name for each in held for name in each]

    def add(self, name: str, action: Submit, *, stream: str = "", params: Any = None, client: int = 0) -> None:
        """Send a part as the core does."""
        header = PartHeader(
            stream=stream or name,
            part=action.part,
            last=action.last,
            empty=not action.prompt,
            payload=action.payload,
            params=params,
        )
        self.send(name, header, list(action.prompt) or FILLER, client)

    def send(self, name: str, header: PartHeader, prompt: list[int], client: int = 0) -> None:
        """Send any part."""
        sampling = SamplingParams(extra_args={PART: header.as_extra()})
        self.scheduler.add_request(Request(name, prompt, sampling, None, client_index=client))

    def abort(self, *names: str) -> None:
        """End requests as a client does that has gone."""
        self.scheduler.finish_requests(list(names), RequestStatus.FINISHED_ABORTED)

    def step(self) -> list[tuple[int, EngineCoreOutput]]:
        """One engine step: (client, output) of each answer."""
        if not self.scheduler.has_requests():
            return []
        step = self.scheduler.schedule()
        made = self.scheduler.update_from_output(step, self.worker.execute_model(step))
        return [(client, output) for client, outputs in made.items() for output in outputs.outputs]

    def run(self) -> dict[str, list[EngineCoreOutput]]:
        """Step until nothing is left; all outputs by request."""
        found: dict[str, list[EngineCoreOutput]] = {}
        while self.scheduler.has_requests():
            for _, output in self.step():
                found.setdefault(output.request_id, []).append(output)
        return found


def produced(stage: str, output: EngineCoreOutput, runtime: Any, part: int | None = 0) -> Produced:
    """An engine's output as a flow gets it."""
    tensor = output.pooling_output
    message = None if tensor is None else unpack(tensor)
    payload = message if message is not None or tensor is None else runtime.decode(stage, tensor)
    finish: Any = None if output.finish_reason is None else str(output.finish_reason)
    return Produced(stage, tuple(output.new_token_ids), payload, finish, part)
