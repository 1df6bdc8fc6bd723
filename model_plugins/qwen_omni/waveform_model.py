"""Base class of the last stage, which converts codec frames to sound on vLLM's pooling runner.

An utterance is a stream of engine requests, its parts. A part is computed in one step. The prompt of a part is its
frames, flattened: `[frame 0 group 0, frame 0 group 1, ..., frame 1 group 0, ...]`. The `PoolingParams` of a part are
`task=POOLING_TASK` and the `extra_kwargs` of a `wire.stage_input.PartHeader`. The output of a part is a tensor of the
samples that became final with it, `[samples]` float32, or a `wire.envelope.StageError`.

The pooler receives whole requests, decodes them, and keeps the state of streams between parts; `forward` returns zeros.
The parts of a stream are decoded in order: a later part is never due before an earlier part, a prompt is never split
(vLLM turns chunked prefill off for models without attention), and without a KV cache no request is preempted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.pooler import PoolingParamsUpdate
from vllm.model_executor.layers.pooler.abstract import Pooler
from vllm.model_executor.models.interfaces import IsAttentionFree
from vllm.tasks import PoolingTask
from vllm.v1.pool.metadata import PoolingMetadata

from vllm_omni_ext.config.schema import STREAM_IDLE_TIMEOUT_S, Timeouts
from vllm_omni_ext.model_plugins.qwen_omni.part_streams import Answer, PartStreams
from vllm_omni_ext.model_plugins.qwen_omni.pooling import POOLING_TASK
from vllm_omni_ext.wire.envelope import StageError, pack
from vllm_omni_ext.wire.stage_input import PartHeader

logger = init_logger(__name__)


class WaveformPooler(Pooler):
    """Decodes all requests of a step in one call.

    Args:
        vocoder: the module with the checkpoint's weights. It has `groups`, the number of codes in a frame, and
            `codebook_size`: every code is in `0 .. codebook_size - 1`.
        streams: decodes the parts with `vocoder`.
        try_out: decodes a few frames. It is called when vLLM profiles the model or warms it up, instead of decoding the
            runner's dummy batch of `max_num_batched_tokens` codes, which would take minutes on a slow device.
    """

    def __init__(self, vocoder: nn.Module, streams: PartStreams, *, try_out: Callable[[], Any]) -> None:
        super().__init__()
        self.vocoder: Any = vocoder
        self.streams = streams
        self._try_out = try_out

    def get_supported_tasks(self) -> set[PoolingTask]:
        """Return the only pooling task that the stage supports, `POOLING_TASK`."""
        return {POOLING_TASK}

    def get_pooling_updates(self, task: PoolingTask) -> PoolingParamsUpdate:
        """Make the runner pass the prompt's token ids to the pooler, on the CPU."""
        return PoolingParamsUpdate(requires_token_ids=True)

    def forward(self, hidden_states: Tensor, pooling_metadata: PoolingMetadata) -> list[Tensor]:
        """Return for each request its samples, `[samples]` float32, or a packed `StageError` if it cannot be decoded.

        Invalid requests raise no exception, which would end the engine with all its requests; an invalid code on a GPU
        would do so too. `hidden_states` is not used.
        """
        params = pooling_metadata.pooling_params
        if all(each.extra_kwargs is None for each in params):  # vLLM profiles memory, or warms up
            self._try_out()
            return [torch.empty(0) for _ in params]
        answers: list[Answer] = []
        headers, chunks, places = [], [], []
        for ids, each in zip(pooling_metadata.get_prompt_token_ids_cpu(), params, strict=True):
            try:
                headers.append(PartHeader.of(each.extra_kwargs))
            except msgspec.ValidationError as error:
                answers.append(f"extra_kwargs: {error}")
                continue
            chunks.append(self._frames(ids[:0] if headers[-1].empty else ids))
            places.append(len(answers))
            answers.append("")
        for place, answer in zip(places, self.streams.decode(headers, chunks), strict=True):
            answers[place] = answer
        return [_packed(answer) for answer in answers]

    def _frames(self, token_ids: Tensor) -> Tensor | str:
        """Return the codes of a prompt as `[frames, groups]` int64, or an error text if they are invalid."""
        groups, size = self.vocoder.groups, self.vocoder.codebook_size
        codes = token_ids.long()
        if len(codes) % groups:
            return f"{len(codes)} codes are no whole number of frames of {groups}"
        if len(codes) and not 0 <= int(codes.min()) <= int(codes.max()) < size:
            return f"codes reach from {int(codes.min())} to {int(codes.max())}, allowed are 0 to {size - 1}"
        return codes.unflatten(0, (-1, groups))


