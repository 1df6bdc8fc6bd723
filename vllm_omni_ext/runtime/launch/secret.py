"""The cluster secret of a deployment that other hosts can join, chosen before any process is started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from vllm_omni_ext.coordinator.keys import Keys
from vllm_omni_ext.coordinator.secret_file import default_file, find, find_or_make, read_by_others
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.runtime.launch.addresses import is_here, is_loopback
from vllm_omni_ext.topology.plan import Plan

FLAG, WITHOUT = "--omni-cluster-secret-file", "--omni-no-cluster-secret"
PORT = "--omni-master-port PORT"

Tell = Callable[[str], None]


def with_secret(plan: Plan, *, headless: bool, tell: Tell) -> Plan:
    """The plan with the file of its secret; unchanged without a `master_address`, when no secret is needed.

    Without a configured file, a head uses this user's file on this host and creates it if missing. A headless node on
    the head's host does the same; on another host the file must exist.

    Args:
        headless: the process is a headless node, not a head.
        tell: receives lines for the user.

    Raises:
        ConfigError: there is no secret, its file cannot be trusted, or the settings contradict each other.
    """
    config = plan.config
    if config.no_cluster_secret and config.cluster_secret_file is not None:
        raise ConfigError(f"no_cluster_secret: there is a cluster_secret_file too; keep {WITHOUT} or {FLAG}")
    if config.master_address is None:
        return plan
    if config.master_port is None:
        raise ConfigError(f"master_address: without a port nobody can join; write {PORT} too")
    if config.no_cluster_secret:
        if not headless:
            tell(
                f"warning: no cluster secret ({WITHOUT}): whoever reaches {config.master_address} can join, see "
                "requests and outputs, and send false ones"
            )
        return plan
    if config.cluster_secret_file is not None:
        file = Path(config.cluster_secret_file).expanduser()
        if read_by_others(file):
            tell(f"warning: the cluster secret can be read by other users: chmod 600 {file}")
    elif headless and not is_here(config.master_address):
        file = _brought(config.master_address)
    else:
        file = _own(config.master_address, tell=None if headless else tell)
    Keys.read(str(file))
    return replace(plan, config=replace(config, cluster_secret_file=str(file)))


def _brought(head: str) -> Path:
    file = find()
    if file is None:
        raise ConfigError(
            f"cluster secret: the head at {head} is on another host, and its secret is not here. There: "
            f"scp {default_file()} THIS_HOST:cluster.secret; here: {FLAG} cluster.secret. "
            f"If the head has none: {WITHOUT}"
        )
    return file


def _own(head: str, tell: Tell | None) -> Path:
    file, made = find_or_make()
    if tell is not None:
        line = f"cluster secret: {file}{' (made now)' if made else ''}; this user's replicas on this host find it"
        if not is_loopback(head):
            line += f"; other hosts: scp {file} HOST:cluster.secret, and there {FLAG} cluster.secret"
        tell(line)
    return file
