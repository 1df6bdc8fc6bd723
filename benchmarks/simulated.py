"""Engines whose device time is stated instead of computed.

A step takes a stated time, computing included: the process sleeps for the rest of it. So the results do not depend on
the cores of this machine or on the number of engines, as long as the tiny model computes in less time. vLLM's own
argument `distributed_executor_backend` selects the executor, for a stage (`engine`) and for a stock server (`flags`).
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from vllm.v1.executor.uniproc_executor import UniProcExecutor

STEP = "step_s"
"""Key of `additional_config`: seconds a step takes."""

TOKEN = "token_s"
"""Key of `additional_config`: seconds that each token of a step adds."""

PYTHONPATH = str(Path(__file__).parent)
"""Folder of this module, for the environment of a server in another process."""


class TimedExecutor(UniProcExecutor):
    """Runs the model, and returns its results after the time of the step."""

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
        """End a step."""
        output = super().sample_tokens(grammar_output, non_block)
        self._wait()
        return output

    def _wait(self) -> None:
        time.sleep(max(0.0, self._ends - time.monotonic()))


def engine(step_s: float, token_s: float = 0.0) -> dict[str, Any]:
    """Return engine arguments of a stage whose steps take `step_s` seconds, and `token_s` more for each token."""
    times = {STEP: step_s, TOKEN: token_s} if token_s else {STEP: step_s}
    return {"distributed_executor_backend": "simulated.TimedExecutor", "additional_config": times}


def flags(step_s: float, token_s: float = 0.0) -> list[str]:
    """Return the same as flags of `vllm serve`, whose environment needs `PYTHONPATH`."""
    words = [(f"--{name.replace('_', '-')}", value) for name, value in engine(step_s, token_s).items()]
    return [word for name, value in words for word in (name, value if isinstance(value, str) else json.dumps(value))]