class WaveformModel(nn.Module, IsAttentionFree):
    """Base class of the pooling models that vLLM runs for a stage that converts codes to sound.

    A subclass creates `pooler` with its vocoder, and sets `checkpoint_prefix`.
    """

    is_pooling_model = True
    pooler: WaveformPooler

    checkpoint_prefix = ""
    """Beginning of the names of the stage's tensors in the checkpoint, which contains all stages; e.g. "code2wav."."""

    def __init__(self, *, vllm_config: VllmConfig) -> None:
        super().__init__()
        additional = vllm_config.additional_config
        self.idle_s: float = additional.get(STREAM_IDLE_TIMEOUT_S, Timeouts().stream_idle_timeout_s)

    @classmethod
    def is_unused_checkpoint_weight(cls, name: str) -> bool:
        """Return whether vLLM's loader may skip checkpoint files that contain only tensors of this name."""
        return not name.startswith(cls.checkpoint_prefix)

    @staticmethod
    def get_model_state_cls() -> type:
        """Return vLLM's default model state; else Model Runner V2 would take a model without attention for Mamba."""
        from vllm.v1.worker.gpu.model_states.default import DefaultModelState

        return DefaultModelState

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Return zeros [tokens, 1]: vLLM's model interface has this method, but codes are not embedded here."""
        return self._nothing(input_ids.shape[0], input_ids.device)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: object = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: object,
    ) -> Tensor:
        """Return zeros `[tokens, 1]`, which the runner divides among the requests; the pooler decodes the frames."""
        return self._nothing(positions.shape[-1], positions.device)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the tensors whose names begin with `checkpoint_prefix`; return the names of the loaded parameters.

        Raises:
            ValueError: a tensor has the wrong shape or no place in the model, or a parameter has no tensor.
        """
        stage = self.checkpoint_prefix.removesuffix(".")
        parameters = dict(self.pooler.vocoder.named_parameters())
        loaded = set()
        for name, tensor in weights:
            if self.is_unused_checkpoint_weight(name):
                continue
            inner = name.removeprefix(self.checkpoint_prefix)
            if inner not in parameters:
                raise ValueError(f"the checkpoint's {name} has no place in the model of {stage}")
            if parameters[inner].shape != tensor.shape:
                wanted, given = tuple(parameters[inner].shape), tuple(tensor.shape)
                raise ValueError(f"the checkpoint's {name} has shape {given}; the configuration expects {wanted}")
            parameters[inner].data.copy_(tensor)
            loaded.add(inner)
        if missing := sorted(parameters.keys() - loaded):
            names = ", ".join(self.checkpoint_prefix + name for name in missing[:5])
            raise ValueError(f"the checkpoint lacks {len(missing)} tensors of {stage}, e.g. {names}")
        return {f"pooler.vocoder.{name}" for name in loaded}

    def _nothing(self, tokens: int, device: torch.device) -> Tensor:
        return torch.zeros(tokens, 1, dtype=next(self.parameters()).dtype, device=device)


def _packed(answer: Answer) -> Tensor:
    if isinstance(answer, Tensor):
        return answer
    error = StageError(answer) if isinstance(answer, str) else answer
    logger.error("a request for sound is answered with an error: %s", error.reason)
    return pack(error)
