"""Returns the output of one decoder layer in addition to a step's result, through vLLM's interface for EAGLE-3.

This works with both of vLLM's model runners (V1 and V2).
Compiled code and CUDA graphs have a fixed set of outputs. With either, the layer is therefore set before the model is
compiled or captured. Every step then adds two tensors and copies the sum, and a step that exports hidden states runs
like any other step. Without compilation and CUDA graphs, the layer is set only for the steps that export. With
speculative decoding, too, the layer is set only for these steps, because the drafter must receive exactly the outputs
that it requested. An exporting step then runs uncompiled and outside CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.forward_context import get_forward_context

EXPORTED_LAYER = "exported_layer"
"""Key of `additional_config` whose value is the layer (see `ExportedLayer`). The hash of vLLM's compile cache includes
`additional_config`, so an engine without the exported layer never loads code that was compiled with it."""


class ExportedLayer:
    """Makes a runner's model return the output of one of its layers.

    Args:
        runner: a V1 or V2 model runner; its model is loaded and has not run.
        vllm_config: config of the engine.
        layer: number of layers after which the hidden states are taken, 0 = the input embeddings.
    """

    def __init__(self, runner: Any, vllm_config: Any, layer: int) -> None:
        self._runner = runner
        self._layer = layer
        language_model = runner.get_model().get_language_model()
        decoder = getattr(language_model, "model", language_model)  # as `set_aux_hidden_state_layers` finds it
        self._ordered: tuple[int, ...] = decoder.aux_hidden_state_layers
        self._all = tuple(sorted({*self._ordered, layer}))
        self._built_in = is_compiled(vllm_config) and vllm_config.speculative_config is None
        if self._built_in:
            self._set_layers(self._all, outputs=True)

    @contextmanager
    def exposed(self) -> Iterator[None]:
        """Make the step inside the `with` block compute the layer's output; call `take` after it, before sampling."""
        if self._built_in:
            yield
            return
        hook = self._runner.get_model().register_forward_pre_hook(_skip_compiled)
        drafting = self._runner.use_aux_hidden_state_outputs
        self._set_layers(self._all, outputs=True)
        try:
            with without_cuda_graphs(self._runner):
                yield
        finally:
            self._set_layers(self._ordered, outputs=drafting)
            hook.remove()

    def take(self) -> torch.Tensor:
        """Return the layer's output [tokens, hidden] of the last step; the drafter still receives its own outputs."""
        state = self._runner.execute_model_state
        found = dict(zip(self._all, state.aux_hidden_states, strict=True))
        if not self._built_in:
            left = [found[layer] for layer in self._ordered]
            self._runner.execute_model_state = state._replace(aux_hidden_states=left or None)
        _clear_image_features(self._runner.get_model(), len(found[self._layer]))
        return found[self._layer]

    def _set_layers(self, layers: tuple[int, ...], *, outputs: bool) -> None:
        self._runner.get_model().set_aux_hidden_state_layers(layers)
        self._runner.use_aux_hidden_state_outputs = outputs


def is_compiled(vllm_config: Any) -> bool:
    """Return whether the engine's steps run as compiled code or as CUDA graphs."""
    config = vllm_config.compilation_config
    return config.mode != CompilationMode.NONE or config.cudagraph_mode != CUDAGraphMode.NONE


@contextmanager
def without_cuda_graphs(runner: Any) -> Iterator[None]:
    """Run the steps inside the `with` block without CUDA graphs, as if none had been captured.

    Otherwise, a prompt's last chunk of one token would count as a decode step and replay a full graph.
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


def _skip_compiled(module: torch.nn.Module, args: Any) -> None:
    get_forward_context().skip_compiled = True


def _clear_image_features(model: Any, tokens: int) -> None:
    """Empty the buffers through which image features enter deeper layers (deepstack).

    The model empties the buffers after each step, but not when a full CUDA graph is replayed: after a prompt chunk of
    one token, the following decode steps would otherwise add the features of that token.
    """
    if hasattr(model, "_clear_deepstack_input_embeds"):
        model._clear_deepstack_input_embeds(tokens)
