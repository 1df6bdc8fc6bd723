"""Workers of stages: vLLM's worker, a worker that exports hidden states, and a worker whose input arrives in chunks.

Their logic is in `Exporter` and in the model's `InputProvider`; this module connects them to vLLM's runner. The V1
runner (CPU, or `VLLM_USE_V2_MODEL_RUNNER=0`) and Model Runner V2 (GPU default) differ only in the batch order
(`_v1_order`) and in the call that needs the input embeddings (V1: `embed_input_ids`; V2: `get_model_state_cls`).
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import torch
from vllm.distributed import get_pp_group, get_tp_group
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingType
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_omni_ext.engine.alone import alone
from vllm_omni_ext.engine.edge_receiver import Lost
from vllm_omni_ext.engine.edges import edge_sender
from vllm_omni_ext.engine.export_queue import ExportQueue, Restored, StepExports
from vllm_omni_ext.engine.exported_layer import EXPORTED_LAYER, ExportedLayer
from vllm_omni_ext.engine.exporter import ExportedSlice, Exporter
from vllm_omni_ext.engine.host_copies import CudaStreams, HostCopies
from vllm_omni_ext.engine.input_provider import Ended, StreamingInputModel, spans_of
from vllm_omni_ext.engine.kept_exports import StepChanges
from vllm_omni_ext.engine.replica_identity import ReplicaIdentity
from vllm_omni_ext.engine.warm_up import build_last_kernels
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.lifeline import SHARED, leave_interrupts_to_parent
from vllm_omni_ext.memory import malloc_trim
from vllm_omni_ext.wire.envelope import StageError, pack
from vllm_omni_ext.wire.loading import report
from vllm_omni_ext.wire.stage_input import StageInput, export_ranges, exported_before, generated_before

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as _Worker
else:
    from vllm.v1.worker.gpu_worker import Worker as _Worker  # type: ignore[assignment]

logger = init_logger(__name__)


class WithOutputs(AsyncModelRunnerOutput):
    """Adds tensors by request to an asynchronous runner output, which is copied to the host in `get_output`.

    Args:
        outputs: returns the tensors; called in `get_output`, in which it may wait.
    """

    def __init__(self, inner: AsyncModelRunnerOutput, outputs: Callable[[], dict[str, torch.Tensor]]) -> None:
        self._inner = inner
        self._outputs = outputs

    def get_output(self) -> ModelRunnerOutput:
        out = self._inner.get_output()
        return with_outputs(out, self._outputs())

    def get_kv_connector_output(self) -> Any:
        """Return the step's KV output, which vLLM 0.33 reads when `get_output` has failed."""
        return self._inner.get_kv_connector_output()  # type: ignore[attr-defined]


def with_outputs(out: Any, outputs: dict[str, torch.Tensor]) -> Any:
    """Attach tensors by request to a runner output; vLLM sends them as `EngineCoreOutput.pooling_output`."""
    if outputs:
        out.pooler_output = [outputs.get(req_id) for req_id in out.req_ids]
    return out


def _v1_order(runner: Any) -> list[str]:
    """Return the batch order of the running step in the V1 runner (V2 passes its batch to the model state)."""
    return list(runner.input_batch.req_ids)


def _unlink_queues(name: str, rank: int) -> None:
    """Unlink the shared memory files of vLLM's CPU collectives, which vLLM does not remove; mappings stay valid.

    Files of groups that contain this rank are unlinked. Every rank of such a group has mapped the file before any of
    them has initialized its device.

    Args:
        name: prefix of the file names; each engine has its own.
    """
    for file in Path(SHARED).glob(f"{glob.escape(name)}-*-cpushm_*"):
        ranks = file.name.rpartition("[")[2].partition("]")[0]
        if str(rank) in ranks.split("-"):
            file.unlink(missing_ok=True)


