"""The output of one layer beside a step's result, on either model runner, through vLLM's interface for EAGLE-3.

Compiled code and CUDA graphs have the outputs with which they were made. A runner that compiles or captures is
therefore told of the layer before it does, once and for all: every step adds two tensors and copies the sum, and a step
that exports rows is a step like any other. Where nothing is compiled, only the steps that export ask for the layer. The
same goes for a runner with a drafter, which must not find outputs that it has not ordered: such a step runs uncompiled
and outside CUDA graphs, and the drafter gets what it has ordered.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.forward_context import get_forward_context

EXPORTED_LAYER = "exported_layer"
"""Key of `additional_config` with the layer. vLLM's cache of compiled code depends on it, so that an engine without
that output never loads code that has it."""


class ExportedLayer:
    """One layer of a runner's model.

    Args:
        runner: of either kind; its model is loaded and has not run.
        vllm_config: of the engine.
        layer: number of layers after which the hidden states are taken, 0 = the input embeddings.
    """

    def __init__(self, runner: Any, vllm_config: Any, layer: int) -> None:
        self._runner = runner
        self._layer = layer
        self._ordered: tuple[int, ...] = _decoder(runner.get_model()).aux_hidden_state_layers
        self._all = tuple(sorted({*self._ordered, layer}))
        self._built_in = is_compiled(vllm_config) and vllm_config.speculative_config is None
        if self._built_in:
            self._ask(self._all, outputs=True)

    @contextmanager
    def exposed(self) -> Iterator[None]:
        """The step inside the block has the layer's output; `take` it before anything is sampled."""
        if self._built_in:
            yield
            return
        hook = self._runner.get_model().register_forward_pre_hook(_skip_compiled)
        drafting = self._runner.use_aux_hidden_state_outputs
        self._ask(self._all, outputs=True)
        try:
            with without_cuda_graphs(self._runner):
                yield
        finally:
            self._ask(self._ordered, outputs=drafting)
            hook.remove()

    def take(self) -> torch.Tensor:
        """The layer's output [tokens, hidden] of the step that has just been executed; a drafter's are left."""
        state = self._runner.execute_model_state
        found = dict(zip(self._all, state.aux_hidden_states, strict=True))
        if not self._built_in:
            left = [found[layer] for layer in self._ordered]
            self._runner.execute_model_state = state._replace(aux_hidden_states=left or None)
        _forget_picture(self._runner.get_model(), len(found[self._layer]))
        return found[self._layer]

    def _ask(self, layers: tuple[int, ...], *, outputs: bool) -> None:
        self._runner.get_model().set_aux_hidden_state_layers(layers)
        self._runner.use_aux_hidden_state_outputs = outputs


def is_compiled(vllm_config: Any) -> bool:
    """Whether the engine's steps run as compiled code or as CUDA graphs."""
    config = vllm_config.compilation_config
    return config.mode != CompilationMode.NONE or config.cudagraph_mode != CUDAGraphMode.NONE


@contextmanager
def without_cuda_graphs(runner: Any) -> Iterator[None]:
    """Steps inside the block are dispatched as if no CUDA graph had been captured.

    A prompt's last chunk of one token counts as a decode step, which replays a full graph otherwise.
    """
    if hasattr(runner, "cudagraph_manager"):  # V2
        dispatcher, flag = runner.cudagraph_manager, "_graphs_captured"
    else:
        dispatcher, flag = runner.cudagraph_dispatcher, "keys_initialized"
    before = getattr(dispatcher, flag)
    setattr(dispatcher, flag, False)
    try:
        yield
    finally:
        setattr(dispatcher, flag, before)


def _decoder(model: Any) -> Any:
    """The module that collects the outputs of layers, found as `set_aux_hidden_state_layers` finds it."""
    inner = model.get_language_model()
    return getattr(inner, "model", inner)


def _skip_compiled(module: torch.nn.Module, args: Any) -> None:
    get_forward_context().skip_compiled = True


def _forget_picture(model: Any, tokens: int) -> None:
    """Empty the buffers with which a picture enters deeper layers.

    The model does so itself after each step, except when a full CUDA graph is replayed in its place: a chunk of one
    token would leave its picture to the decode steps after it.
    """
    if hasattr(model, "_clear_deepstack_input_embeds"):
        model._clear_deepstack_input_embeds(tokens)
