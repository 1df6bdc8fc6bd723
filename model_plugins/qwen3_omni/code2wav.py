"""The vocoder as a vLLM model: codec frames in as prompt tokens, a waveform out, on vLLM's pooling runner.

An utterance is a stream of requests, its parts, which follow each other in the engine's queue. Each takes one step. A
part's prompt is its frames, flattened: `[frame 0 group 0, frame 0 group 1, ..., frame 1 group 0, ...]`, codes in
`0 .. codebook_size - 1`. Its `PoolingParams` are `task=POOLING_TASK` and the `extra_kwargs` of a
`wire.stage_input.PartHeader`. Its output is a tensor of the samples that became final with the part, `[samples]`
float32, or a `wire.envelope.StageError`.

The pooler receives whole requests, decodes them, and keeps the state of streams between parts; `forward` returns zeros.
The parts of a stream are decoded in order: a later part is never due before an earlier part, a prompt is never split
(vLLM turns chunked prefill off for models without attention), and without a KV cache no request is preempted.
"""

from __future__ import annotations

from collections.abc import Iterable

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
from vllm_omni_ext.engine.graphs import recorder_for
from vllm_omni_ext.model_plugins.qwen3_omni.vocoder import Vocoder
from vllm_omni_ext.model_plugins.qwen3_omni.vocoder_streams import VocoderStreams
from vllm_omni_ext.model_plugins.qwen3_omni.voice import POOLING_TASK
from vllm_omni_ext.wire.envelope import StageError, pack
from vllm_omni_ext.wire.stage_input import PartHeader

logger = init_logger(__name__)

CHECKPOINT_PREFIX = "code2wav."

WARM_UP_FRAMES = 16
"""Frames decoded when vLLM profiles the model or warms it up."""


class WaveformPooler(Pooler):
    """Decodes all requests of a step in one call of the vocoder.

    Args:
        idle_s: the state of a stream is freed when no part has arrived for this many seconds.
    """

    def __init__(self, vocoder: Vocoder, *, idle_s: float):
        super().__init__()
        self.vocoder = vocoder
        self.streams = VocoderStreams(vocoder, idle_s=idle_s)

    def get_supported_tasks(self) -> set[PoolingTask]:
        """Return the only task of this stage."""
        return {POOLING_TASK}

    def get_pooling_updates(self, task: PoolingTask) -> PoolingParamsUpdate:
        """Make the runner pass the prompt's token ids to the pooler, on the CPU."""
        return PoolingParamsUpdate(requires_token_ids=True)

    def forward(self, hidden_states: Tensor, pooling_metadata: PoolingMetadata) -> list[Tensor]:
        """Return for each request its samples, `[samples]` float32, or a packed error if it cannot be decoded.

        An exception in this method would end the engine with all its requests; so would an invalid code on a GPU.
        `hidden_states` is not used.
        """
        params = pooling_metadata.pooling_params
        if all(each.extra_kwargs is None for each in params):  # vLLM profiles memory, or warms up
            return self._warm_up(len(params))
        answers: list[Tensor | str] = []
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
        """Return a prompt as `[frames, groups]` int64, or the reason why it cannot be decoded."""
        groups, size = self.vocoder.groups, self.vocoder.codebook_size
        codes = token_ids.long()
        if len(codes) % groups:
            return f"{len(codes)} codes are no whole number of frames of {groups}"
        if len(codes) and not 0 <= int(codes.min()) <= int(codes.max()) < size:
            return f"codes reach from {int(codes.min())} to {int(codes.max())}, allowed are 0 to {size - 1}"
        return codes.unflatten(0, (-1, groups))

    def _warm_up(self, requests: int) -> list[Tensor]:
        """Run every kernel once, on `WARM_UP_FRAMES` frames; return empty outputs.

        The runner's dummy batch of `max_num_batched_tokens` would take minutes on a slow device. It would not need more
        memory: the vocoder limits the frames of a pass.
        """
        codes = torch.zeros(WARM_UP_FRAMES, self.vocoder.groups, dtype=torch.int64)
        (wave,) = self.vocoder.decode([codes], [self.vocoder.new_state()], [True])
        return [wave.new_empty(0) for _ in range(requests)]


class Qwen3OmniCode2Wav(nn.Module, IsAttentionFree):
    """The pooling model that vLLM runs for the code2wav stage; its config is the checkpoint's `code2wav_config`."""

    is_pooling_model = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        idle_s = vllm_config.additional_config.get(STREAM_IDLE_TIMEOUT_S, Timeouts().stream_idle_timeout_s)
        self.pooler = WaveformPooler(Vocoder(vllm_config.model_config.hf_config), idle_s=idle_s)
        self._streams: int = vllm_config.scheduler_config.max_num_seqs

    def warm_up(self) -> None:
        """Compile kernels and record graphs at the end of the start-up, so that the first request does not wait."""
        vocoder = self.pooler.vocoder
        recorder = recorder_for(vocoder.code_embedding.weight.device, eager=False)
        if recorder is not None:
            vocoder.record(recorder, streams=self._streams)
        vocoder.warm_up()

    @staticmethod
    def is_unused_checkpoint_weight(name: str) -> bool:
        """Return whether vLLM's loader may skip checkpoint files that contain only tensors of this name."""
        return not name.startswith(CHECKPOINT_PREFIX)

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
        """Load the `code2wav.*` tensors of the whole checkpoint.

        Raises:
            ValueError: a tensor has the wrong shape or no place in the model, or a parameter has no tensor.
        """
        vocoder = self.pooler.vocoder
        parameters = dict(vocoder.named_parameters())
        loaded = set()
        for name, tensor in weights:
            if self.is_unused_checkpoint_weight(name):
                continue
            inner = name.removeprefix(CHECKPOINT_PREFIX)
            if inner not in parameters:
                raise ValueError(f"the checkpoint's {name} has no place in the vocoder")
            if parameters[inner].shape != tensor.shape:
                wanted, given = tuple(parameters[inner].shape), tuple(tensor.shape)
                raise ValueError(f"the checkpoint's {name} has shape {given}; the configuration expects {wanted}")
            parameters[inner].data.copy_(tensor)
            loaded.add(inner)
        if missing := sorted(parameters.keys() - loaded):
            names = ", ".join(CHECKPOINT_PREFIX + name for name in missing[:5])
            raise ValueError(f"the checkpoint lacks {len(missing)} tensors of the vocoder, e.g. {names}")
        return {f"pooler.vocoder.{name}" for name in loaded}

    def _nothing(self, tokens: int, device: torch.device) -> Tensor:
        return torch.zeros(tokens, 1, dtype=self.pooler.vocoder.code_embedding.weight.dtype, device=device)


def _packed(answer: Tensor | str) -> Tensor:
    if isinstance(answer, Tensor):
        return answer
    logger.error("code2wav: a request is answered without sound: %s", answer)
    return pack(StageError(answer))
