"""Errors of this package for its callers."""

from __future__ import annotations


class CheckpointError(Exception):
    """A checkpoint is not a BAGEL checkpoint that this package can compute; the message contains the reason."""


class ParameterError(ValueError):
    """A request that cannot succeed in this form.

    Args:
        message: the problem, and the allowed values.
        parameter: name of the parameter, as in `ImageParameters`, or "prompt".
    """

    def __init__(self, message: str, *, parameter: str) -> None:
        super().__init__(message)
        self.parameter = parameter
