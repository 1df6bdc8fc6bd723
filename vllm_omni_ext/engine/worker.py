"""Workers of stages that hand rows over (`ExportWorker`) or are fed by another stage (`FeedWorker`).

All logic is in `Exporter` and in the model's `Feeder`; what is here translates between them and vLLM's runner.
The V1 runner (CPU, or `VLLM_USE_V2_MODEL_RUNNER=0`) and Model Runner V2 (GPU default) differ only in the
batch order (`_executed_order`) and in where the input rows are asked for (V1: `embed_input_ids`; V2:
`get_model_state_cls`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from vllm.distributed import get_pp_group, get_tp_group
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_omni_ext.engine.alone import alone
from vllm_omni_ext.engine.edges import Lost, sender_of, taker_of
from vllm_omni_ext.engine.encoding import encode_apart
from vllm_omni_ext.engine.exported_layer import EXPORTED_LAYER, ExportedLayer
from vllm_omni_ext.engine.exporter import Exporter
from vllm_omni_ext.engine.feeder import Feeder, Span
from vllm_omni_ext.engine.loading import told
from vllm_omni_ext.memory import trim
from vllm_omni_ext.wire.handoff import PROMPT, export_ranges
from vllm_omni_ext.wire.parts import refusal
from vllm_omni_ext.wire.rows import Given

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as _Worker
else:
    from vllm.v1.worker.gpu_worker import Worker as _Worker  # type: ignore[assignment]


def scheduled_starts(step: SchedulerOutput) -> dict[str, int]:
    """First position each scheduled request computes in this step."""
    cached = step.scheduled_cached_reqs
    starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    starts.update((new.req_id, new.num_computed_tokens) for new in step.scheduled_new_reqs)
    return starts


def spans_of(order: list[str], step: SchedulerOutput) -> list[Span]:
    """The step's spans in the batch order of the runner."""
    starts = scheduled_starts(step)
    return [Span(req_id, starts[req_id], step.num_scheduled_tokens[req_id]) for req_id in order]


class WithOutputs(AsyncModelRunnerOutput):
    """Adds per-request tensors to an output that is not on the host yet."""

    def __init__(self, inner: AsyncModelRunnerOutput, outputs: dict[str, torch.Tensor]) -> None:
        self._inner = inner
        self._outputs = outputs

    def get_output(self) -> ModelRunnerOutput:
        return with_outputs(self._inner.get_output(), self._outputs)


def with_outputs(out: Any, outputs: dict[str, torch.Tensor]) -> Any:
    """Put tensors beside the sampled tokens, where `EngineCoreOutput.pooling_output` picks them up."""
    if not outputs:
        return out
    if isinstance(out, AsyncModelRunnerOutput):
        return WithOutputs(out, outputs)
    out.pooler_output = [outputs.get(req_id) for req_id in out.req_ids]
    return out


def _v1_order(runner: Any) -> list[str]:
    """Batch order of the running step in the V1 runner (V2 passes its own batch to the model state)."""
    return list(runner.input_batch.req_ids)


def _executed_order(runner: Any, state: Any) -> list[str]:
    """Batch order of the step that has just been executed, for either runner."""
    return list(state.input_batch.req_ids) if hasattr(state, "input_batch") else _v1_order(runner)


