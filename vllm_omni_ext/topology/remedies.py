"""Finds flags, or larger numbers of devices, for a model that is too large for the devices of a machine. Pure.

Each proposal has been checked by making a plan with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any

from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.topology.machine import Machine

FEWEST_TOKENS = 4096
"""The smallest `max_model_len` that is proposed."""

MEDIA_FLAG = "omni_max_media_tokens"
"""Name of the flag for the most tokens of an image, a video or a sound."""

FEWEST_MEDIA_TOKENS = 16_384
"""The smallest value of `MEDIA_FLAG` that is proposed: more tokens than the largest image of the released models."""

LENGTH_STEP = 1024
"""Proposed values of `max_model_len` and `MEDIA_FLAG` are multiples of this."""

SHORT_PART = 0.5
"""A `max_model_len` of at least this fraction of the current one is proposed before other flags, a shorter one
later."""

MOST_DEVICES = 8
"""The largest number of devices that is proposed."""

_PARALLEL = (2, 4, 8)

Attempt = Callable[[Mapping[str, Any], Machine], object]
"""Function that makes a plan with additional flags for a machine; raises ConfigError if the model does not fit."""

Flags = Mapping[str, Any]
"""Values of flags: those of vLLM by the name of their `EngineArgs` field, and `MEDIA_FLAG`."""


def flags_that_help(attempt: Attempt, args: Flags, machine: Machine, longest: int) -> list[dict[str, Any]]:
    """Return sets of flags with which the model fits this machine, the least restrictive first.

    `MEDIA_FLAG` is tried alone. The other sets all have the same size: 1 if one flag is enough, else 2 or 3.

    Args:
        attempt: makes a plan with further flags.
        args: the user's `vllm serve` flags.
        longest: longest sequence of the frontend without further flags, in tokens.
    """
    kinds = ("tensor_parallel_size", "quantization", "max_model_len")
    media = _largest_that_fits(MEDIA_FLAG, FEWEST_MEDIA_TOKENS, attempt, {}, machine, longest)
    mildest: list[dict[str, Any]] = [{MEDIA_FLAG: media}] if media else []
    for number in range(1, len(kinds) + 1):
        found = [flags for chosen in combinations(kinds, number) if (flags := _try(chosen, attempt, machine, longest))]
        if found := [flags for flags in found if not any(args.get(key) == value for key, value in flags.items())]:
            mild = [
                flags
                for flags in found
                if list(flags) == ["max_model_len"] and flags["max_model_len"] >= longest * SHORT_PART
            ]
            return [*mildest, *mild, *(flags for flags in found if flags not in mild)]
    return mildest


def advice(attempt: Attempt, args: Flags, machine: Machine, longest: int) -> str:
    """Return the second half of the error message for a model that does not fit.

    It has the flags and the numbers of devices with which the model fits. The arguments are those of `flags_that_help`.
    """
    ways = [as_text(flags) for flags in flags_that_help(attempt, args, machine, longest)]
    enough = next((larger.device_count for larger in _larger(machine) if _fits(attempt, {}, larger)), None)
    if enough is not None:
        ways.append(f"{enough} devices of this size")
    else:
        found = ((larger, flags_that_help(attempt, args, larger, longest)) for larger in _larger(machine))
        larger, flags = next(((each, helps[0]) for each, helps in found if helps), (machine, {}))
        if flags and as_text(flags) not in ways:
            ways.append(f"{larger.device_count} devices of this size and {as_text(flags)}")
    if not ways:
        return f"nothing is known to help with up to {MOST_DEVICES} devices of this size; use larger ones"
    return f"it fits with {', or with '.join(ways)}"


def _larger(machine: Machine) -> Iterator[Machine]:
    for count in range(machine.device_count + 1, MOST_DEVICES + 1):
        yield replace(machine, device_count=count, device_bytes=(min(machine.device_bytes),) * count)


def as_text(flags: Flags) -> str:
    """Return flags as they are written on a command line."""
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in flags.items())


def _try(kinds: tuple[str, ...], attempt: Attempt, machine: Machine, longest: int) -> dict[str, Any]:
    """Return the least restrictive values of the flags `kinds` with which the model fits; empty if there are none.

    Args:
        kinds: names of the flags that may be set.
        longest: context length of the model; `max_model_len` stays below it.
    """
    rest = {"quantization": "fp8"} if "quantization" in kinds else {}
    sizes = [size for size in _PARALLEL if size <= machine.device_count] if "tensor_parallel_size" in kinds else [0]
    for size in sizes:
        flags = {"tensor_parallel_size": size, **rest} if size else rest
        if "max_model_len" not in kinds:
            if _fits(attempt, flags, machine):
                return flags
        elif tokens := _largest_that_fits("max_model_len", FEWEST_TOKENS, attempt, flags, machine, longest):
            return {**flags, "max_model_len": tokens}
    return {}


def _largest_that_fits(name: str, least: int, attempt: Attempt, flags: Flags, machine: Machine, below: int) -> int:
    """Return the largest value of the flag `name` with which the model fits; 0 if it is less than `least`.

    Only multiples of `LENGTH_STEP` below `below` are tried, each with the other flags `flags`.
    """
    low, high = least // LENGTH_STEP - 1, (below - 1) // LENGTH_STEP
    while low < high:
        middle = (low + high + 1) // 2
        if _fits(attempt, {**flags, name: middle * LENGTH_STEP}, machine):
            low = middle
        else:
            high = middle - 1
    return low * LENGTH_STEP if low * LENGTH_STEP >= least else 0


def _fits(attempt: Attempt, flags: Flags, machine: Machine) -> bool:
    try:
        attempt(flags, machine)
    except ConfigError:
        return False
    return True
