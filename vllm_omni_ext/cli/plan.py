"""`vllm-omni-ext plan MODEL [flags of serve] [--json] [--machine M]`: prints the processes that `serve` would start."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence

from vllm_omni_ext.cli.members import headless_of
from vllm_omni_ext.cli.serve import prepare, report
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.topology.explain import as_json, explain, memory_data, memory_lines
from vllm_omni_ext.topology.memory import DoesNotFit


def main(argv: Sequence[str]) -> int:
    """Print the plan, and return the exit status: 0, or 2 if the configuration is wrong or the model does not fit.

    With status 2, one line is printed on stderr. If the model does not fit, the memory table of the devices is printed
    too, computed with the smallest KV caches.
    """
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout is for the plan
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    own, words = _parser().parse_known_args(argv)
    try:
        plan, args = prepare(words, machine=own.machine)
        headless = headless_of(args, plan)
        text = json.dumps(as_json(plan, headless), indent=2) + "\n" if own.json else explain(plan, headless)
    except DoesNotFit as err:
        shown = {"fits": False, "memory": memory_data(err.sheets)} if own.json else None
        print(json.dumps(shown, indent=2) if shown else "\n".join(["memory", *memory_lines(err.sheets)]))
        return report(err)
    except ConfigError as err:
        return report(err)
    print(text, end="")
    return 0


def _parser() -> argparse.ArgumentParser:
    """Return a parser of the flags that only `plan` has. The parser of `serve` handles all others and `--help`."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--machine", metavar="cuda:SIZExCOUNT")
    return parser
