"""The order in which replicas start: those that share a CUDA device one after the other, all others at once.

vLLM sizes a KV cache from the device's free memory before it loads the weights and after its profile run. Memory that
another replica allocates or frees in between is attributed to this replica.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.topology.shape import Plan, ReplicaPlan

WHOLE_DEVICE = 1.0
"""Part of a device's memory that a replica is assumed to take if its plan sets none."""


def start_order(plan: Plan) -> list[ReplicaId]:
    """The replicas of a plan, largest device memory first, equal ones in the plan's order.

    The largest one goes first because loading and profiling temporarily need more memory than the replica keeps
    (weights that are quantized while they are read, activations of the profile run), which an empty device has. A model
    that does not fit is also detected before another replica starts on the device.
    """

    def memory(replica: ReplicaPlan) -> float:
        part = plan.stage(replica.id.stage).engine_args.get("gpu_memory_utilization")
        return len(replica.devices) * (WHOLE_DEVICE if part is None else float(part))

    return [replica.id for replica in sorted(plan.replicas(), key=memory, reverse=True)]


def devices_of(plan: Plan) -> dict[ReplicaId, tuple[int, ...]]:
    """The devices of every replica, in start order; none on a CPU machine."""
    return {replica: plan.replica(replica).devices for replica in start_order(plan)}


def longest_sequence(devices: Mapping[ReplicaId, Sequence[int]]) -> int:
    """The largest number of consecutive starts if all replicas enter `Turns` in this order; at least 1."""
    last: dict[int, int] = {}
    for used in devices.values():
        mine = 1 + max((last.get(device, 0) for device in used), default=0)
        last.update(dict.fromkeys(used, mine))
    return max(last.values(), default=1)


class Turns:
    """Start turns. A replica waits for all that entered before it and share a device with it.

    Args:
        devices: devices of every replica that may enter; a replica without devices never waits.
    """

    def __init__(self, devices: Mapping[ReplicaId, Sequence[int]]) -> None:
        self._devices = {replica: frozenset(used) for replica, used in devices.items()}
        self._queue: dict[ReplicaId, bool] = {}
        """Replicas that wait (False) or are starting (True), in order of arrival."""

    def enter(self, replica: ReplicaId) -> list[ReplicaId]:
        """Request a replica's turn. Returns the replica if it may start now; otherwise `leave` will return it."""
        self._queue[replica] = False
        return self._next()

    def leave(self, replica: ReplicaId) -> list[ReplicaId]:
        """End the turn of a replica, or its wait. Returns the replicas whose turn it is now, in order."""
        self._queue.pop(replica, None)
        return self._next()

    def _next(self) -> list[ReplicaId]:
        taken: set[int] = set()
        free: list[ReplicaId] = []
        for replica, is_starting in self._queue.items():
            devices = self._devices.get(replica, frozenset())
            if not is_starting and not taken & devices:
                free.append(replica)
            taken |= devices
        self._queue.update(dict.fromkeys(free, True))
        return free
