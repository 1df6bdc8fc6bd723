"""Starting weights with which the small stages learn within minutes.

Without a checkpoint, Transformers leaves the experts and routers of a model at zero or uninitialised, and its standard
deviation of 0.02 is far too small for these widths.
"""

from __future__ import annotations

import math
from typing import Any

EMBEDDING_STD = 0.5


def fill(module: Any, seed: int) -> None:
    """Initialise all parameters of a module in place.

    Matrices are random with a standard deviation of 1 / sqrt(number of inputs), embeddings with `EMBEDDING_STD`.
    Biases are 0, other vectors (norms) 1.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(child.weight) for child in module.modules() if isinstance(child, torch.nn.Embedding)}
    with torch.no_grad():
        for name, parameter in sorted(module.named_parameters()):
            if parameter.ndim < 2:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            inputs = parameter.shape[-1] if "experts." in name else math.prod(parameter.shape[1:])
            std = EMBEDDING_STD if id(parameter) in embeddings else 1 / math.sqrt(inputs)
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
