"""Sampling by stage, as a request may set it: `"talker": {"temperature": 0.5}`, or a list with an entry a stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.topology.shape import Plan

LIST = "sampling_params_list"
LARGEST_INTEGER = 2**63 - 1
"""What fits into a message to an engine."""


@dataclass(frozen=True)
class Kind:
    """What a value may be."""

    text: str
    accepts: Callable[[Any], bool]


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST_INTEGER


def _is_number(value: Any) -> bool:
    return _is_integer(value) or (isinstance(value, float) and math.isfinite(value))


def _is_stop(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(each, str) for each in value))


NUMBER = Kind("a number", _is_number)
INTEGER = Kind("an integer of 64 bits", _is_integer)
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
STOP = Kind("a text or a list of texts", _is_stop)
IDS = Kind("a list of token ids", lambda value: isinstance(value, list) and all(map(_is_integer, value)))

KEYS: Mapping[str, Kind] = {
    "temperature": NUMBER,
    "top_p": NUMBER,
    "top_k": INTEGER,
    "min_p": NUMBER,
    "seed": INTEGER,
    "max_tokens": INTEGER,
    "min_tokens": INTEGER,
    "repetition_penalty": NUMBER,
    "presence_penalty": NUMBER,
    "frequency_penalty": NUMBER,
}
"""What a request may set for a stage after the text stage."""

TEXT_KEYS: Mapping[str, Kind] = {**KEYS, "stop": STOP, "stop_token_ids": IDS, "ignore_eos": FLAG}
"""What an entry of the list may set for the text stage; each is a field of the request too."""

WITHOUT_EFFECT: Mapping[str, Kind] = {"detokenize": FLAG}
"""Accepted in the list because clients of other servers send it; the stages decide it themselves."""


@dataclass(frozen=True)
class Given:
    """One value of a request and its full name there."""

    name: str
    value: Any


Wanted = dict[str, Given]


def read_sampling(plan: Plan, extra: Mapping[str, Any], *, seed: int | None) -> dict[str, SamplingParams]:
    """Sampling parameters by stage, for the stages in which the request differs from the configured ones.

    `talker.x` is stronger than the stage's entry in the list, which is stronger than the request's own seed.

    Args:
        extra: the request's fields that vLLM does not know; a stage's name is one of them.
        seed: the request's own seed; stages without a seed of their own take it too.

    Raises:
        RequestError: names `stage.key`, or the key of the list.
    """
    listed = _listed(plan, extra.get(LIST))
    found: dict[str, SamplingParams] = {}
    for stage in plan.model_stages():
        if stage.text_stage:
            continue
        wanted: Wanted = {} if seed is None else {"seed": Given("seed", seed)}
        wanted |= listed.get(stage.name, {}) | _checked(stage.name, extra.get(stage.name), KEYS)
        merged = _merged(stage.name, stage.sampling, wanted)
        if stage.sampling and wanted:  # a stage without sampling has nothing to set
            found[stage.name] = merged
    return found


def apply_to_text(plan: Plan, request: ChatCompletionRequest) -> None:
    """Set what the list's entry for the text stage says, where the request has no field of its own, in place.

    Raises:
        RequestError: names the key of the list.
    """
    stage = plan.text_stage().model_stage
    wanted = _listed(plan, (request.model_extra or {}).get(LIST)).get(stage, {})
    _merged(stage, {}, wanted)
    said = request.model_fields_set | ({"max_tokens"} if request.max_completion_tokens is not None else set())
    for key, given in wanted.items():
        if key not in said:
            setattr(request, key, given.value)


def _listed(plan: Plan, entries: Any) -> dict[str, Wanted]:
    """The list as settings by stage."""
    if entries is None:
        return {}
    stages = [stage.model_stage for stage in plan.model_stages()]
    if not isinstance(entries, list) or len(entries) > len(stages):
        raise RequestError(
            f"{LIST}: must be a list with one object for each of {', '.join(stages)}; the last ones may be missing",
            parameter=LIST,
        )
    found: dict[str, Wanted] = {}
    for index, (stage, entry) in enumerate(zip(plan.model_stages(), entries, strict=False)):
        keys = {**(TEXT_KEYS if stage.text_stage else KEYS), **WITHOUT_EFFECT}
        wanted = _checked(f"{LIST}[{index}]", entry, keys)
        found[stage.model_stage] = {key: given for key, given in wanted.items() if key not in WITHOUT_EFFECT}
    return found


def _checked(path: str, given: Any, keys: Mapping[str, Kind]) -> Wanted:
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise RequestError(f"{path}: must be an object with any of {', '.join(keys)}", parameter=path)
    for key, value in given.items():
        name = f"{path}.{key}"
        if key not in keys:
            raise RequestError(f"{name}: is unknown; use one of {', '.join(keys)}", parameter=name)
        if not keys[key].accepts(value):
            raise RequestError(f"{name}: must be {keys[key].text}, got {value!r:.100}", parameter=name)
    return {key: Given(f"{path}.{key}", value) for key, value in given.items()}


def _merged(stage: str, configured: Mapping[str, Any], wanted: Wanted) -> SamplingParams:
    try:
        return SamplingParams(**{**configured, **{key: given.value for key, given in wanted.items()}})
    except VLLMValidationError as err:
        key = err.parameter if err.parameter in wanted else _blamed(str(err), wanted)
        message, cause = str(err.args[0]), err
    except ValueError as other:
        key, message, cause = _blamed(str(other), wanted), str(other), other
    name = wanted[key].name if key else stage
    raise RequestError(f"{name}: {message}", parameter=name) from cause


def _blamed(message: str, wanted: Wanted) -> str | None:
    """The field a message is about: vLLM names it in the text."""
    return next((key for key in wanted if key in message), None)
