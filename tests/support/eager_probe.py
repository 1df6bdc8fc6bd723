"""A worker extension: every step of the talker through vLLM's layers as well, and the largest difference."""

from __future__ import annotations

from typing import Any

import torch

EXTENSION = f"{__name__}.EagerProbe"


class EagerProbe:
    """Methods that `collective_rpc` can call."""

    def compare_layers(self) -> None:
        """Compare from now on. The stock layers run first: both write the same keys and values."""
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        lean, stock = model._layers, model.language_model.model
        self._differences: list[tuple[int, float]] = []
        self._three_axes = 0

        def both(positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            expected = stock(None, positions, None, rows.clone())
            made = lean(positions, rows)
            self._differences.append((len(rows), float((made - expected).abs().max())))
            self._three_axes += bool((positions[0] != positions[1]).any())
            return made

        model._layers = both

    def layer_differences(self) -> dict[str, Any]:
        """Tokens and largest difference of each step, and how many steps had positions that differ by axis."""
        return {"steps": self._differences, "three_axes": self._three_axes}
