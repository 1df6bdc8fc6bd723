"""The command `vllm serve MODEL --omni`, which is also `vllm-omni-ext serve MODEL`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from vllm_omni_ext.cli.options import KEY_VARIABLE
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.titles import name_process
from vllm_omni_ext.topology.plan import Plan

WRONG_CONFIGURATION = 2
"""Exit status if the configuration is wrong, so that no process was started."""


def main(argv: Sequence[str]) -> int:
    """Run the server until it ends. With `--headless`: run replicas that join the deployment of another server.

    Args:
        argv: arguments after the program's name; the word `serve` can be omitted.

    Returns:
        2 if the configuration is wrong: one line is printed on stderr, and no process was started. Otherwise this
        function does not return: it exits the process with the server's exit status.
    """
    name_process("headless" if "--headless" in argv else "head", argv)
    from vllm_omni_ext.vllm_hooks import cli_env_setup

    cli_env_setup()
    try:
        plan, args = prepare(argv)
        from vllm_omni_ext.runtime.launch.secret import with_secret

        plan = with_secret(plan, headless=args.headless, tell=lambda line: print(line, flush=True))
    except ConfigError as err:
        return report(err)
    keep_key(args)
    try:
        status = _run(plan, args)
    except SystemExit as end:  # a signal
        status = end.code if isinstance(end.code, int) else 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # all children have ended, and Python's own clean-up would take seconds


def keep_key(args: argparse.Namespace) -> None:
    """Move VLLM_API_KEY from the environment to the arguments, so that child processes do not inherit the key."""
    key = os.environ.pop(KEY_VARIABLE, None)
    if key and not args.api_key:
        args.api_key = [key]


def _run(plan: Plan, args: argparse.Namespace) -> int:
    from vllm_omni_ext.cli.members import headless_of

    headless = headless_of(args, plan)
    if headless:
        from vllm_omni_ext.runtime.supervise.headless import run_headless

        return run_headless(plan, headless, args)
    from vllm_omni_ext.serving.server import serve

    return serve(plan, args)


def prepare(argv: Sequence[str], *, machine: str | None = None) -> tuple[Plan, argparse.Namespace]:
    """Parse and check the arguments of `serve`, and make the plan. Starts no process.

    Args:
        machine: the machine to plan for, as text for `parse_machine`; None: this machine.

    Returns:
        (plan, parsed arguments)

    Raises:
        ConfigError: an argument, the stage config or the model's config is wrong.
    """
    from vllm.exceptions import VLLMValidationError
    from vllm.logger import configure_logging_from_args

    from vllm_omni_ext.cli.args import parse_serve
    from vllm_omni_ext.cli.settings import from_cli
    from vllm_omni_ext.vllm_hooks import validate_parsed_serve_args

    try:
        args = parse_serve(argv)
        configure_logging_from_args(args)
        validate_parsed_serve_args(args)
    except (TypeError, ValueError) as err:
        raise ConfigError(str(err).removeprefix("Error: ")) from err
    except VLLMValidationError as err:
        flag = f"--{err.parameter.replace('_', '-')}: " if err.parameter else ""
        raise ConfigError(f"{flag}{err.args[0]}") from err
    return from_cli(args, machine=machine)


def report(err: ConfigError) -> int:
    """Print a ConfigError as one line on stderr, and return the exit status, 2."""
    print(f"error: {err}", file=sys.stderr)
    return WRONG_CONFIGURATION
