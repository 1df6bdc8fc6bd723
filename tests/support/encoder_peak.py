"""Counts the bytes of tensors that vLLM's vision encoder holds at once for a picture, and prints them for each patch.

The encoder is vLLM's own, in bfloat16 and with the released widths, but four layers deep. Parts with a kernel of their
own on CUDA (attention, rotation) are stand-ins that return one new tensor, as the kernel does. Runs in a process of its
own: vLLM's process groups and the default dtype are global.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen3OmniMoeConfig
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.models.qwen3_omni_moe_thinker import Qwen3Omni_VisionTransformer

from vllm_omni_ext.model_plugins.qwen3_omni.tiny.config import RELEASED, model_config
from vllm_omni_ext.model_plugins.qwen3_omni.tiny.vocabulary import real_vocabulary

GRIDS = ((16, 16), (16, 32))
"""Rows and columns of patches; the larger picture must take the same for each patch."""


class LiveBytes(TorchDispatchMode):
    """Adds up the storages that are alive; `peak` is the most there were."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self._alive = {tensor.untyped_storage()._cdata for tensor in known}
        self._now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor.untyped_storage())
        return made

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            return
        self._alive.add(key)
        self._now += size
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self._now -= size


class Kernel(torch.nn.Module):
    """Returns one new tensor of the shape of the first argument."""

    def forward(self, x: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        like = kwargs["query"] if x is None else x
        return torch.empty_like(like, memory_format=torch.contiguous_format)


def encoder() -> Qwen3Omni_VisionTransformer:
    """vLLM's vision encoder on the CPU, whose last layer runs while all of deepstack's hidden states are kept."""
    config = Qwen3OmniMoeConfig(**model_config(RELEASED, real_vocabulary())).thinker_config.vision_config
    config.depth, config.deepstack_visual_indexes = 4, [0, 1, 2]
    model = Qwen3Omni_VisionTransformer(config, norm_eps=1e-6)
    for block in model.blocks:
        block.attn.attn, block.attn.apply_rotary_emb = Kernel(), Kernel()
    for module in model.modules():
        if getattr(module, "quant_method", None) is not None:
            module.quant_method.apply = lambda layer, x, bias=None: F.linear(x, layer.weight, bias)
    return model


def main() -> None:
    torch.set_default_dtype(torch.bfloat16)
    with set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig(custom_ops=["none"]))):
        init_distributed_environment(1, 0, f"file://{sys.argv[1]}", 0, "gloo")
        initialize_model_parallel(1, 1)
        model = encoder()
        for rows, columns in GRIDS:
            live = LiveBytes([*model.parameters(), *model.buffers()])
            with torch.no_grad(), live:
                pixels = torch.empty(rows * columns, 1536, dtype=torch.float32)
                model(pixels.to(torch.bfloat16), grid_thw=torch.tensor([[1, rows, columns]]))
            print(live.peak // (rows * columns))


if __name__ == "__main__":
    main()
