"""Names and paths of the two sides (prefill and decode) of a stage with `prefill_decode`.

Each side has the keys of `ReplicasConfig`.
"""

from __future__ import annotations

from collections.abc import Collection

from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.ids import DECODE, PREFILL, SIDES

PREFILL_DECODE = "prefill_decode"

OF_A_SIDE = ("replicas", "devices")
"""Keys that must be set below `prefill` and `decode`, and not for the stage itself, if it has `prefill_decode`."""


def side_name(stage: str, side: str) -> str:
    """Return the name of one side of a stage, e.g. `thinker.prefill`."""
    return f"{stage}.{side}"


def split_name(name: str) -> tuple[str, str] | None:
    """Return (stage, side) of the name of a side such as `thinker.prefill`; None for any other name."""
    stage, _, side = name.rpartition(".")
    return (stage, side) if stage and side in SIDES else None


def stage_path(name: str) -> str:
    """Return the configuration path of a stage, such as `stages.talker`.

    The path of a prefill or decode stage is `stages.NAME.prefill_decode.prefill` (or `.decode`).
    """
    split = split_name(name)
    return f"stages.{name}" if split is None else f"stages.{split[0]}.{PREFILL_DECODE}.{split[1]}"


def refuse_keys_of_split_stage(path: str, given: Collection[str]) -> None:
    """Raise ConfigError if a stage with `prefill_decode` sets a key that must be set for each of its sides.

    Args:
        path: configuration path of the stage.
        given: the keys that are set for the stage itself.
    """
    for key in OF_A_SIDE:
        if key in given:
            where = f"{path}.{PREFILL_DECODE}"
            raise ConfigError(
                f"{path}.{key}: the stage has replicas of two kinds; "
                f"write {where}.{PREFILL}.{key} and {where}.{DECODE}.{key}"
            )
