"""The stage `dit` in an engine process of vLLM's: its own loader, loop, client and messages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest, FinishReason

from tests.support.bagel_runs import golden
from tests.support.dit_room import assert_almost_equal, draw_of, pixels_of
from tests.support.stage_engine import stage_engine
from vllm_omni_ext.model_plugins.bagel.family import ALL, DIT
from vllm_omni_ext.model_plugins.bagel.model import Bagel
from vllm_omni_ext.model_plugins.bagel.requests import payloads
from vllm_omni_ext.plugins.spec import StageSpec, resolve
from vllm_omni_ext.wire.envelope import StageProgress, unpack
from vllm_omni_ext.wire.stage_input import FILLER, PART, PartHeader

pytestmark = pytest.mark.engine

ANSWER_TIMEOUT_S = 120.0
ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "WARNING"}


@asynccontextmanager
async def engine(stage: StageSpec, checkpoint: Path) -> AsyncIterator[Any]:
    """vLLM's client of a running engine with the stage's own arguments."""
    from vllm.model_executor.models import ModelRegistry

    for architecture, name in stage.models.items():
        ModelRegistry.register_model(architecture, name)
    arguments = {**stage.engine_defaults, **stage.engine, "hf_overrides": resolve(stage.engine["hf_overrides"])}
    async with stage_engine(model=str(checkpoint), **arguments) as client:
        yield client


def request(name: str, prompt: Sequence[int], params: SamplingParams) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=list(prompt),
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def drawing(name: str, draw: payloads.Draw) -> EngineCoreRequest:
    header = PartHeader(
        stream=name, part=0, last=True, empty=True, payload=msgspec.to_builtins(draw, builtin_types=(bytes,))
    )
    return request(name, FILLER, SamplingParams(extra_args={PART: header.as_extra()}))


async def answers(client: Any, names: set[str]) -> dict[str, list[Any]]:
    """All outputs of requests until each has ended."""
    got: dict[str, list[Any]] = {name: [] for name in names}
    while not all(outputs and outputs[-1].finished for outputs in got.values()):
        for output in (await asyncio.wait_for(client.get_output_async(), ANSWER_TIMEOUT_S)).outputs:
            got[output.request_id].append(output)
    return got


def picture_of(outputs: Sequence[Any]) -> payloads.Drawn:
    drawn = payloads.decode(outputs[-1].pooling_output.numpy().tobytes())
    assert isinstance(drawn, payloads.Drawn)
    return drawn


@pytest.mark.parametrize("stage", [DIT, ALL], ids=["bagel", "bagel_single"])
async def test_pictures_of_the_reference(
    stage: StageSpec, checkpoint: Path, model: Bagel, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    cases = {case: golden(f"{case}_fp32") for case in ("t2i", "edit")}
    torch.ones(1 << 20).exp()  # now OpenMP has threads here, which an engine that is forked does not have
    async with engine(stage, checkpoint) as client:
        for case, expected in cases.items():
            await client.add_request_async(drawing(case, draw_of(model, expected.parts, expected.parameters)))
        names = set(cases)
        if stage is ALL:
            chat = golden("chat_fp32")
            prompt = [*model.tokens.text(str(chat.parts[0])), model.tokens.start]
            await client.add_request_async(request("chat", prompt, SamplingParams(temperature=0, max_tokens=8)))
            names.add("chat")
        got = await answers(client, names)
        for case, expected in cases.items():
            assert [unpack(each.pooling_output) for each in got[case][:-1]] == [
                StageProgress(at, 7) for at in range(1, 8)
            ]
            assert_almost_equal(pixels_of(picture_of(got[case])), expected.tensors["image_u8"])
        if stage is ALL:
            tokens = [token for each in got["chat"] for token in each.new_token_ids]
            assert tokens == golden("chat_fp32").info["generated_ids"][0][1:9]
            assert got["chat"][-1].finish_reason == FinishReason.LENGTH
