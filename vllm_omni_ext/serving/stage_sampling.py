"""Sampling of the stages behind the text stage, as a request may set it: `"talker": {"temperature": 0.5}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.topology.shape import Plan

FLOAT, INT = (int, float), (int,)
KEYS: dict[str, tuple[type, ...]] = {
    "temperature": FLOAT,
    "top_p": FLOAT,
    "top_k": INT,
    "min_p": FLOAT,
    "seed": INT,
    "max_tokens": INT,
    "min_tokens": INT,
    "repetition_penalty": FLOAT,
    "presence_penalty": FLOAT,
    "frequency_penalty": FLOAT,
}
"""What a request may set, and the JSON types it may be."""


def read_sampling(plan: Plan, extra: Mapping[str, Any], *, seed: int | None) -> dict[str, SamplingParams]:
    """Sampling parameters by stage, for the stages in which the request differs from the configured ones.

    Args:
        extra: the request's fields that vLLM does not know; a stage's name is one of them.
        seed: the request's own seed; stages without a seed of their own take it too.

    Raises:
        RequestError: names `stage.key`.
    """
    return {
        stage.name: _merged(stage.name, stage.sampling, wanted)
        for stage in plan.stages
        if not stage.text_stage and stage.sampling and (wanted := _wanted(stage.name, extra, seed))
    }


def _wanted(stage: str, extra: Mapping[str, Any], seed: int | None) -> dict[str, Any]:
    given = extra.get(stage) or {}
    if not isinstance(given, dict):
        raise RequestError(f"{stage}: must be an object with any of {', '.join(KEYS)}", parameter=stage)
    for key, value in given.items():
        name = f"{stage}.{key}"
        if key not in KEYS:
            raise RequestError(f"{name}: is unknown; use one of {', '.join(KEYS)}", parameter=name)
        if isinstance(value, bool) or not isinstance(value, KEYS[key]):
            wanted = "an integer" if KEYS[key] is INT else "a number"
            raise RequestError(f"{name}: must be {wanted}, got {value!r}", parameter=name)
    return given if seed is None else {"seed": seed, **given}


def _merged(stage: str, configured: Mapping[str, Any], wanted: Mapping[str, Any]) -> SamplingParams:
    try:
        return SamplingParams(**{**configured, **wanted})
    except VLLMValidationError as err:
        named = err.parameter if err.parameter in wanted else _blamed(str(err), wanted)
        message, cause = str(err.args[0]), err
    except ValueError as other:
        named, message, cause = _blamed(str(other), wanted), str(other), other
    name = f"{stage}.{named}" if named else stage
    raise RequestError(f"{name}: {message}", parameter=name) from cause


def _blamed(message: str, wanted: Mapping[str, Any]) -> str | None:
    """The field a message is about: vLLM names it in the text."""
    return next((key for key in wanted if key in message), None)
