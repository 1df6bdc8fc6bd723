"""Counts operator calls of a frame of the talker and of a pass of the vocoder: each is a kernel launch on a GPU.

The networks run on the CPU, with the released numbers of layers, groups and kernels but few channels, because the calls
do not depend on the width. Views are not counted. "in the graph" are calls inside a CUDA graph; "outside" are all other
calls, and one for the graph itself. The latter include calls that only use memory of the host, so a GPU executes fewer.
A request with a seed needs one more call.

    python benchmarks/operator_calls.py [--details]
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_omni_ext.model_plugins.qwen3_omni.code_predictor import CodePredictor, Draw
from vllm_omni_ext.model_plugins.qwen3_omni.frames import FrameMaker
from vllm_omni_ext.model_plugins.qwen3_omni.prompt import TalkerPrompt
from vllm_omni_ext.model_plugins.qwen3_omni.talker_feed import TalkerInputProvider
from vllm_omni_ext.model_plugins.qwen3_omni.vocoder import Vocoder

VIEWS = frozenset(
    """
    view _unsafe_view slice select expand transpose t permute unsqueeze squeeze as_strided alias detach detach_ split
    unbind chunk split_with_sizes _reshape_alias unflatten lift_fresh empty empty_like empty_strided new_empty
    new_empty_strided resize_ narrow
    """.split()  # noqa: SIM905
)
GROUPS, CODES, HIDDEN = 16, 64, 64


class _Config(SimpleNamespace):
    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


PREDICTOR = _Config(
    head_dim=32,
    hidden_size=HIDDEN,
    intermediate_size=96,
    num_code_groups=GROUPS,
    num_hidden_layers=5,
    vocab_size=CODES,
    num_attention_heads=4,
    num_key_value_heads=2,
    attention_bias=False,
    rms_norm_eps=1e-6,
    rope_parameters={"rope_theta": 1e6},
)
VOCODER = _Config(
    num_quantizers=GROUPS,
    codebook_size=CODES,
    hidden_size=32,
    decoder_dim=64,
    upsample_rates=(8, 5, 4, 3),
    upsampling_ratios=(2, 2),
    num_hidden_layers=8,
    num_attention_heads=2,
    num_key_value_heads=2,
    attention_bias=False,
    sliding_window=72,
    intermediate_size=48,
    hidden_act="silu",
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    head_dim=16,
)


class Count(TorchDispatchMode):
    """Counts the calls of all operators except `VIEWS`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[-1]
        if name not in VIEWS:
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))

    @property
    def total(self) -> int:
        """The number of all calls."""
        return sum(self.calls.values())


class Inside:
    """Stands in for the recorder of CUDA graphs: counts the calls in each graph; a replay does nothing.

    Attributes:
        calls: number of calls by operator, for each recorded graph.
    """

    def __init__(self) -> None:
        self.calls: list[Counter[str]] = []

    def record(self, body: Callable[[], None]) -> Callable[[], None]:
        """Run `body` and count its operator calls; return a replay that does nothing."""
        with Count() as count:
            body()
        self.calls.append(count.calls)
        return lambda: None


@dataclass
class Calls:
    """Operator calls of one computation, by name: those inside a graph, and those outside."""

    name: str
    inside: Counter[str]
    outside: Counter[str]

    @property
    def beside(self) -> int:
        """The number of calls outside a graph, and one more for the graph itself if there is one."""
        return self.outside.total() + (1 if self.inside else 0)


@torch.inference_mode()
def of_a_frame(rows: int = 2) -> Calls:
    """Count the calls in which the talker makes a frame for each of `rows` requests that sample without a seed."""
    predictor, table = CodePredictor(PREDICTOR), torch.zeros(CODES, HIDDEN)
    hidden, draws, recorder = torch.randn(rows, HIDDEN), [Draw(greedy=False)] * rows, Inside()
    maker = FrameMaker(predictor, table, rows=rows, recorder=recorder)
    maker.warm_up()
    with Count() as count:
        maker.make(hidden, range(rows), [0] * rows, draws)
    outside = count.calls + Counter({"copy_ to the device": 1})
    return Calls("talker: frame", recorder.calls[0], outside)


class _Weights:
    """The weights of a talker without layers, for `TalkerInputProvider`."""

    codec_eos = CODES

    def __init__(self) -> None:
        self.text_table, self._codec = torch.zeros(CODES, HIDDEN), torch.zeros(CODES, HIDDEN)
        self.code_predictor = CodePredictor(PREDICTOR)
        self.frames = FrameMaker(self.code_predictor, self._codec, rows=1)

    def codec_rows(self, ids: Tensor) -> Tensor:
        return torch.nn.functional.embedding(ids, self._codec)

    def project_hidden(self, rows: Tensor) -> Tensor:
        raise NotImplementedError("no prompt here has multimodal rows")


@torch.inference_mode()
def of_a_row() -> Calls:
    """Count the calls that compute the talker's input embedding for the position after a frame."""
    from vllm_omni_ext.engine.input_provider import Span

    provider = TalkerInputProvider(_Weights(), device=torch.device("cpu"))
    prompt = TalkerPrompt(text=[1], codec=[-1], fill=0, frames=[[0] * GROUPS] * 2)
    provider.open("a", prompt, (), SimpleNamespace(seed=None, temperature=1.0))
    provider.rows([Span("a", 1, 1)])
    with Count() as count:
        provider.rows([Span("a", 2, 1)])
    return Calls("talker: input row", Counter(), count.calls)


@torch.inference_mode()
def of_a_pass(frames: int = 4) -> Calls:
    """Count the calls that decode `frames` frames of one stream after its first part."""
    vocoder, recorder = Vocoder(VOCODER), Inside()  # type: ignore[arg-type]
    vocoder.record(recorder, streams=1)
    state = vocoder.new_state()
    codes = torch.zeros(16, GROUPS, dtype=torch.int64)
    vocoder.decode([codes[:1]], [state], [False])
    with Count() as count:
        vocoder.decode([codes[:frames]], [state], [False])
    return Calls("code2wav: pass", recorder.calls[0], count.calls)


def main() -> None:
    """Run this benchmark from the command line: count the calls and print a table."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--details", action="store_true", help="print the operators by name")
    details = flags.parse_args().details
    torch.set_num_threads(1)
    print(f"{'':24}{'in the graph':>14}{'outside':>10}")
    for calls in (of_a_frame(), of_a_row(), of_a_pass()):
        print(f"{calls.name:24}{calls.inside.total():14}{calls.beside:10}")
        if details:
            print(f"  in the graph: {dict(calls.inside.most_common())}")
            print(f"  outside: {dict(calls.outside.most_common())}")


if __name__ == "__main__":
    main()
