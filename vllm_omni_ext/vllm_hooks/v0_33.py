"""The names of the package `vllm_hooks`, from their modules in vLLM 0.33."""

from vllm.entrypoints.common.cli_args import validate_parsed_serve_args
from vllm.entrypoints.common.startup import VLLM_SUBCMD_PARSER_EPILOG, cli_env_setup
