"""The flow-matching equation of token2wav: the times of its evaluations, and the steps of the Runge-Kutta method.

Transformers' `RungeKutta4ODESolver` (the 3/8 rule) evaluates the transformer four times a step. All arithmetic is
elementwise, so that each block of an utterance can be in another step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

STAGES = 4
"""Number of evaluations of the transformer in a step."""

_THIRD = 1 / 3
_TWO_THIRDS = 2 / 3


@dataclass(frozen=True)
class Solver:
    """The Runge-Kutta method with the options of Transformers' `Qwen2_5OmniToken2WavModel`.

    Attributes:
        num_steps: number of times at which the solution is computed, one more than the number of steps.
        guidance_scale: weight of the difference between the predictions with and without the codes.
        sway_coefficient: moves the times towards 0 (negative) or 1.
    """

    num_steps: int = 10
    guidance_scale: float = 0.5
    sway_coefficient: float = -1.0

    @property
    def guided(self) -> bool:
        """Whether each evaluation computes two predictions: with and without the codes."""
        return self.guidance_scale >= 1e-5

    @property
    def evaluations(self) -> int:
        """Number of evaluations of a block."""
        return STAGES * (self.num_steps - 1)

    @cached_property
    def _ends(self) -> Tensor:
        times = torch.linspace(0, 1, self.num_steps)
        return times + self.sway_coefficient * (torch.cos(torch.pi / 2 * times) - 1 + times)

    def times(self) -> Tensor:
        """Return the time of each evaluation, [evaluations] float32."""
        starts, ends = self._ends[:-1], self._ends[1:]
        steps = ends - starts
        return torch.stack([starts, starts + steps * _THIRD, starts + steps * _TWO_THIRDS, ends], dim=1).flatten()

    def combined(self, with_codes: Tensor, without: Tensor) -> Tensor:
        """Return the guided velocity from the velocities that are predicted with and without the codes."""
        return with_codes + (with_codes - without) * self.guidance_scale

    def advance(self, evaluation: int, start: Tensor, slopes: list[Tensor]) -> Tensor:
        """Return the input of the next evaluation; after the last evaluation of a step, the solution at its end.

        Args:
            evaluation: number of the evaluation that was computed last.
            start: solution at the beginning of the step that this evaluation belongs to.
            slopes: velocities of that step so far; the last one is from this evaluation.
        """
        step = float(self._ends[evaluation // STAGES + 1] - self._ends[evaluation // STAGES])
        match slopes:
            case [k1]:
                return start + step * k1 * _THIRD
            case [k1, k2]:
                return start + step * (k2 - k1 * _THIRD)
            case [k1, k2, k3]:
                return start + step * (k1 - k2 + k3)
            case [k1, k2, k3, k4]:
                return start + (k1 + 3 * (k2 + k3) + k4) * step / 8
        raise ValueError(f"a step has {STAGES} slopes at most, got {len(slopes)}")
