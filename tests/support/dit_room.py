"""The stage `dit` without an engine: its scheduler and its worker, step by step, in one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.request import Request

from vllm_omni_ext.engine.plain_stage import PlainWorker
from vllm_omni_ext.model_plugins.bagel.images import resize, to_rgb
from vllm_omni_ext.model_plugins.bagel.model import Bagel
from vllm_omni_ext.model_plugins.bagel.parameters import ImageParameters
from vllm_omni_ext.model_plugins.bagel.prompts import Part
from vllm_omni_ext.model_plugins.bagel.requests import payloads
from vllm_omni_ext.model_plugins.bagel.requests.payloads import DitParams, Draw, Drawn, Picture, Preview, Text
from vllm_omni_ext.model_plugins.bagel.stages.dit import BagelDit
from vllm_omni_ext.model_plugins.bagel.stages.scheduler import DitScheduler
from vllm_omni_ext.wire.envelope import unpack
from vllm_omni_ext.wire.stage_input import FILLER, PART, PartHeader

CLOSE = 1e-4


def config_of(checkpoint: Path, *, seats: int = 8, rows: int = 32768) -> Any:
    """The part of vLLM's config that the stage reads."""
    return SimpleNamespace(
        model_config=SimpleNamespace(model=str(checkpoint), revision=None, dtype=torch.float32, max_model_len=2048),
        load_config=SimpleNamespace(load_format="auto"),
        device_config=SimpleNamespace(device=torch.device("cpu"), device_type="cpu"),
        scheduler_config=SimpleNamespace(
            max_num_seqs=seats, max_num_batched_tokens=rows, async_scheduling=False, policy="fcfs"
        ),
        kv_transfer_config=None,
    )


class Room:
    """The engine's loop: scheduler, worker, and the outputs of each request."""

    def __init__(self, checkpoint: Path, model: type[BagelDit] = BagelDit, **given: Any) -> None:
        config = config_of(checkpoint, **given)
        self.scheduler = DitScheduler(vllm_config=config, log_stats=False)
        self.model = model(vllm_config=config)
        self.model.load_weights(iter(()))
        self.worker = PlainWorker.__new__(PlainWorker)
        self.worker.model_runner = SimpleNamespace(get_model=lambda: self.model)
        self.got: dict[str, list[EngineCoreOutput]] = {}

    def draw(self, name: str, draw: Any) -> None:
        plain = msgspec.msgpack.decode(msgspec.msgpack.encode(draw))  # as it arrives
        header = PartHeader(stream=name, part=0, last=True, empty=True, payload=plain)
        self.add(name, FILLER, SamplingParams(extra_args={PART: header.as_extra()}))

    def add(self, name: str, prompt: list[int], params: SamplingParams, features: Sequence[Any] = ()) -> None:
        self.scheduler.add_request(Request(name, prompt, params, None, mm_features=list(features)))

    def step(self) -> list[EngineCoreOutput]:
        output = self.scheduler.schedule()
        made = self.scheduler.update_from_output(output, self.worker.execute_model(output))
        found = [each for outputs in made.values() for each in outputs.outputs]
        for each in found:
            self.got.setdefault(each.request_id, []).append(each)
        return found

    def run(self) -> None:
        while self.scheduler.has_requests():
            self.step()
        assert not self.model._jobs

    def messages(self, name: str) -> list[Any]:
        found = []
        for each in self.got[name]:
            message = unpack(each.pooling_output)
            if message is None:
                message = msgspec.msgpack.decode(each.pooling_output.numpy().tobytes(), type=payloads.DitAnswer)
            found.append(message)
        return found

    def drawn(self, name: str) -> Drawn:
        last = self.messages(name)[-1]
        assert isinstance(last, Drawn), last
        assert self.got[name][-1].finish_reason == FinishReason.STOP
        return last


def draw_of(model: Bagel, parts: Sequence[Part], parameters: ImageParameters, **given: Any) -> Draw:
    """The message for a prompt of texts and PIL pictures."""
    found: list[payloads.Part] = []
    for part in parts:
        if isinstance(part, str):
            found.append(Text(list(model.tokens.text(part))))
        else:
            small = resize(to_rgb(part), model.sizes.vae_resize)
            found.append(Picture(small.height, small.width, small.tobytes()))
    names = [each.name for each in msgspec.structs.fields(DitParams)]
    return Draw(parts=found, parameters=DitParams(**{name: getattr(parameters, name) for name in names}), **given)


def pixels_of(shown: Drawn | Preview) -> Tensor:
    return torch.from_numpy(np.frombuffer(shown.pixels, np.uint8).copy()).view(shown.height, shown.width, 3)


def latent_of(drawn: Drawn) -> Tensor:
    assert drawn.latent is not None
    return torch.from_numpy(np.frombuffer(drawn.latent, np.float32).copy()).view(-1, 64)


def assert_almost_equal(found: Tensor, expected: Tensor) -> None:
    """Bytes are truncated, so the smallest difference of a latent can change one by 1."""
    off = (found.int() - expected.int()).abs()
    assert off.max() <= 1
    assert (off > 0).float().mean() <= 1e-3