class StageWorker(_Worker):  # type: ignore[misc]
    """vLLM's worker; it also frees memory after loading and reports the progress of the start-up."""

    def init_device(self) -> Any:
        """Initialize the device: the first step of the start-up."""
        if (identity := ReplicaIdentity.read()) is not None and identity.parent is not None:
            leave_interrupts_to_parent()  # with tensor parallelism each worker is a process
        with alone():
            made = super().init_device()
        if (name := os.environ.get("VLLM_DIST_IDENT")) is not None:
            _unlink_queues(name, self.rank)
        return made

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Run one step.

        For a seeded request that continues the work of a lost replica, the random generator is advanced past the
        numbers that the lost replica has drawn, before the request is sampled here.
        """
        runner = self.model_runner
        seeded = _seeded(runner, scheduler_output)
        out = super().execute_model(scheduler_output)
        for req_id, drawn in seeded.items():
            _advance(runner, runner.requests[req_id].generator, drawn)
        return out

    def load_model(self, **arguments: Any) -> None:
        """Load the model: the second step of the start-up. The replica's first worker reports the progress."""
        if self.rank == 0:
            report("loading weights")
        super().load_model(**arguments)
        if self.rank == 0:
            report("warming up")

    def compile_or_warm_up_model(self) -> Any:
        """Compile and warm up: the last step of the start-up."""
        if current_platform.is_cuda_alike():  # later, vLLM's monitor would attribute each compilation to a request
            build_last_kernels(self.model_runner)
        times = super().compile_or_warm_up_model()
        if current_platform.is_cuda_alike() and not self.vllm_config.kernel_config.enable_jit_warmup:
            self._warm_up_eager()
        if (warm_up := getattr(self.model_runner.get_model(), "warm_up", None)) is not None:
            warm_up()
        malloc_trim()
        return times

    def _warm_up_eager(self) -> None:
        """Run vLLM's warm-up of Model Runner V2's kernels, which vLLM omits for eager stages."""
        runner = self.model_runner
        if not self.use_v2_model_runner:
            return
        from vllm.v1.worker.gpu.warmup import warmup_kernels

        try:
            warmup_kernels(runner, self.execute_model, self.sample_tokens)
        except Exception:  # the stage can serve, without the requests of the warm-up
            logger.warning("The warm-up has failed: the first request will take longer", exc_info=True)
            end = SchedulerOutput.make_empty()
            end.finished_req_ids = set(runner.req_states.req_id_to_index)
            self.execute_model(end)
            runner.kv_connector.set_disabled(False)

    def transfer_counters(self) -> dict[str, float]:
        """Return this worker's counters of KV transfers since the start, by name; called through `collective_rpc`."""
        if not has_kv_transfer_group():
            return {}
        return get_kv_transfer_group().totals()

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample. With the V1 runner on a CPU, seeded requests whose sample will be discarded draw no random number."""
        if not current_platform.is_cpu() or not hasattr(self.model_runner, "input_batch"):
            return super().sample_tokens(grammar_output)
        with _without_draws(self.model_runner):
            return super().sample_tokens(grammar_output)


def _seeded(runner: Any, step: SchedulerOutput) -> dict[str, int]:
    """Return, by request id, the number of tokens that a lost replica has sampled for a new seeded request.

    The result is empty for Model Runner V2, whose random numbers depend on seed and position, not on a generator.
    """
    known = getattr(runner, "requests", None)
    if known is None:
        return {}
    seeded = {}
    for new in step.scheduled_new_reqs:
        params = new.sampling_params
        if params is None or params.sampling_type != SamplingType.RANDOM_SEED or new.req_id in known:
            continue
        if drawn := generated_before(params.extra_args or {}):
            seeded[new.req_id] = drawn
    return seeded


def _advance(runner: Any, generator: torch.Generator, draws: int) -> None:
    """Bring a generator into the state that it has after vLLM's sampler has sampled `draws` tokens with it."""
    sampler = runner.sampler.topk_topp_sampler
    logits = torch.zeros((1, runner.input_batch.vocab_size), dtype=torch.float32, device=generator.device)
    for _ in range(draws):
        sampler(logits, {0: generator}, None, None)


