"""`stages.<name>.prefill_decode`: the names and paths of its two sides, which have the keys of `ReplicasConfig`."""

from __future__ import annotations

from collections.abc import Collection

from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.ids import DECODE, PREFILL, SIDES

PREFILL_DECODE = "prefill_decode"

OF_A_SIDE = ("replicas", "devices")
"""Keys that must be written for each side instead of for a stage with `prefill_decode`."""


def side_name(stage: str, side: str) -> str:
    """The name of one side of a stage: `thinker.prefill`."""
    return f"{stage}.{side}"


def split_name(name: str) -> tuple[str, str] | None:
    """A stage and its side, from `thinker.prefill`; None for any other name."""
    stage, _, side = name.rpartition(".")
    return (stage, side) if stage and side in SIDES else None


def stage_path(name: str) -> str:
    """Path of a stage of the plan in the configuration; a prefill or decode side is below the stage that was split."""
    split = split_name(name)
    return f"stages.{name}" if split is None else f"stages.{split[0]}.{PREFILL_DECODE}.{split[1]}"


def refuse_keys_of_split_stage(path: str, given: Collection[str]) -> None:
    """Refuse keys of a split stage that must be written for each side.

    Args:
        path: path of the stage.
        given: the keys that were written for the stage itself.
    """
    for key in OF_A_SIDE:
        if key in given:
            where = f"{path}.{PREFILL_DECODE}"
            raise ConfigError(
                f"{path}.{key}: the stage has replicas of two kinds; "
                f"write {where}.{PREFILL}.{key} and {where}.{DECODE}.{key}"
            )
