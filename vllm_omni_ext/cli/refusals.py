"""Stock flags that have no meaning with `--omni`: each raises an error that contains the replacement."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping

from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.topology.engine_args import DATA_PARALLEL

_REPLICAS = (
    'stages are replicated, not data-parallel; write --stage-overrides \'{{"{stage}": {{"replicas": 2}}}}\' '
    "or replicas in a stage config"
)
_HOST = "a replica runs on one host; remove it"

REFUSED: Mapping[str, tuple[frozenset[object], str]] = {
    "grpc": (frozenset({False}), "only the HTTP server is available; remove it"),
    "grpc_port": (frozenset({None}), "only the HTTP server is available; remove it"),
    "runner": (frozenset({"auto", "generate"}), "the stages choose their own runner; remove it"),
    "convert": (frozenset({"auto", "none"}), "the stages choose their own; remove it"),
    "device_ids": (
        frozenset({None}),
        'write --stage-overrides \'{{"{stage}": {{"devices": "0"}}}}\' or devices in a stage config',
    ),
    "master_addr": (frozenset({"127.0.0.1"}), "the head's address is another flag; write --omni-master-address"),
    "master_port": (frozenset({29501}), "the head's port is another flag; write --omni-master-port"),
    "nnodes": (frozenset({1}), _HOST),
    "node_rank": (frozenset({0}), _HOST),
    **{name: (frozenset({harmless}), _REPLICAS) for name, harmless in DATA_PARALLEL.items()},
    "enable_fault_tolerance": (frozenset({False}), "a lost replica is handled by its pool; remove it"),
}
"""Argument -> the accepted values, which change nothing, and the error about other values."""

_HEADLESS_SERVERS = (None, 0, 1)
"""Values of `--api-server-count` accepted with `--headless`: vLLM's own 0, and this package's default."""


def check_flags(args: argparse.Namespace, given: Collection[str], *, frontend: str) -> None:
    """Refuse given flags that cannot work.

    Raises:
        ConfigError: the message starts with the flag and its value.
    """
    names = REFUSED.keys() & set(given)
    if args.headless and args.api_server_count not in _HEADLESS_SERVERS:
        raise ConfigError(f"--api-server-count {args.api_server_count}: --headless starts no API server; remove it")
    for name in sorted(names):
        harmless, advice = REFUSED[name]
        value = getattr(args, name)
        if isinstance(value, list) or value not in harmless:
            written = "" if value is True else f" {value}"
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag}{written}: with --omni {advice.format(stage=frontend)}")
