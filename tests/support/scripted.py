"""An engine with scripted answers, behind vLLM's real server application."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.renderers import renderer_from_config
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.input_processor import InputProcessor

from vllm_omni_ext.modalities.base import OutputChunk
from vllm_omni_ext.modalities.chunks import AudioChunk
from vllm_omni_ext.observability.observer import Observer
from vllm_omni_ext.observability.request_trace import RequestTrace, StageTiming
from vllm_omni_ext.orchestrator.admission import Ticket
from vllm_omni_ext.plugins.registry import family_of
from vllm_omni_ext.plugins.runtime import Rendered, RequestOptions, RuntimeContext
from vllm_omni_ext.plugins.spec import resolve
from vllm_omni_ext.resampling import use_available
from vllm_omni_ext.runtime.control import NOTHING_CHANGED
from vllm_omni_ext.wire.stage_input import TICKET

RATE = 24_000
GROUPS = 4
Step = str | OutputChunk | Exception | Callable[[], Any]


def sound(samples: int, *, frames: int = 0, finished: bool = False, note: str | None = None) -> AudioChunk:
    """A ramp of that many samples; `frames` counts those spoken so far."""
    return AudioChunk(
        request_id="r",
        samples=np.linspace(-0.9, 0.9, samples, dtype=np.float32),
        sample_rate=RATE,
        frames=np.zeros((frames, GROUPS), np.int64),
        last=finished,
        note=note,
    )


@dataclass
class Call:
    """One call of `generate`, or of `start`: then the prompt is the text that is read aloud."""

    prompt: Any
    params: SamplingParams
    options: RequestOptions | None
    closed: bool = False
    text_only: bool = False


@dataclass
class ScriptedOmni:
    """The part of `AsyncOmni` that the server uses.

    Attributes:
        refusal: raised for every request that does not use the frontend.
        script: answers of the next requests: text pieces, sound, an error to raise, or a function to await.
    """

    vllm_config: Any
    plan: Any
    script: Sequence[Step] = ()
    calls: list[Call] = field(default_factory=list)
    refusal: Exception | None = None
    errored = draining = log_stats = False
    connections = SimpleNamespace(client_index=0, client_count=1, board=None, ready_responses=None)
    operator_state = NOTHING_CHANGED
    orchestrator = SimpleNamespace(pools=defaultdict(lambda: SimpleNamespace(replicas=())), pairs=list)

    def __post_init__(self) -> None:
        self.model_config = self.vllm_config.model_config
        self.renderer = renderer_from_config(self.vllm_config)
        use_available(self.renderer)
        self.input_processor = InputProcessor(self.vllm_config, self.renderer)
        context = RuntimeContext(
            hf_config=self.model_config.hf_config,
            pipeline=self.plan.pipeline,
            frontend=self.plan.frontend().name,
            chunks=self.plan.chunks,
            limits={stage.model_stage: self.model_config.max_model_len for stage in self.plan.model_stages()},
            defaults={stage.model_stage: stage.params for stage in self.plan.model_stages()},
        )
        self.runtime = resolve(family_of(self.plan.family).runtime)(context)
        self.capabilities = self.runtime.capabilities()
        self.observer = Observer.unseen(self.plan.frontend().name, ())
        self.at_stop: list[Callable[[], None]] = []
        self._words: list[str] = []
        self._tickets: dict[str, Ticket] = {}

    def when_stopping(self, call: Callable[[], None], ended: Callable[[], Any] | None = None) -> None:
        self.at_stop.append(call)
        self.outlasting = ended

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def check_admission(self, n: int) -> None:
        pass

    async def is_tracing_enabled(self) -> bool:
        return False

    @property
    def admission(self) -> ScriptedOmni:
        """This object, which also has the methods of `Admission`."""
        return self

    def expect(self, ticket: Ticket) -> str:
        key = f"ticket {len(self.calls)} {len(self._tickets)}"
        self._tickets[key] = ticket
        return key

    def withdraw(self, key: str) -> None:
        del self._tickets[key]

    def generate(self, prompt: Any, params: SamplingParams, request_id: str, **_: Any) -> AsyncGenerator[Any, None]:
        ticket = self._tickets.get((params.extra_args or {}).get(TICKET, ""))
        call = Call(prompt, params, None if ticket is None else ticket.options)
        self.calls.append(call)
        if ticket is not None and ticket.watch is not None:
            ticket.watch(self._trace(request_id))
        return self._play(call, request_id, list(self.script))

    def start(self, rendered: Rendered, options: RequestOptions, request_id: str) -> AsyncGenerator[Any, None]:
        if isinstance(self.refusal, Exception):
            raise self.refusal
        call = Call(" ".join(self._words[token] for token in rendered.data.reply), SamplingParams(), options)
        self.calls.append(call)
        return self._play(call, request_id, list(self.script))

    def _trace(self, request_id: str) -> RequestTrace:
        """A trace whose frontend has answered a request with one token, from its arrival to 0.5 s later."""
        replica = self.plan.frontend().replicas[0].id
        timing = StageTiming(replica, sent=0.0, first=0.25, last=0.5, tokens=1)
        return RequestTrace(request_id, ("text",), 0.0, 0.0, None, stages={replica.stage: timing})

    async def text_only(self, ticket: Any) -> None:
        self.calls[-1].text_only = True

    async def tokenize(self, text: str, *, special: bool = True) -> list[int]:
        """Each word is a token."""
        first = len(self._words)
        self._words += text.split()
        return list(range(first, len(self._words)))

    async def _play(self, call: Call, request_id: str, script: list[Step]) -> AsyncGenerator[Any, None]:
        words = [step for step in script if isinstance(step, str)]
        said = 0
        try:
            for step in script:
                if isinstance(step, Exception):
                    raise step
                if callable(step):
                    await step()
                elif isinstance(step, OutputChunk):
                    yield step
                else:
                    said += 1
                    if call.params.output_kind == RequestOutputKind.DELTA:
                        yield text_output(request_id, step, [said], finished=said == len(words))
                    elif said == len(words):
                        yield text_output(request_id, "".join(words), list(range(said)), finished=True)
        finally:
            call.closed = True


def text_output(request_id: str, text: str, tokens: list[int], *, finished: bool) -> RequestOutput:
    completion = CompletionOutput(0, text, tokens, None, None, finish_reason="stop" if finished else None)
    return RequestOutput(request_id, "prompt", [1, 2, 3], None, [completion], finished, num_cached_tokens=0)
