"""Determines the replicas that this process starts: of all stages, of one stage, or (headless) to join another head.

The head is the process that runs the API servers and admits replicas of other processes.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from vllm_omni_ext.cli.args import EXPLICIT
from vllm_omni_ext.config.checks import ONE_HOST, as_network, is_host
from vllm_omni_ext.config.disaggregation import stage_path
from vllm_omni_ext.config.overrides import with_settings
from vllm_omni_ext.config.schema import OmniConfig
from vllm_omni_ext.disaggregation.parameters import LOOPBACK
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.plugins.spec import PipelineSpec
from vllm_omni_ext.ports import LAST_PORT, VIEWS_PORT
from vllm_omni_ext.topology.plan import Headless, Plan

HEADS_OWN = ("--omni-drain-timeout", "--omni-heartbeat-timeout")
"""Flags of times that a head sends to the replicas that join it."""

_STAGE = "--stage"
_STAGE_ID = "--stage-id"
_ADDRESS = "--omni-master-address"
_PORT = "--omni-master-port"


def for_this_process(args: argparse.Namespace, pipeline: PipelineSpec, config: OmniConfig) -> OmniConfig:
    """Return the configuration with the number of replicas that this process starts for each stage.

    Without `--stage` nothing changes. With `--stage`, that stage has `--omni-dp-size-local` replicas, the others 0.

    Raises:
        ConfigError: the flags contradict each other or the pipeline, or a flag is missing.
    """
    name = _stage_name(args, pipeline)
    _check_flags(args, name)
    if args.headless:
        _check_complete(name, pipeline, config)
    if args.replica_id is not None:
        note = "the head gives replicas their numbers"
        print(f"warning: --replica-id {args.replica_id} is ignored: {note}", file=sys.stderr)
    if name is None:
        return config
    stages = {spec.name: replace(config.stage(spec.name), replicas=0) for spec in pipeline.stages}
    stages[name] = replace(stages[name], replicas=args.omni_dp_size_local)
    return replace(config, stages=stages)


def listening(config: OmniConfig, http_port: int | None = None) -> OmniConfig:
    """Return the configuration of a head, after a check of its ports; called for all processes without `--headless`.

    If only `master_port` is set, `master_address` becomes the loopback.

    Args:
        http_port: port of the HTTP server; None: it listens on a UNIX socket.

    Raises:
        ConfigError: there is no such port for the HTTP server, `master_port` leaves no two ports after it, or
            `port_range` or the HTTP server has a port that the head itself uses.
    """
    if http_port is not None and not 0 <= http_port <= LAST_PORT:
        raise ConfigError(f"port: must be an integer from 0 to {LAST_PORT}, got {http_port}")
    cluster = config.cluster
    own = cluster.master_port
    if own is not None and http_port is not None and own <= http_port <= own + VIEWS_PORT:
        raise ConfigError(f"port: {http_port} is one of the head's own, {own} to {own + VIEWS_PORT} ({_PORT} {own})")
    if own is not None and own > LAST_PORT - VIEWS_PORT:
        raise ConfigError(
            f"cluster.master_port: must be <= {LAST_PORT - VIEWS_PORT}, because the head also listens on the "
            f"{VIEWS_PORT} ports after it, got {own}"
        )
    if own is not None and cluster.ports is not None:
        first, last = cluster.ports
        if first <= own + VIEWS_PORT and own <= last:
            raise ConfigError(
                f"cluster.port_range: {cluster.port_range} has ports of the head's own, {own} to {own + VIEWS_PORT} "
                f"({_PORT} {own}); name others"
            )
    if cluster.master_address is None and own is not None:
        return with_settings(config, {"master_address": LOOPBACK})
    return config


def check_address(config: OmniConfig) -> None:
    """Raise ConfigError if `master_address` means all addresses of a host (e.g. 0.0.0.0): none can connect to it."""
    word = config.cluster.master_address or ""
    if _is_unspecified(word):
        raise ConfigError(
            f"cluster.master_address: '{word}' stands for all addresses of a host, and replicas need one that they "
            f"can reach: {_ADDRESS} HOST"
        )


def _is_unspecified(host: str) -> bool:
    network = as_network(host)
    return host == "*" or (network is not None and network.network_address.is_unspecified)


def refuse_joining(pipeline: PipelineSpec, config: OmniConfig) -> None:
    """Refuse settings of `LLM(omni=True)` that require replicas of other processes, since these cannot join it.

    Raises:
        ConfigError: such a setting is set; the error names the setting.
    """
    for name in ("master_address", "master_port"):
        if (value := getattr(config.cluster, name)) is not None:
            raise ConfigError(
                f"cluster.{name}: no replica can join LLM(omni=True); remove it, or use vllm serve, got {value!r}"
            )
    for spec in pipeline.stages:
        if not config.stage(spec.name).replicas:
            raise ConfigError(
                f"{stage_path(spec.name)}.replicas: must be >= 1: no replica can join LLM(omni=True), got 0"
            )


def check_reachable(pipeline: PipelineSpec, config: OmniConfig) -> None:
    """Raise ConfigError if a stage has no local replica, and the head has no port at which replicas can join."""
    for spec in pipeline.stages:
        if not (config.stage(spec.name).replicas or config.cluster.master_port):
            raise ConfigError(
                f"{stage_path(spec.name)}.replicas: 0 here, so all of them join from elsewhere; "
                f"write {_PORT} PORT too, and {_ADDRESS} HOST for other hosts"
            )


def headless_of(args: argparse.Namespace, plan: Plan) -> Headless | None:
    """Return the settings of a headless process that are not in its plan; None without `--headless`.

    A headless process starts replicas that join the head of another process.

    Args:
        plan: plan for these arguments; only the stage of `--stage` has replicas.
    """
    address, port = plan.config.cluster.master_address, plan.config.cluster.master_port
    if not args.headless or address is None or port is None:
        return None
    (stage,) = (stage for stage in plan.stages if stage.replicas)
    return Headless(
        stage=stage.name,
        replicas=len(stage.replicas),
        head=(address, port),
        replica_address=args.omni_replica_address,
    )


def _stage_name(args: argparse.Namespace, pipeline: PipelineSpec) -> str | None:
    names = [spec.name for spec in pipeline.stages]
    if args.stage is not None and args.stage_id is not None:
        raise ConfigError(f"{_STAGE_ID}: {_STAGE} names the stage too; keep one of the two")
    if args.stage_id is not None:
        if not 0 <= args.stage_id < len(names):
            known = ", ".join(f"{number} ({name})" for number, name in enumerate(names))
            raise ConfigError(f"{_STAGE_ID} {args.stage_id}: no such stage; use one of {known}")
        return names[args.stage_id]
    if args.stage is not None and args.stage not in names:
        raise ConfigError(f"{_STAGE} {args.stage}: no such stage; use one of {', '.join(names)}")
    name: str | None = args.stage
    return name


def _check_flags(args: argparse.Namespace, stage: str | None) -> None:
    replicas = args.omni_dp_size_local
    if replicas < 1:
        raise ConfigError(f"--omni-dp-size-local: must be an integer >= 1, got {replicas}")
    if replicas > 1 and stage is None and not args.headless:
        raise ConfigError(f"--omni-dp-size-local {replicas}: of one stage; write {_STAGE} NAME too")
    if args.headless:
        for flag in HEADS_OWN:
            if flag[2:].replace("-", "_") in getattr(args, EXPLICIT, ()):
                raise ConfigError(f"{flag}: the head's value applies to all replicas; remove it, and write it there")
    if args.omni_replica_address is not None and not args.headless:
        raise ConfigError(
            f"--omni-replica-address {args.omni_replica_address}: only with --headless; "
            "the replicas of this process are reached locally; remove it"
        )
    address = args.omni_replica_address
    if address is not None and (not is_host(address) or _is_unspecified(address)):
        raise ConfigError(f"--omni-replica-address {address}: must be {ONE_HOST}")


def _check_complete(stage: str | None, pipeline: PipelineSpec, config: OmniConfig) -> None:
    """Raise ConfigError if `--headless` is set without stage or head address. The error lists all missing flags."""
    missing = []
    if stage is None:
        missing.append(f"{_STAGE} {'|'.join(spec.name for spec in pipeline.stages)}")
    if config.cluster.master_address is None:
        missing.append(f"{_ADDRESS} HOST")
    if config.cluster.master_port is None:
        missing.append(f"{_PORT} PORT")
    if missing:
        raise ConfigError(f"--headless: the stage it runs and its head must be named; write {' '.join(missing)} too")
