"""An engine that answers what the test wrote down, behind vLLM's real server application."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.renderers import renderer_from_config
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.input_processor import InputProcessor

from vllm_omni_ext.model_plugins.qwen3_omni.requests import Qwen3OmniRequests
from vllm_omni_ext.observability.observer import Observer
from vllm_omni_ext.omni import REQUEST_OPTIONS
from vllm_omni_ext.orchestrator.requests import OmniOptions
from vllm_omni_ext.outputs import AudioOutput

RATE = 24_000
GROUPS = 4
Step = str | AudioOutput | Exception | Callable[[], Any]


def sound(samples: int, *, frames: int = 0, finished: bool = False, note: str | None = None) -> AudioOutput:
    """A ramp of that many samples; `frames` counts those spoken so far."""
    return AudioOutput(
        request_id="r",
        samples=np.linspace(-0.9, 0.9, samples, dtype=np.float32),
        sample_rate=RATE,
        frames=np.zeros((frames, GROUPS), np.int64),
        finished=finished,
        note=note,
    )


@dataclass
class Call:
    """One call of `generate`."""

    prompt: Any
    params: SamplingParams
    options: OmniOptions | None
    closed: bool = False


@dataclass
class ScriptedOmni:
    """The part of `AsyncOmni` that the server uses.

    Attributes:
        refusal: what is wrong with every text that is to be spoken.
        script: what the next requests answer: text pieces, sound, an error to raise, or something to await.
    """

    vllm_config: Any
    plan: Any
    script: Sequence[Step] = ()
    calls: list[Call] = field(default_factory=list)
    refusal: Exception | None = None
    errored = False
    log_stats = False
    connections = SimpleNamespace(client_index=0, client_count=1, board=None)
    trace_files = None

    def __post_init__(self) -> None:
        self.model_config = self.vllm_config.model_config
        self.renderer = renderer_from_config(self.vllm_config)
        self.input_processor = InputProcessor(self.vllm_config, self.renderer)
        self.plugin = Qwen3OmniRequests(self.model_config.hf_config)
        self.observer = Observer.unseen(self.plan.text_stage().name, ())

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def check_admission(self, n: int) -> None:
        pass

    async def is_tracing_enabled(self) -> bool:
        return False

    def generate(self, prompt: Any, params: SamplingParams, request_id: str, **_: Any) -> AsyncGenerator[Any, None]:
        call = Call(prompt, params, REQUEST_OPTIONS.get())
        self.calls.append(call)
        return self._play(call, request_id, list(self.script))

    async def speak(self, text: str, options: OmniOptions, request_id: str) -> ScriptedRecital:
        if isinstance(self.refusal, Exception):
            raise self.refusal
        call = Call(text, SamplingParams(), options)
        self.calls.append(call)
        return ScriptedRecital(self, call, request_id)

    async def _play(self, call: Call, request_id: str, script: list[Step]) -> AsyncGenerator[Any, None]:
        words = [step for step in script if isinstance(step, str)]
        said = 0
        try:
            for step in script:
                if isinstance(step, Exception):
                    raise step
                if callable(step):
                    await step()
                elif isinstance(step, AudioOutput):
                    yield step
                else:
                    said += 1
                    if call.params.output_kind == RequestOutputKind.DELTA:
                        yield text_output(request_id, step, [said], finished=said == len(words))
                    elif said == len(words):
                        yield text_output(request_id, "".join(words), list(range(said)), finished=True)
        finally:
            call.closed = True


@dataclass
class ScriptedRecital:
    """What `AsyncOmni.speak` gives; a token is a word."""

    omni: ScriptedOmni
    call: Call
    request_id: str

    @property
    def tokens(self) -> int:
        return len(self.call.prompt.split())

    def pieces(self) -> AsyncGenerator[Any, None]:
        return self.omni._play(self.call, self.request_id, list(self.omni.script))


def text_output(request_id: str, text: str, tokens: list[int], *, finished: bool) -> RequestOutput:
    """What vLLM yields for a piece of text."""
    completion = CompletionOutput(0, text, tokens, None, None, finish_reason="stop" if finished else None)
    return RequestOutput(request_id, "prompt", [1, 2, 3], None, [completion], finished, num_cached_tokens=0)
