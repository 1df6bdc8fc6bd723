"""Stock flags that cannot mean anything with `--omni`: one clear error that says what to write instead."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping

from vllm_omni_ext.errors import ConfigError

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
    "data_parallel_size": (frozenset({1}), _REPLICAS),
    "data_parallel_size_local": (frozenset({None, 1}), _REPLICAS),
    "data_parallel_rank": (frozenset({None}), _REPLICAS),
    "data_parallel_start_rank": (frozenset({None}), _REPLICAS),
    "data_parallel_address": (frozenset({None}), _REPLICAS),
    "data_parallel_rpc_port": (frozenset({None}), _REPLICAS),
    "data_parallel_hybrid_lb": (frozenset({False}), _REPLICAS),
    "data_parallel_external_lb": (frozenset({False}), _REPLICAS),
    "data_parallel_multi_port_external_lb": (frozenset({False}), _REPLICAS),
    "enable_elastic_ep": (frozenset({False}), _REPLICAS),
    "enable_fault_tolerance": (frozenset({False}), "a lost replica is handled by its pool; remove it"),
}
"""Argument -> the values that change nothing, and what to do instead."""

_HEADLESS_SERVERS = (None, 0, 1)
"""Values of `--api-server-count` that may stand beside `--headless`: vLLM's own 0, and this package's default."""


def check_flags(args: argparse.Namespace, given: Collection[str], *, text_stage: str) -> None:
    """Refuse what was given and cannot work.

    Raises:
        ConfigError: starts with the flag and its value.
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
            raise ConfigError(f"{flag}{written}: with --omni {advice.format(stage=text_stage)}")
