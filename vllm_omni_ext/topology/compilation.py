"""A pipeline's settings of vLLM's compilation, merged with the user's."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

FIELD = "compilation_config"


def with_custom_ops(args: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Engine arguments whose compilation keeps operators as vLLM's own kernels.

    Args:
        args: `EngineArgs` fields; operators that they enable or disable by name stay as they are.
        names: names of the operators, as registered in vLLM.
    """
    given = args.get(FIELD)
    config = {"mode": given} if isinstance(given, int) else copy.copy(given) if given else {}
    said = list(config.get("custom_ops") or () if isinstance(config, dict) else config.custom_ops)
    missing = [f"+{name}" for name in names if not {f"+{name}", f"-{name}"} & {*said}]
    if not missing:
        return dict(args)
    if isinstance(config, dict):
        config["custom_ops"] = said + missing
    else:  # a config object of vLLM, from its command line
        config.custom_ops = said + missing
    return {**args, FIELD: config}