@contextmanager
def _without_draws(runner: Any) -> Iterator[None]:
    """Remove the generators of requests whose sample vLLM will discard, until the `with` block ends.

    vLLM samples for such requests and then rewinds their generators. CPU generators cannot be rewound: the engine would
    crash.
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


class HiddenStatesExportWorker(StageWorker):
    """Exports hidden states of chosen prompt positions to the next stage and attaches their address to the output.

    Steps without exporting requests run as in vLLM's worker. No step waits for the copy of hidden states to the host or
    for the connector: `ExportQueue` has a thread for both. `additional_config["exported_layer"]` of the engine sets
    the layer. A subclass may override `layer_to_export` to read the layer from the checkpoint's config, or to
    export the model's output.
    """

    edge = ""
    """Name of the edge over which the hidden states are sent; "": the stage's only outgoing edge."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._exporter = Exporter()
        self._layer: ExportedLayer | None = None
        self._sender = edge_sender(self.vllm_config.additional_config, self.edge)
        self._queue = ExportQueue(self._sender, HostCopies(None))

    def layer_to_export(self) -> int | None:
        """Return the number of layers after which the hidden states are taken, 0 = the input embeddings.

        None: the hidden states after the whole model, from which it samples; every model supports None.

        Raises:
            ConfigError: `additional_config` does not name the layer.
        """
        layer = self.vllm_config.additional_config.get(EXPORTED_LAYER)
        if layer is None:
            raise ConfigError(f"additional_config.{EXPORTED_LAYER}: a stage that exports hidden states needs it")
        return int(layer)

    def load_model(self, **kwargs: Any) -> None:
        """Load the model, and prepare the exported layer before the model is compiled or captured."""
        layer = self.layer_to_export()
        if layer is not None:
            self.vllm_config.additional_config = {**self.vllm_config.additional_config, EXPORTED_LAYER: layer}
        super().load_model(**kwargs)
        if layer is not None:
            self._layer = ExportedLayer(self.model_runner, self.vllm_config, layer)
        if current_platform.is_cuda_alike() and _answers():
            self._queue = ExportQueue(self._sender, HostCopies(CudaStreams(self.device)))

    def handoff_steps(self) -> int:
        """Return the number of steps in which this worker exported hidden states (read through `collective_rpc`)."""
        return self._exporter.steps

    def forget_hidden_states(self, names: Sequence[str]) -> None:
        """Free stored hidden states that no stage will receive; called through `collective_rpc`.

        Args:
            names: names in the connector (`HiddenStatesChunkReady.name`).
        """
        self._queue.forget(names)

    def hidden_states_held(self) -> int | None:
        """Return the number of requests with stored hidden states; called through `collective_rpc`.

        None: this worker has exported no hidden states yet.
        """
        return self._queue.held()

    def hidden_states_kept(self) -> int:
        """Return the number of prompt blocks whose hidden states are kept; called through `collective_rpc`."""
        return self._queue.kept()

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Run one step; a step with hidden states to export also computes the exported layer's output."""
        ended = [req_id for req_id in scheduler_output.finished_req_ids if self._exporter.drop(req_id)]
        for new in scheduler_output.scheduled_new_reqs:
            if new.sampling_params is not None and new.sampling_params.extra_args:
                extra = new.sampling_params.extra_args
                self._exporter.add(new.req_id, export_ranges(extra), exported_before(extra))
        changes: StepChanges = getattr(scheduler_output, "kept", None) or StepChanges()
        restored = self._restore(changes)
        spans = spans_of(list(scheduler_output.num_scheduled_tokens), scheduler_output)
        if self._exporter.due(spans):
            out, slices = self._execute_exporting(scheduler_output)
        else:
            out, slices = super().execute_model(scheduler_output), {}
        if _answers():
            orphaned = getattr(scheduler_output, "orphaned", ())
            self._queue.submit(
                StepExports(ended, orphaned, restored, slices, self._rows_to_keep(slices, changes), changes.free)
            )
        return out

    def _restore(self, changes: StepChanges) -> dict[str, Restored]:
        """Return, by request id, the exported hidden states that are read from kept blocks and not computed."""
        restored = {}
        for req_id, (start, slots) in changes.restore.items():
            if (found := self._exporter.restore(req_id, start)) is not None:
                restored[req_id] = Restored(found[0], slots, found[1])
        return restored

    def _rows_to_keep(
        self, computed: dict[str, ExportedSlice], changes: StepChanges
    ) -> dict[str, list[tuple[slice, int]]]:
        """Return, by request id, (rows of the computed hidden states, slot) for each block in which rows are kept."""
        keep: dict[str, list[tuple[slice, int]]] = {}
        for req_id, new in computed.items():
            for start, stop, slot in changes.keep.get(req_id, ()):
                rows = self._exporter.rows(req_id, start, stop)
                keep.setdefault(req_id, []).append((slice(rows.start - new.first, rows.stop - new.first), slot))
        return keep

    def _execute_exporting(self, step: SchedulerOutput) -> tuple[Any, dict[str, ExportedSlice]]:
        runner, layer = self.model_runner, self._layer
        with nullcontext() if layer is None else layer.exposed():
            out = super().execute_model(step)
        hidden = runner.execute_model_state.hidden_states if layer is None else layer.take()
        state = runner.execute_model_state
        order = list(state.input_batch.req_ids) if hasattr(state, "input_batch") else _v1_order(runner)
        return out, self._exporter.cut(spans_of(order, step), hidden)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample, and attach the messages about the hidden states that this step exported, when they are stored."""
        out, exported = super().sample_tokens(grammar_output), self._queue.take()
        if exported is None:
            return out
        if isinstance(out, AsyncModelRunnerOutput):
            return WithOutputs(out, exported)
        return with_outputs(out, exported())


def _answers() -> bool:
    """Return whether the engine reads this worker's output.

    Only that worker stores hidden states for the next stage, since the hidden states are equal in all workers of a
    replica.
    """
    return get_pp_group().is_last_rank and get_tp_group().is_first_rank


class StreamingInputWorker(StageWorker):
    """Runs a `StreamingInputModel`, whose `InputProvider` makes the input embeddings and the stage's outputs.

    The scheduler (`scheduler.StreamingInput`) receives chunks and hidden states, and attaches them to the steps that
    use them. A step without these attributes is one of vLLM's warm-up steps (V2 runs them through the worker) and runs
    as in vLLM's worker.
    """

    _warming_up = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._receiving: set[str] | None = None
        self._errors: dict[str, torch.Tensor] = {}

    @property
    def _model(self) -> StreamingInputModel:
        return self.model_runner.get_model()  # type: ignore[no-any-return]

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model and allocate its permanent buffers, before vLLM measures the memory."""
        super().load_model(*args, **kwargs)
        self._model.after_load()

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Pass the step's requests, chunks and hidden states to the model's input provider, then run the step."""
        self._warming_up = not hasattr(scheduler_output, "chunks")
        if self._warming_up:
            return super().execute_model(scheduler_output)
        model = self._model
        for req_id in scheduler_output.finished_req_ids:
            self._close(req_id)
        for new in scheduler_output.scheduled_new_reqs:
            self._open(new.req_id, new.sampling_params)
        for req_id, chunks in scheduler_output.chunks.items():
            for chunk in chunks:
                if chunk.payload is not None:
                    model.input_provider.extend(req_id, self._payload(chunk))
        for req_id, arrived in scheduler_output.arrived.items():
            self._receive(req_id, arrived)
        model.begin_step(
            rows=lambda order: model.input_provider.rows(
                spans_of(list(order) if order else _v1_order(self.model_runner), scheduler_output)
            ),
            opened=[new.req_id for new in scheduler_output.scheduled_new_reqs],
        )
        try:
            return super().execute_model(scheduler_output)
        finally:
            model.end_step()

    def hidden_states_open(self) -> int | None:
        """Return the number of requests that have received hidden states; called through `collective_rpc`.

        None: this worker has received no hidden states yet.
        """
        return None if self._receiving is None else len(self._receiving)

    def _open(self, req_id: str, params: Any) -> None:
        stage_input, _ = StageInput.of(params.extra_args)
        self._model.input_provider.open(req_id, self._payload(stage_input), stage_input.hidden_spans, params)

    def _close(self, req_id: str) -> None:
        self._model.input_provider.close(req_id)
        if self._receiving is not None:
            self._receiving.discard(req_id)
        self._errors.pop(req_id, None)

    def _payload(self, stage_input: StageInput) -> Any:
        payloads = self._model.input_provider.payloads
        return None if stage_input.payload is None else msgspec.convert(stage_input.payload, payloads)

    def _receive(self, req_id: str, arrived: Sequence[torch.Tensor | Lost]) -> None:
        """Pass arrived hidden states of a request to the input provider.

        A request whose hidden states are lost (`Lost`) ends with an error after this step.
        """
        if self._receiving is None:
            self._receiving = set()
        self._receiving.add(req_id)
        for found in arrived:
            if isinstance(found, Lost):
                self._errors[req_id] = pack(StageError(found.reason))
                self._model.input_provider.blank(req_id)
            else:
                self._model.input_provider.add_hidden_states(req_id, found)

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample, then attach the outputs that the input provider computes from the sampled tokens."""
        out = super().sample_tokens(grammar_output)
        if self._warming_up:
            return out
        if isinstance(out, AsyncModelRunnerOutput):
            out = out.get_output()
        if out is None or not out.req_ids:
            return out
        model = self._model
        assert model.sampled_hidden is not None, "a step that samples has computed logits"
        made = model.input_provider.sampled(out.req_ids, out.sampled_token_ids, model.sampled_hidden)
        by_request = dict(zip(out.req_ids, made, strict=True))
        out.ended = [r for r, each in by_request.items() if isinstance(each, Ended)]
        tensors = {r: each.output if isinstance(each, Ended) else each for r, each in by_request.items()}
        made_by = {r: tensor for r, tensor in tensors.items() if tensor is not None}
        return with_outputs(out, made_by | {r: self._errors[r] for r in out.req_ids if r in self._errors})
