"""`stages.<name>.prefill_decode`: read, and laid over. Its two sides have the keys of replicas that are all alike."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from vllm_omni_ext.config.checks import MAPPING, unknown_key
from vllm_omni_ext.config.schema import PrefillDecode, ReplicasConfig, keys
from vllm_omni_ext.errors import ConfigError

PREFILL_DECODE = "prefill_decode"
PREFILL, DECODE = SIDES = ("prefill", "decode")
"""The two kinds of replicas: those that compute prompts, and those that go on from there."""

OF_A_SIDE = ("replicas", "devices")
"""Keys that say nothing about a stage whose replicas are of two kinds."""

Side = Callable[[str, ReplicasConfig, Mapping[str, Any]], ReplicasConfig]
"""Lays a mapping below a path over what is known of a side."""


def side_name(stage: str, side: str) -> str:
    """The name of one side of a stage: `thinker.prefill`."""
    return f"{stage}.{side}"


def split_name(name: str) -> tuple[str, str] | None:
    """A stage and its side, from `thinker.prefill`; None for any other name."""
    stage, _, side = name.rpartition(".")
    return (stage, side) if stage and side in SIDES else None


def stage_path(name: str) -> str:
    """Where in a configuration a stage of a plan is: one of its sides is below the stage that has two."""
    split = split_name(name)
    return f"stages.{name}" if split is None else f"stages.{split[0]}.{PREFILL_DECODE}.{split[1]}"


def lay_over(path: str, before: PrefillDecode, data: Any, side: Side) -> PrefillDecode:
    """Lay a mapping over a `PrefillDecode`.

    Args:
        path: of the mapping.
        side: what is done for each of the two sides.

    Raises:
        ConfigError: an unknown key, or a value of the wrong type; starts with the path of the key.
    """
    known = keys(PrefillDecode)
    changes: dict[str, Any] = {}
    for key, value in MAPPING(path, {} if data is None else data).items():
        where = f"{path}.{key}"
        if key in SIDES:
            changes[key] = side(where, getattr(before, key), MAPPING(where, {} if value is None else value))
        elif key in known:
            changes[key] = known[key].check(where, value)
        else:
            raise unknown_key(path, key, [*known, *SIDES])
    return replace(before, **changes)


def check_said_below(path: str, given: Collection[str]) -> None:
    """Refuse what must be said of each side.

    Args:
        path: of the stage.
        given: the keys that were written for the stage itself.
    """
    for key in OF_A_SIDE:
        if key in given:
            where = f"{path}.{PREFILL_DECODE}"
            raise ConfigError(
                f"{path}.{key}: the stage has replicas of two kinds; "
                f"write {where}.{PREFILL}.{key} and {where}.{DECODE}.{key}"
            )
