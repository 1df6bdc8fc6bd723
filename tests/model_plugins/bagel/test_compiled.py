"""The compiled layers: the same numbers as without, and nothing is compiled again for other numbers of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from tests.model_plugins.bagel.test_golden import check_bfloat16
from tests.model_plugins.bagel.test_packing import REQUESTS, prepared
from tests.support.bagel_runs import difference
from vllm_omni_ext.model_plugins.bagel.denoise import Denoiser
from vllm_omni_ext.model_plugins.bagel.llm import ExpertLayer, MotLayer
from vllm_omni_ext.model_plugins.bagel.model import Bagel
from vllm_omni_ext.model_plugins.bagel.prompts import Prompts
from vllm_omni_ext.model_plugins.bagel.stages.warm_up import warm_up

CLOSE = 2e-5


@pytest.fixture
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bagel]:
    """The model that the parameter names; after the test it is as before."""
    model: Bagel = request.getfixturevalue(request.param)
    monkeypatch.setattr(model.llm, "project", MotLayer.project)
    monkeypatch.setattr(model.llm, "finish", ExpertLayer.finish)
    torch._dynamo.reset()
    counters.clear()
    yield model
    torch._dynamo.reset()


def velocities(model: Bagel) -> list[torch.Tensor]:
    """Velocities of a first step of every number of requests, of different sizes and kinds."""
    found = []
    for number in range(1, len(REQUESTS) + 1):
        images = [prepared(model, at) for at in range(number)]
        found += [evaluation.velocity for evaluation in Denoiser(model).step(images)]
    return found


@pytest.mark.engine  # runs the C++ compiler
@pytest.mark.parametrize("compiled", ["model"], indirect=True)
def test_float32_is_equal_and_compiled_once(compiled: Bagel) -> None:
    plain = velocities(compiled)
    compiled.llm.compile_layers()
    ours = velocities(compiled)
    assert max(difference(a, b) for a, b in zip(ours, plain, strict=True)) < CLOSE
    assert counters["stats"]["unique_graphs"] == 2, "one for each of the two functions"
    assert not counters["graph_break"]


@pytest.mark.engine  # runs the C++ compiler
@pytest.mark.parametrize("compiled", ["model_bf16"], indirect=True)
def test_bfloat16_is_as_close_to_the_reference(compiled: Bagel, prompts: Prompts) -> None:
    """Compiled kernels keep float32 between operators that would round to 16 bits one by one."""
    compiled.llm.compile_layers()
    check_bfloat16("t2i", compiled, prompts)
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize("compiled", ["model"], indirect=True)
def test_the_stage_goes_on_without_a_compiler(
    compiled: Bagel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        def fails(*_: Any) -> None:
            raise RuntimeError("no compiler here")

        return fails

    monkeypatch.setattr(torch, "compile", broken)
    warm_up(compiled, compiled=True)
    assert "no compiler here" in caplog.text
    assert (compiled.llm.project, compiled.llm.finish) == (MotLayer.project, ExpertLayer.finish)
