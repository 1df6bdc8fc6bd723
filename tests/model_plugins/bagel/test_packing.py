"""Requests in one forward pass: each gets the same result as alone."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

from tests.support.bagel_generate import prepare_image
from tests.support.bagel_runs import difference, picture, run
from vllm_omni_ext.model_plugins.bagel.attention import Rows, sdpa
from vllm_omni_ext.model_plugins.bagel.denoise import Denoiser, RunningImage
from vllm_omni_ext.model_plugins.bagel.llm import ExpertLayer, MotLayer
from vllm_omni_ext.model_plugins.bagel.model import Bagel
from vllm_omni_ext.model_plugins.bagel.parameters import ImageParameters, image_parameters
from vllm_omni_ext.model_plugins.bagel.prompts import Part
from vllm_omni_ext.model_plugins.bagel.stages.cuda_attention import attention_for, flash_attention
from vllm_omni_ext.model_plugins.bagel.stages.dit import warm_up

CLOSE = 2e-5
"""Sums are taken in another order when there are more rows."""

REQUESTS: tuple[tuple[list[Part], dict[str, Any]], ...] = (
    (["a small red fox"], {"height": 64, "width": 96, "num_timesteps": 8, "seed": 1}),
    (
        ["snow"],
        {"height": 48, "width": 64, "num_timesteps": 6, "seed": 2, "cfg_text_scale": 1.0, "timestep_shift": 1.0},
    ),
    (
        ["a lake"],
        {"height": 96, "width": 32, "num_timesteps": 9, "seed": 3, "cfg_img_scale": 1.7, "cfg_renorm_type": "channel"},
    ),
    ([picture(60, 80, 1), "make it blue"], {"num_timesteps": 7, "seed": 4}),
    ([picture(90, 50, 2), picture(50, 50, 3), "both"], {"num_timesteps": 5, "seed": 5, "cfg_interval": (0.2, 0.9)}),
)


def parameters_of(at: int) -> ImageParameters:
    parts, given = REQUESTS[at]
    return image_parameters(given, edit=not isinstance(parts[0], str))


def prepared(model: Bagel, at: int) -> RunningImage:
    return prepare_image(model, REQUESTS[at][0], parameters_of(at))[0]


def step_all(model: Bagel, running: list[RunningImage]) -> None:
    denoiser = Denoiser(model)
    while left := [image for image in running if not image.done]:
        denoiser.step(left)


def test_all_rows_go_through_the_layers_in_one_pass(model: Bagel, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []

    def counted(query: Tensor, key: Tensor, value: Tensor, of: Rows) -> Tensor:
        rows.append(len(of.queries))
        return sdpa(query, key, value, of)

    running = [prepared(model, at) for at in range(len(REQUESTS))]
    monkeypatch.setattr(model.llm, "attention", counted)
    Denoiser(model).step(running)
    assert rows == [2 + 1 + 3 + 3 + 1] * model.sizes.llm.layers


def test_the_random_state_of_the_process_does_not_change(model: Bagel) -> None:
    before = torch.get_rng_state()
    prepared(model, 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_last_preview_is_the_image(model: Bagel) -> None:
    running = prepared(model, 1)
    assert difference(run(model, running)[-1].preview(), running.latent) < 1e-6


def dense(query: Tensor, key: Tensor, value: Tensor, rows: Rows) -> Tensor:
    of_query, of_key = (
        torch.repeat_interleave(torch.arange(len(rows.queries)), starts.diff().long())
        for starts in (rows.query_starts, rows.key_starts)
    )
    mask = of_query[:, None] == of_key[None]
    if rows.causal:
        from_end_q, from_end_k = (
            starts[1:].long()[of_] - torch.arange(len(of_))
            for starts, of_ in ((rows.query_starts, of_query), (rows.key_starts, of_key))
        )
        mask &= from_end_k[None] >= from_end_q[:, None]
    parts = (part.transpose(0, 1) for part in (query, key, value))
    return F.scaled_dot_product_attention(*parts, attn_mask=mask, enable_gqa=True).transpose(0, 1)


def test_five_different_requests_with_a_dense_mask_equal_each_alone(
    model: Bagel, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = [prepared(model, at) for at in range(len(REQUESTS))]
    for running in alone:
        run(model, running)
    together = [prepared(model, at) for at in range(len(REQUESTS))]
    monkeypatch.setattr(model.llm, "attention", dense)
    step_all(model, together)
    for image, expected in zip(together, alone, strict=True):
        assert difference(image.latent, expected.latent) < CLOSE


# -- the kernel for CUDA, which is not run --------------------------------------------------------------

CPU = torch.device("cpu")


def kernel(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **given: Any) -> Tensor:
    """The kernel's documented result, computed row by row from the same arguments."""
    assert given["fa_version"] == 3
    queries, keys = (tuple(starts.diff().tolist()) for starts in (cu_seqlens_q, cu_seqlens_k))
    assert (given["max_seqlen_q"], given["max_seqlen_k"]) == (max(queries), max(keys))
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    return sdpa(q, k, v, Rows(queries, keys, given["causal"], CPU))


@pytest.mark.parametrize("causal", [False, True])
def test_arguments_of_the_kernel(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends import fa_utils

    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", kernel, raising=False)
    rows = Rows((3, 1, 5), (7, 1, 6), causal, CPU)
    query, key, value = torch.randn(9, 4, 8), torch.randn(14, 2, 8), torch.randn(14, 2, 8)
    assert torch.equal(flash_attention(query, key, value, rows, version=3), sdpa(query, key, value, rows))


def test_other_devices_and_dtypes_have_pytorchs_attention() -> None:
    assert attention_for(CPU, torch.bfloat16, 128) is sdpa
    assert attention_for(torch.device("cuda"), torch.float32, 128) is sdpa


# -- compiled layers -----------------------------------------------------------------------------------


@pytest.fixture
def compiled(model: Bagel, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bagel]:
    """The model; after the test it is as before."""
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
@pytest.mark.extended
def test_compiled_layers_are_equal_and_compiled_once(compiled: Bagel) -> None:
    plain = velocities(compiled)
    compiled.llm.compile_layers()
    ours = velocities(compiled)
    assert max(difference(a, b) for a, b in zip(ours, plain, strict=True)) < CLOSE
    assert counters["stats"]["unique_graphs"] == 2, "one for each of the two functions"
    assert not counters["graph_break"]


def test_without_a_compiler_the_layers_are_not_compiled(
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


# -- the benchmark `bagel_steps.py` --------------------------------------------------------------------


@pytest.mark.slow
def test_packed_and_single_requests_do_the_same_work(
    benchmark: Callable[[str], ModuleType], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, rows, step = benchmark("bagel_steps"), list[int](), Denoiser.step
    monkeypatch.setattr(Denoiser, "step", lambda self, running: (rows.append(len(running)), step(self, running))[1])
    options = {"height": 32, "width": 48, "steps": 2, "rounds": 1, "device": "cpu", "dtype": "float32"}
    made = bench.made(argparse.Namespace(model=checkpoint, released_shape=False, wide=False, **options), "unused")
    assert made.packed(4) > 0
    assert made.one_by_one(4) > 0
    assert rows == [4, 4] + [1] * 8
    assert bench.table(*bench.measure(made), 2)
