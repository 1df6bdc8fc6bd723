"""`vllm-omni-ext bench ...` is `vllm bench`, and also starts with a CUDA build of vLLM on a machine without a GPU.

`vllm-omni-ext bench speech` is our own, and does not import vLLM.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

SPEECH = "speech"


def main(argv: Sequence[str]) -> int:
    """Pass the arguments to vLLM's benchmark command, or to `bench speech`."""
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
