"""The vocoder as a vLLM model: codec frames in as prompt tokens, a waveform out, on vLLM's pooling runner.

A request's prompt is its frames, flattened frame by frame: `[frame 0 group 0, frame 0 group 1, ..., frame 1 group 0,
...]`, plain codes in `0 .. codebook_size - 1`. Its `PoolingParams` are `task=POOLING_TASK` and
`extra_kwargs={"last": True}`; its output is the whole utterance, `[samples]` float32.

The work is done in the pooler: `forward` has nothing to compute, and the pooler is what sees whole requests.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.pooler import PoolingParamsUpdate
from vllm.model_executor.layers.pooler.abstract import Pooler
from vllm.model_executor.models.interfaces import IsAttentionFree
from vllm.pooling_params import PoolingParams
from vllm.tasks import PoolingTask
from vllm.v1.pool.metadata import PoolingMetadata

from vllm_omni_ext.model_plugins.qwen3_omni.flow import POOLING_TASK
from vllm_omni_ext.model_plugins.qwen3_omni.vocoder import Vocoder

logger = init_logger(__name__)

CHECKPOINT_PREFIX = "code2wav."

WARM_UP_FRAMES = 16
"""Frames decoded when vLLM profiles the model or warms it up."""


class WaveformPooler(Pooler):
    """Decodes all requests of a step in one call of the vocoder."""

    def __init__(self, vocoder: Vocoder):
        super().__init__()
        self.vocoder = vocoder

    def get_supported_tasks(self) -> set[PoolingTask]:
        """The one task of this stage."""
        return {POOLING_TASK}

    def get_pooling_updates(self, task: PoolingTask) -> PoolingParamsUpdate:
        """Ask the runner for the prompt's token ids, on the CPU."""
        return PoolingParamsUpdate(requires_token_ids=True)

    def forward(self, hidden_states: Tensor, pooling_metadata: PoolingMetadata) -> list[Tensor]:
        """Return for each request its waveform, `[samples]` float32; empty for what cannot be decoded.

        A step holds whole requests: vLLM turns chunked prefill off for models without attention. `hidden_states` is
        not used.
        """
        if all(_is_warm_up(params) for params in pooling_metadata.pooling_params):
            return self._warm_up(len(pooling_metadata.pooling_params))
        prompts = pooling_metadata.get_prompt_token_ids_cpu()
        frames = [self._frames(ids, p) for ids, p in zip(prompts, pooling_metadata.pooling_params, strict=True)]
        states = [self.vocoder.new_state() for _ in frames]
        return self.vocoder.decode(frames, states, [True] * len(frames))

    def _frames(self, token_ids: Tensor, params: PoolingParams) -> Tensor:
        """A prompt as `[frames, groups]` int64; no frames at all for a prompt that cannot be decoded.

        An exception here would end the engine with every other request in it, and an unknown code would do the same
        on a GPU, so such a prompt is reported and gets an empty waveform (a waveform of any frame is not empty).
        """
        groups, size = self.vocoder.groups, self.vocoder.codebook_size
        codes = token_ids.long()
        problem = None
        if params.extra_kwargs != {"last": True}:
            problem = f"extra_kwargs is {params.extra_kwargs}, not {{'last': True}}"
        elif len(codes) % groups:
            problem = f"{len(codes)} codes are no whole number of frames of {groups}"
        elif len(codes) and not 0 <= int(codes.min()) <= int(codes.max()) < size:
            problem = f"codes reach from {int(codes.min())} to {int(codes.max())}, allowed are 0 to {size - 1}"
        if problem is None:
            return codes.unflatten(0, (-1, groups))
        logger.error("code2wav: a request is answered without sound: %s", problem)
        return codes.new_empty(0, groups)

    def _warm_up(self, requests: int) -> list[Tensor]:
        """Run every kernel once. The runner's dummy batch is as long as `max_num_batched_tokens`, which would take
        minutes on a slow device and tell nothing more: memory is bounded by the vocoder's own passes."""
        codes = torch.zeros(WARM_UP_FRAMES, self.vocoder.groups, dtype=torch.int64)
        (wave,) = self.vocoder.decode([codes], [self.vocoder.new_state()], [True])
        return [wave.new_empty(0) for _ in range(requests)]


class Qwen3OmniCode2Wav(nn.Module, IsAttentionFree):
    """The pooling model vLLM runs for the code2wav stage; its configuration is the checkpoint's `code2wav_config`."""

    is_pooling_model = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        self.pooler = WaveformPooler(Vocoder(vllm_config.model_config.hf_config))

    @staticmethod
    def is_unused_checkpoint_weight(name: str) -> bool:
        """Lets vLLM's loader leave out the checkpoint files that hold no tensor of this stage."""
        return not name.startswith(CHECKPOINT_PREFIX)

    @staticmethod
    def get_model_state_cls() -> type:
        """Keep vLLM's V2 model runner from taking a model without attention for a Mamba model."""
        from vllm.v1.worker.gpu.model_states.default import DefaultModelState

        return DefaultModelState

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Part of vLLM's model interface; there is nothing to embed here."""
        return self._nothing(input_ids.shape[0], input_ids.device)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: object = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: object,
    ) -> Tensor:
        """One number per scheduled token, `[tokens, 1]`, for the runner to slice; the pooler does the work."""
        return self._nothing(positions.shape[-1], positions.device)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Take the `code2wav.*` tensors of the whole checkpoint.

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
                raise ValueError(f"the checkpoint's {name} has shape {given}; the configuration says {wanted}")
            parameters[inner].data.copy_(tensor)
            loaded.add(inner)
        if missing := sorted(parameters.keys() - loaded):
            names = ", ".join(CHECKPOINT_PREFIX + name for name in missing[:5])
            raise ValueError(f"the checkpoint lacks {len(missing)} tensors of the vocoder, e.g. {names}")
        return {f"pooler.vocoder.{name}" for name in loaded}

    def _nothing(self, tokens: int, device: torch.device) -> Tensor:
        return torch.zeros(tokens, 1, dtype=self.pooler.vocoder.code_embedding.weight.dtype, device=device)


def _is_warm_up(params: PoolingParams) -> bool:
    """Whether vLLM itself made this request, to measure memory or to compile: ours always say `last`."""
    return params.extra_kwargs is None