class LeanWorker(_Worker):  # type: ignore[misc]
    """The stock worker; gives back what loading left behind, and costs nothing while nothing is to be done."""

    def init_device(self) -> Any:
        """First step of the start-up."""
        with alone():
            return super().init_device()

    def load_model(self, **given: Any) -> None:
        """Second step of the start-up; the first worker of a replica says how far it is."""
        with told(self.vllm_config.load_config) if self.rank == 0 else nullcontext():
            super().load_model(**given)

    def compile_or_warm_up_model(self) -> Any:
        """Last step of the start-up."""
        times = super().compile_or_warm_up_model()
        if (warm_up := getattr(self.model_runner.get_model(), "warm_up", None)) is not None:
            warm_up()
        trim()
        return times

    def transfer_counters(self) -> dict[str, float]:
        """What has been counted about KV transfers since the start (read through `collective_rpc`)."""
        if not has_kv_transfer_group():
            return {}
        return get_kv_transfer_group().totals()

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample; with the V1 runner on a CPU, a seeded request whose prompt goes on draws nothing."""
        if not current_platform.is_cpu() or not hasattr(self.model_runner, "input_batch"):
            return super().sample_tokens(grammar_output)
        with _without_draws(self.model_runner):
            return super().sample_tokens(grammar_output)


@contextmanager
def _without_draws(runner: Any) -> Iterator[None]:
    """Inside the block, requests whose sample will be thrown away have no generator.

    vLLM lets them draw and turns their generators back, which CPU generators cannot: the engine would end.
    """
    batch = runner.input_batch
    spared: dict[int, torch.Generator] = {}
    if batch.generators:
        rows = runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
        spared = {row: batch.generators.pop(row) for row in rows if row in batch.generators}
    try:
        yield
    finally:
        batch.generators.update(spared)


class ExportWorker(LeanWorker):
    """Puts hidden rows of chosen prompt positions where the next stage takes them, and says so beside the result.

    Without such requests it is the stock worker.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._exporter = Exporter()
        self._sender = sender_of(self.vllm_config.additional_config)
        self._exported: dict[str, torch.Tensor] = {}

    def load_model(self, **kwargs: Any) -> None:
        """Load the model, and prepare what steps are going to need before any of them is compiled or captured."""
        layer = model_accept_layer(self.vllm_config)
        self.vllm_config.additional_config = {**self.vllm_config.additional_config, EXPORTED_LAYER: layer}
        super().load_model(**kwargs)
        encode_apart(self.model_runner)
        self._layer = ExportedLayer(self.model_runner, self.vllm_config, layer)

    def handoff_steps(self) -> int:
        """Steps in which this worker did more than the stock one (read through `collective_rpc`)."""
        return self._exporter.steps

    def forget_rows(self, names: Sequence[str]) -> None:
        """Nobody will take these rows (called through `collective_rpc`)."""
        self._sender.forget(names)

    def rows_held(self) -> int | None:
        """Requests whose rows are kept here; None if no row was ever put (read through `collective_rpc`)."""
        return self._sender.held() if self._sender.opened else None

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Run one step; when rows are due, with the accept layer's hidden states beside the result."""
        for req_id in scheduler_output.finished_req_ids:
            self._exporter.drop(req_id)
            self._sender.ended(req_id)
        self._sender.forget(getattr(scheduler_output, "unheard", ()))
        for new in scheduler_output.scheduled_new_reqs:
            if new.sampling_params is not None and new.sampling_params.extra_args:
                self._exporter.add(new.req_id, export_ranges(new.sampling_params.extra_args))
        spans = spans_of(list(scheduler_output.num_scheduled_tokens), scheduler_output)
        if not self._exporter.due(spans):
            return super().execute_model(scheduler_output)
        return self._execute_exporting(scheduler_output)

    def _execute_exporting(self, step: SchedulerOutput) -> Any:
        runner = self.model_runner
        with self._layer.exposed():
            out = super().execute_model(step)
        hidden = self._layer.take()
        spans = spans_of(_executed_order(runner, runner.execute_model_state), step)
        cuts = self._exporter.cut(spans, hidden)
        if _answers():
            notices = ((req_id, self._sender.send(req_id, cut)) for req_id, cut in cuts.items())
            self._exported = {req_id: notice.tensor() for req_id, notice in notices if notice is not None}
        return out

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample, and attach what was exported by this step."""
        exported, self._exported = self._exported, {}
        return with_outputs(super().sample_tokens(grammar_output), exported)


def _answers() -> bool:
    """Whether this is the worker whose results the engine reads; the others of the replica have the same rows."""
    return get_pp_group().is_last_rank and get_tp_group().is_first_rank


def model_accept_layer(vllm_config: Any) -> int:
    """Layer whose output the talker reads at multimodal positions (`talker_config.accept_hidden_layer`)."""
    return int(vllm_config.model_config.hf_config.talker_config.accept_hidden_layer)


class FeedWorker(LeanWorker):
    """Runs a model that builds its own input rows (`model.feeder`) and turns samples into stage outputs.

    Steps that do not come from our scheduler are vLLM's own warm-up (V2 runs it through the worker): they stay stock.
    """

    _warming_up = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._taker = taker_of(self.vllm_config.additional_config)
        self._refused: dict[str, torch.Tensor] = {}

    @property
    def _feeder(self) -> Feeder:
        return self.model_runner.get_model().feeder

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load; what the model keeps besides its weights is made before vLLM measures the memory."""
        super().load_model(*args, **kwargs)
        self.model_runner.get_model().after_load()

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Give the step's requests, chunks and rows to the feeder, then run the step."""
        self._warming_up = not hasattr(scheduler_output, "handoff")
        if self._warming_up:
            return super().execute_model(scheduler_output)
        model, feeder = self.model_runner.get_model(), self._feeder
        for req_id in scheduler_output.finished_req_ids:
            feeder.close(req_id)
            self._taker.forget(req_id)
            self._refused.pop(req_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            prompt = new.sampling_params.extra_args[PROMPT]
            feeder.open(new.req_id, prompt, new.sampling_params)
            if new.req_id not in self._taker:  # else it was preempted, and may have been given more since
                self._given(new.req_id, prompt)
        for req_id, chunks in scheduler_output.handoff.items():
            for chunk in chunks:
                feeder.extend(req_id, chunk, None)
                self._given(req_id, chunk)
        self._take_rows(scheduler_output)
        model.begin_step(
            rows=lambda order: feeder.rows(spans_of(order or _v1_order(self.model_runner), scheduler_output)),
            opened=[new.req_id for new in scheduler_output.scheduled_new_reqs],
        )
        try:
            return super().execute_model(scheduler_output)
        finally:
            model.end_step()

    def rows_open(self) -> int | None:
        """Requests whose rows are taken here; None if no row ever was (read through `collective_rpc`)."""
        return len(self._taker) if self._taker.opened else None

    def _given(self, req_id: str, payload: Any) -> None:
        given = Given.of(payload)
        if given is not None:
            self._taker.given(req_id, given)

    def _take_rows(self, step: SchedulerOutput) -> None:
        """Rows of the step's requests; one whose rows do not come is refused and ends, the others go on."""
        for req_id, found in self._taker.take(step.num_scheduled_tokens).items():
            if isinstance(found, Lost):
                self._refused[req_id] = refusal(found.reason)
                self._feeder.blank(req_id)
            else:
                self._feeder.extend(req_id, {}, torch.cat(found))

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample, then finish the step's outputs (for the talker: the residual codes of each frame)."""
        out = super().sample_tokens(grammar_output)
        if self._warming_up:
            return out
        if isinstance(out, AsyncModelRunnerOutput):
            out = out.get_output()
        if out is None or not out.req_ids:
            return out
        hidden = self.model_runner.get_model().sampled_hidden
        made = self._feeder.sampled(out.req_ids, out.sampled_token_ids, hidden)
        made_by = {r: t for r, t in zip(out.req_ids, made, strict=True) if t is not None}
        return with_outputs(out, made_by | {r: self._refused[r] for r in out.req_ids if r in self._refused})
