"""`vllm-omni-ext bench ...`: runs `vllm bench`, even if vLLM is built for CUDA and the machine has no GPU.

`vllm-omni-ext bench speech` is a benchmark of this package, and does not import vLLM.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

SPEECH = "speech"


def main(argv: Sequence[str]) -> int:
    """Run `bench speech`, or vLLM's benchmark command with these arguments; return the exit status."""
    if argv[:1] == [SPEECH]:
        from vllm_omni_ext.cli import bench_speech

        return bench_speech.main(argv[1:])
    from vllm import platforms
    from vllm.entrypoints.cli.benchmark.main import BenchmarkSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vllm_omni_ext.vllm_hooks import cli_env_setup

    sys.argv = [sys.argv[0], "bench", *argv]  # vLLM reads the kind of benchmark from here
    cli_env_setup()
    if platforms.current_platform.is_unspecified():  # a client needs no device
        from vllm.platforms.cpu import CpuPlatform

        platforms.current_platform = CpuPlatform()
    parser = FlexibleArgumentParser(prog="vllm-omni-ext")
    BenchmarkSubcommand().subparser_init(parser.add_subparsers(required=True, dest="subparser"))
    args = parser.parse_args(sys.argv[1:])
    args.dispatch_function(args)
    return 0
