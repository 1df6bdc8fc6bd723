"""Recorded frames and passes on a CUDA device, compared with the functions themselves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.model_plugins.test_code_predictor import GREEDY, HIDDEN, predictor
from tests.support.vocoder_reference import expected, random_codes, reference, small_config, vocoder_like
from vllm_omni_ext.engine.graphs import CudaGraphs
from vllm_omni_ext.model_plugins.qwen3_omni.code_predictor import CodePredictor, Draw
from vllm_omni_ext.model_plugins.qwen3_omni.frames import FrameMaker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CODES, ROWS, STEPS = 20, 6, 12
LOUDNESS = 1e-2
"""Samples may differ by so much: convolutions may use TF32 and other algorithms for other batches."""


def maker(dtype: torch.dtype, *, recorded: bool) -> FrameMaker:
    device = torch.device("cuda")
    model = CodePredictor(predictor("grouped heads").config)
    model.load_state_dict(predictor("grouped heads").state_dict())
    table = torch.randn(CODES, HIDDEN, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    recorder = CudaGraphs(device) if recorded else None
    made = FrameMaker(model.to(device, dtype), table, rows=ROWS, recorder=recorder)
    made.try_out()
    made.warm_up()
    return made


def draws(count: int, step: int) -> list[Draw]:
    """Greedy, seeded and free rows in turn."""
    seeded = [Draw(False, torch.Generator("cuda").manual_seed(100 * step + i)) for i in range(count)]
    return [(GREEDY, seeded[i], Draw(greedy=False))[(i + step) % 3] for i in range(count)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frames_of_graphs_are_those_of_the_function(dtype: torch.dtype) -> None:
    """The function is called with a full bucket, so that both use the same kernels: then not a bit may differ."""
    graph, called = maker(dtype, recorded=True), maker(dtype, recorded=False)
    assert graph.recorded == [8, 4, 2, 1]
    for step in range(STEPS):
        count = (1, 2, 4)[step % 3]
        hidden = torch.randn(count + 1, HIDDEN, generator=torch.Generator().manual_seed(step)).to("cuda", dtype)
        live, first = list(range(1, count + 1)), [(step + 3 * i) % CODES for i in range(count)]
        frames: list[Tensor] = []
        for each in (graph, called):
            torch.manual_seed(step)
            frames.append(each.make(hidden, live, first, draws(count, step)))
        assert frames[0].tolist() == frames[1].tolist()


@torch.inference_mode()
def test_passes_of_graphs_sound_like_transformers() -> None:
    model = reference(small_config(), seed=3)
    wholes = [random_codes(model.config, frames, seed=frames) for frames in (60, 60, 41)]
    wanted = [expected(model, codes) for codes in wholes]
    vocoder = vocoder_like(model).to("cuda")
    vocoder.record(CudaGraphs(torch.device("cuda")), streams=4)
    assert vocoder._graphs is not None and len(vocoder._graphs) == 3 * 7
    states, heard = [vocoder.new_state() for _ in wholes], [[] for _ in wholes]
    for begin, end in ((0, 1), (1, 3), (3, 10), (10, 26), (26, 60)):
        parts = [codes[begin:end] for codes in wholes]
        for pieces, wave in zip(heard, vocoder.decode(parts, states, [end == 60] * 3), strict=True):
            pieces.append(wave)
    for pieces, wave in zip(heard, wanted, strict=True):
        sound = torch.cat(pieces).cpu()
        assert sound.shape == wave.shape
        assert (sound - wave).abs().max() < LOUDNESS
