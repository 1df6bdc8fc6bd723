"""The stage `dit`: generates pictures. In the pipeline `bagel_single`, it also reads pictures and generates text."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from vllm.model_executor.models.interfaces import SupportsMultiModal
from vllm.multimodal import MULTIMODAL_REGISTRY

from vllm_omni_ext.engine.plain_stage import Answer, PlainModel, PlainRequest
from vllm_omni_ext.model_plugins.bagel.checkpoint import empty_bagel, load_bagel
from vllm_omni_ext.model_plugins.bagel.denoise import Denoiser, RunningImage, begin, finish
from vllm_omni_ext.model_plugins.bagel.model import Bagel
from vllm_omni_ext.model_plugins.bagel.parameters import image_parameters
from vllm_omni_ext.model_plugins.bagel.prompts import Prompts
from vllm_omni_ext.model_plugins.bagel.requests.payloads import Draw
from vllm_omni_ext.model_plugins.bagel.stages.cuda_attention import attention_for
from vllm_omni_ext.model_plugins.bagel.stages.drawing import Drawing
from vllm_omni_ext.model_plugins.bagel.stages.files import checkpoint_directory
from vllm_omni_ext.model_plugins.bagel.stages.processor import PAD, PictureDummies, PictureInfo, PictureProcessor
from vllm_omni_ext.model_plugins.bagel.stages.reply import Reply
from vllm_omni_ext.model_plugins.bagel.text import next_logits
from vllm_omni_ext.wire.envelope import StageError

log = logging.getLogger(__name__)


Job: TypeAlias = Drawing | Reply
"""State of a request in the stage. The next work of a request is a turn, i.e. a prefill or a decoding with the
autoencoder (`needs_turn`), a denoise step (`denoises`), or a token of a text (`writes`)."""

_FATAL = (torch.AcceleratorError,)
"""Errors after which the device cannot be used: the engine ends, and its supervisor starts it again."""


class BagelDit(PlainModel):
    """Generates pictures; a denoise step computes all running pictures together.

    An engine step computes at most one turn (prefill or autoencoder) of one request, then one denoise step of all
    running pictures, then one token of each running text. A request that decodes a preview or a picture has no
    other work in that step.

    Attributes:
        bagel: the model; set by `load_weights`, or at once with `load_format: dummy`.
    """

    payloads = Draw
    bagel: Bagel

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        self._config = vllm_config
        self._jobs: dict[str, Job] = {}
        if vllm_config.load_config.load_format == "dummy":  # vLLM fills all parameters and does not call load_weights
            self._read(empty_bagel)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Read the checkpoint's files without `weights`: vLLM's loader cannot select the files of the model."""
        self._read(load_bagel)
        return {f"bagel.{name}" for name, _ in self.bagel.named_parameters()}

    def _read(self, read: Callable[..., Bagel]) -> None:
        config, device = self._config.model_config, self._config.device_config.device
        self.bagel = read(checkpoint_directory(config), dtype=config.dtype, device=device)
        llm = self.bagel.llm
        llm.attention = attention_for(self.bagel.device, self.bagel.dtype, llm.sizes.head_dim)
        self._denoiser = Denoiser(self.bagel)

    def warm_up(self) -> None:
        """Compile and warm up on a GPU. The environment variable TORCH_COMPILE_DISABLE=1 turns compilation off."""
        if self.bagel.device.type != "cpu":
            warm_up(self.bagel, compiled=True)

    def open(self, request: PlainRequest) -> None:
        if request.payload is None:
            raise ValueError("the stage makes pictures: a request needs the message Draw")
        self._jobs[request.req_id] = Drawing(self.bagel, request.payload, request.waited)

    def close(self, req_id: str) -> None:
        self._jobs.pop(req_id, None)

    def step(self, req_ids: Sequence[str]) -> Mapping[str, Answer]:
        answers = self._turn(req_ids)
        answers |= self._together(self._denoise, [r for r in req_ids if r not in answers and self._jobs[r].denoises])
        answers |= self._together(self._write, [r for r in req_ids if r not in answers and self._jobs[r].writes])
        if self.bagel.device.type != "cpu":
            torch.accelerator.synchronize(self.bagel.device)  # else progress would be sent before its work is done
        return answers

    def _turn(self, req_ids: Sequence[str]) -> dict[str, Answer]:
        """Compute the turn of the first request that needs one; that request is then the last in the order of turns.

        Returns:
            the request's answer by its id; empty if there is no answer, or no request needs a turn.
        """
        known = set(req_ids)
        req_id = next((r for r, each in self._jobs.items() if r in known and each.needs_turn), None)
        if req_id is None:
            return {}
        job = self._jobs[req_id] = self._jobs.pop(req_id)
        return _attributed(req_id, job.turn)

    def _together(
        self, work: Callable[[Sequence[str]], dict[str, Answer]], req_ids: Sequence[str]
    ) -> dict[str, Answer]:
        """Call `work` for all requests together, and return their answers by request id.

        After an exception, `work` is called for each request separately, so that only the faulty requests fail.
        """
        if not req_ids:
            return {}
        try:
            return work(req_ids)
        except _FATAL:
            raise
        except Exception as error:
            if len(req_ids) == 1:
                return {req_ids[0]: _failed(req_ids[0], error)}
        answers: dict[str, Answer] = {}
        for req_id in req_ids:
            answers |= self._together(work, [req_id])
        return answers

    def _denoise(self, req_ids: Sequence[str]) -> dict[str, Answer]:
        drawings = [job for req_id in req_ids if isinstance(job := self._jobs[req_id], Drawing)]
        evaluations = self._denoiser.step([each.image for each in drawings if each.image is not None])
        return {r: each.denoised(done) for r, each, done in zip(req_ids, drawings, evaluations, strict=True)}

    def _write(self, req_ids: Sequence[str]) -> dict[str, Answer]:
        jobs = [self._jobs[req_id] for req_id in req_ids]
        rows = next_logits(self.bagel, [job.text for job in jobs if job.text is not None])
        answers: dict[str, Answer] = {}
        for req_id, job, row in zip(req_ids, jobs, rows, strict=True):
            answers |= _attributed(req_id, partial(job.wrote, row))
        return answers


