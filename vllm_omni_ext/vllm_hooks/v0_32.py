"""The names of the package `vllm_hooks`, from their modules in vLLM 0.32."""

from vllm.entrypoints.launchers.cli_args import validate_parsed_serve_args
from vllm.entrypoints.serve.utils.api_utils import VLLM_SUBCMD_PARSER_EPILOG, cli_env_setup
