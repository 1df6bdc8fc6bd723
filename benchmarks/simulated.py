"""vLLM executors whose steps take a stated time, which simulates the time of a device.

`TimedExecutor` computes a step, and sleeps until the stated time is over. So the results do not depend on the cores of
this machine or on the number of engines, as long as the tiny model computes in less time. vLLM's argument
`distributed_executor_backend` selects the executor, for a stage (`engine`) and for a stock server (`flags`).

`IdleExecutor` computes nothing: it sleeps for the stated time, and returns made-up tokens, frames and samples. So the
cores are free for the code around the models, also with more requests at once than the tiny model could compute.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from vllm_omni_ext.engine.input_provider import spans_of
from vllm_omni_ext.wire.stage_input import PartHeader

STEP = "step_s"
"""Key of `additional_config`: seconds a step takes."""

TOKEN = "token_s"
"""Key of `additional_config`: seconds that each token of a step adds."""

GROUPS = "groups"
"""Key of `additional_config`: codes of a frame, for `IdleExecutor`; 0: the stage makes or takes no frames."""

TAKE_STEPS = "take_steps"

TOKEN_ID = 7
FRAME_SAMPLES = 1920

PYTHONPATH = str(Path(__file__).parent)
"""Folder of this module, for the environment of a server in another process."""


class TimedExecutor(UniProcExecutor):
    """Runs the model, and returns the results of a step after the stated time."""

    def _init_executor(self) -> None:
        self._step_s = float(self.vllm_config.additional_config[STEP])
        self._token_s = float(self.vllm_config.additional_config.get(TOKEN, 0.0))
        self._ends = 0.0
        super()._init_executor()

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Begin a step; a step of a pooling model also ends here."""
        tokens = scheduler_output.total_num_scheduled_tokens
        self._ends = time.monotonic() + self._step_s + tokens * self._token_s if tokens else 0.0
        output = super().execute_model(scheduler_output, non_block)
        if (output.result() if non_block else output) is not None:
            self._wait()
        return output

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """Sample, and return the result when the stated time since the step's beginning is over."""
        output = super().sample_tokens(grammar_output, non_block)
        self._wait()
        return output

    def _wait(self) -> None:
        time.sleep(max(0.0, self._ends - time.monotonic()))


class IdleExecutor(TimedExecutor):
    """Runs no model: sleeps for the time of a step, and returns made-up results of a Qwen3-Omni stage.

    A text stage samples `TOKEN_ID`. The talker also returns a frame of zeros with each token. A pooling stage
    (code2wav) returns silence for the frames of each request.

    `collective_rpc(TAKE_STEPS)` returns the steps since the last call: (begin, end, tokens) of each, in seconds.
    """

    def _init_executor(self) -> None:
        self._groups = int(self.vllm_config.additional_config.get(GROUPS, 0))
        self._pooling = self.vllm_config.model_config.runner_type == "pooling"
        self._prompts: dict[str, int] = {}
        self._steps: list[tuple[float, float, int]] = []
        super()._init_executor()

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        if method != TAKE_STEPS:
            return super().collective_rpc(method, *args, **kwargs)
        steps, self._steps = self._steps, []
        return steps

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Run a whole step: no call of `sample_tokens` follows."""
        began = time.monotonic()
        for req_id in scheduler_output.finished_req_ids:
            self._prompts.pop(req_id, None)
        tokens = scheduler_output.total_num_scheduled_tokens
        output = self._silence(scheduler_output) if self._pooling else self._tokens(scheduler_output)
        if tokens:
            self._ends = began + self._step_s + tokens * self._token_s
            self._wait()
            self._steps.append((began, time.monotonic(), tokens))
        if not non_block:
            return output
        done: Future[Any] = Future()
        done.set_result(output)
        return done

    def _tokens(self, step: Any) -> ModelRunnerOutput:
        self._prompts |= {new.req_id: len(new.prompt_token_ids) for new in step.scheduled_new_reqs}
        spans = spans_of(list(step.num_scheduled_tokens), step)
        samples = [span.start + span.count >= self._prompts[span.req_id] for span in spans]
        frame = torch.zeros(1, self._groups, dtype=torch.int32) if self._groups else None
        return ModelRunnerOutput(
            [span.req_id for span in spans],
            {span.req_id: at for at, span in enumerate(spans)},
            [[TOKEN_ID] if due else [] for due in samples],
            pooler_output=[frame if due else None for due in samples] if self._groups else None,
        )

    def _silence(self, step: Any) -> ModelRunnerOutput:
        if not step.scheduled_new_reqs:
            return EMPTY_MODEL_RUNNER_OUTPUT
        sounds = []
        for new in step.scheduled_new_reqs:
            header = PartHeader.of(new.pooling_params.extra_kwargs)
            frames = 0 if header.empty else len(new.prompt_token_ids) // self._groups
            sounds.append(torch.zeros(frames * FRAME_SAMPLES))
        names = [new.req_id for new in step.scheduled_new_reqs]
        return ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, [], pooler_output=sounds)


def idle(step_s: float, token_s: float = 0.0, *, groups: int = 0) -> dict[str, Any]:
    """Return engine arguments of a stage that computes nothing (`IdleExecutor`).

    Args:
        step_s: seconds of a step.
        token_s: seconds that each token of a step adds.
        groups: codes of a frame; 0: the stage has no frames.
    """
    made = engine(step_s, token_s)
    return {
        "distributed_executor_backend": "simulated.IdleExecutor",
        "additional_config": made["additional_config"] | {GROUPS: groups},
    }


def engine(step_s: float, token_s: float = 0.0) -> dict[str, Any]:
    """Return engine arguments of a stage whose steps take `step_s` seconds, and `token_s` more for each token."""
    times = {STEP: step_s, TOKEN: token_s} if token_s else {STEP: step_s}
    return {"distributed_executor_backend": "simulated.TimedExecutor", "additional_config": times}


def flags(step_s: float, token_s: float = 0.0) -> list[str]:
    """Return the arguments of `engine` as flags of `vllm serve`; the server's PYTHONPATH must contain `PYTHONPATH`."""
    words = [(f"--{name.replace('_', '-')}", value) for name, value in engine(step_s, token_s).items()]
    return [word for name, value in words for word in (name, value if isinstance(value, str) else json.dumps(value))]