@MULTIMODAL_REGISTRY.register_processor(PictureProcessor, info=PictureInfo, dummy_inputs=PictureDummies)
class BagelSingle(BagelDit, SupportsMultiModal):
    """Generates pictures for `Draw` messages, and generates text for ordinary requests of vLLM, token by token."""

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        """Return the placeholder text of a picture in a chat's prompt."""
        if modality.startswith("image"):
            return PAD
        raise ValueError(f"{modality}: only pictures can be read")

    def open(self, request: PlainRequest) -> None:
        if request.payload is not None:
            return super().open(request)
        self._jobs[request.req_id] = Reply(self.bagel, request)


def _attributed(req_id: str, work: Callable[[], Answer | None]) -> dict[str, Answer]:
    """Call `work` of one request; return its answer by request id. An exception ends the request with an error."""
    try:
        answer = work()
    except _FATAL:
        raise
    except Exception as error:
        answer = _failed(req_id, error)
    return {} if answer is None else {req_id: answer}


def _failed(req_id: str, error: Exception) -> Answer:
    """Return the answer of a request that an exception has ended; the client receives the exception's message.

    An exception other than ValueError is also logged.
    """
    if isinstance(error, ValueError):
        return Answer(StageError(str(error)))
    log.error("request %s failed", req_id, exc_info=error)
    return Answer(StageError(f"{type(error).__name__}: {error}"))


def warm_up(model: Bagel, *, compiled: bool) -> None:
    """Generate pictures of the smallest size, first one and then two together, so that kernels are compiled.

    Args:
        model: the model with its weights.
        compiled: compile the layers first. If that fails, the reason is logged, and the layers run without compilation.
    """
    if compiled:
        model.llm.compile_layers()
        try:
            _make(model)
            return
        except Exception as error:  # a compiler may fail in many ways, and the model works without one
            log.warning("the layers cannot be compiled, so their operators run one by one: %s", error)
            model.llm.do_not_compile_layers()
    _make(model)


def _make(model: Bagel) -> None:
    denoiser = Denoiser(model)
    denoiser.step([_smallest(model)])
    pictures = [_smallest(model), _smallest(model)]
    denoiser.step(pictures)
    finish(model, pictures[0])


def _smallest(model: Bagel) -> RunningImage:
    """Begin a picture of one latent token and one denoise step."""
    side = model.sizes.token_pixels
    parameters = image_parameters({"height": side, "width": side, "num_timesteps": 2}, edit=False)
    return begin(model, Prompts(model.tokens, model.sizes).image(["."]), parameters)
