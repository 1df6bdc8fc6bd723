"""A plain stage in an engine process of vLLM's: its own loader, loop, client and messages."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.support.stage_engine import stage_engine
from vllm_omni_ext.engine.plain_stage import Answer, PlainModel, PlainRequest
from vllm_omni_ext.runtime.client.replica import forget_request
from vllm_omni_ext.wire.envelope import StageError, StageProgress, unpack
from vllm_omni_ext.wire.stage_input import FILLER, PART, PartHeader

pytestmark = pytest.mark.engine

ARCHITECTURE = "PlainPainter"
HERE = "vllm_omni_ext.engine.plain_stage"
ANSWER_TIMEOUT_S = 120.0
ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "WARNING"}
CONFIG = {
    "architectures": [ARCHITECTURE],
    "model_type": "qwen2",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 16,
    "torch_dtype": "float32",
}


class Paint(msgspec.Struct, frozen=True):
    """The flow's message."""

    seed: int


class PaintParams(msgspec.Struct, frozen=True):
    """The stage's own parameters."""

    steps: int


class Painter(PlainModel):
    """Multiplies noise by a weight, step by step; a stage whose result can be computed by hand."""

    payloads, params = Paint, PaintParams

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3), requires_grad=False)
        self._pictures: dict[str, tuple[Tensor, int, int]] = {}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        for _, tensor in weights:
            self.weight.data.copy_(tensor)
        return {"weight"}

    def open(self, request: PlainRequest) -> None:
        noise = torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(request.payload.seed))
        self._pictures[request.req_id] = noise, 0, request.params.steps

    def step(self, req_ids: Sequence[str]) -> Mapping[str, Answer]:
        return {req_id: self._step(req_id) for req_id in req_ids}

    def _step(self, req_id: str) -> Answer:
        picture, done, steps = self._pictures[req_id]
        picture, done = picture * self.weight, done + 1
        self._pictures[req_id] = picture, done, steps
        return Answer(StageProgress(done, steps)) if done < steps else Answer(picture, last=True)

    def close(self, req_id: str) -> None:
        self._pictures.pop(req_id, None)


WEIGHT = torch.tensor([0.5, 2.0, 1.0])


def expected(seed: int, steps: int) -> Tensor:
    return torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(seed)) * WEIGHT**steps


@asynccontextmanager
async def painter(checkpoint: Path) -> AsyncIterator[Any]:
    """vLLM's client of a running engine."""
    from vllm.model_executor.models import ModelRegistry

    (checkpoint / "config.json").write_text(json.dumps(CONFIG))
    save_file({"weight": WEIGHT}, checkpoint / "model.safetensors")
    ModelRegistry.register_model(ARCHITECTURE, f"{__name__}:Painter")
    async with stage_engine(
        model=str(checkpoint),
        worker_cls=f"{HERE}.PlainWorker",
        scheduler_cls=f"{HERE}.PlainScheduler",
        async_scheduling=False,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        enforce_eager=True,
        max_num_seqs=2,
    ) as client:
        yield client


def request(name: str, seed: Any, steps: int) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    part = PartHeader(stream=name, part=0, last=True, empty=True, payload={"seed": seed}, params={"steps": steps})
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=FILLER,
        mm_features=None,
        sampling_params=SamplingParams(extra_args={PART: part.as_extra()}),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


async def answers(client: Any, names: set[str]) -> dict[str, list[Any]]:
    """All outputs of requests until each has ended."""
    got: dict[str, list[Any]] = {name: [] for name in names}
    while not all(outputs and outputs[-1].finished for outputs in got.values()):
        for output in (await asyncio.wait_for(client.get_output_async(), ANSWER_TIMEOUT_S)).outputs:
            got[output.request_id].append(output)
    return got


async def test_pictures_come_step_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    async with painter(tmp_path) as client:
        steps = {f"r{n}": n + 1 for n in range(5)}
        for name, count in steps.items():
            await client.add_request_async(request(name, seed=count, steps=count))
        await client.add_request_async(request("bad", seed="x", steps=1))
        got = await answers(client, {*steps, "bad"})
        for name, count in steps.items():
            messages = [unpack(each.pooling_output) for each in got[name][:-1]]
            assert messages == [StageProgress(done, count) for done in range(1, count)]
            torch.testing.assert_close(got[name][-1].pooling_output, expected(count, count))
        (refused,) = got["bad"]
        assert isinstance(unpack(refused.pooling_output), StageError)
        # A request that is aborted, and one of a dead API server, make room for the next ones.
        for name in ("aborted", "orphan"):
            await client.add_request_async(request(name, seed=1, steps=10**9))
        await client.abort_requests_async(["aborted"])
        await client.add_request_async(forget_request(0, time.time()))
        await client.add_request_async(request("next", seed=1, steps=1))
        outputs: list[Any] = []
        while not (outputs and outputs[-1].finished):
            made = (await asyncio.wait_for(client.get_output_async(), ANSWER_TIMEOUT_S)).outputs
            outputs += [each for each in made if each.request_id == "next"]
