"""`vllm-omni-ext plan MODEL [flags of serve] [--json]`: show what would be started, start nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from vllm_omni_ext.cli.members import headless_of
from vllm_omni_ext.cli.serve import prepare, report
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.topology.explain import as_json, explain

_JSON = "--json"


def main(argv: Sequence[str]) -> int:
    """Print the plan. Returns 0, or 2 with one line on stderr if the configuration is wrong."""
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout is the plan's
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    try:
        plan, args = prepare([word for word in argv if word != _JSON])
    except ConfigError as err:
        return report(err)
    headless = headless_of(args, plan)
    if _JSON in argv:
        print(json.dumps(as_json(plan, headless), indent=2))
    else:
        print(explain(plan, headless), end="")
    return 0
