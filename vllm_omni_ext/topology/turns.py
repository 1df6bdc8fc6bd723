"""In which order replicas start: those that share a CUDA device one after the other, all others at once.

vLLM finds out how much memory a KV cache may take by looking at the device's free memory before it loads the weights
and after its profile run. What another replica takes or gives back in between is counted as this one's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.topology.shape import Plan, ReplicaPlan

WHOLE_DEVICE = 1.0
"""The part of a device's memory that a replica is taken to want if its plan does not say."""


def start_order(plan: Plan) -> list[ReplicaId]:
    """The replicas of a plan, those that take the most device memory first; equal ones in the plan's order.

    The largest one goes first because loading and profiling take more for a moment than is kept (weights that are
    quantized while they are read, activations of the profile run), which an empty device has room for. A model that
    does not fit is also noticed before anything else was started on the device.
    """

    def memory(replica: ReplicaPlan) -> float:
        part = plan.stage(replica.id.stage).engine_args.get("gpu_memory_utilization")
        return len(replica.devices) * (WHOLE_DEVICE if part is None else float(part))

    return [replica.id for replica in sorted(plan.replicas(), key=memory, reverse=True)]


def devices_of(plan: Plan) -> dict[ReplicaId, tuple[int, ...]]:
    """The devices of every replica, in the order of the start; none on a CPU machine."""
    return {replica: plan.replica(replica).devices for replica in start_order(plan)}


def longest_sequence(devices: Mapping[ReplicaId, Sequence[int]]) -> int:
    """How many starts follow each other at most if all replicas enter `Turns` in this order; at least 1."""
    last: dict[int, int] = {}
    for used in devices.values():
        mine = 1 + max((last.get(device, 0) for device in used), default=0)
        last.update(dict.fromkeys(used, mine))
    return max(last.values(), default=1)


class Turns:
    """Whose turn it is to start. A replica waits for all that share a device with it and came before it.

    Args:
        devices: of every replica that may enter; no device: it never waits.
    """

    def __init__(self, devices: Mapping[ReplicaId, Sequence[int]]) -> None:
        self._devices = {replica: frozenset(used) for replica, used in devices.items()}
        self._queue: dict[ReplicaId, bool] = {}
        """Those that wait (False) or are starting (True), in the order in which they came."""

    def enter(self, replica: ReplicaId) -> list[ReplicaId]:
        """A replica wants to start. Returns it if it may do so now, else nothing: `leave` will name it."""
        self._queue[replica] = False
        return self._next()

    def leave(self, replica: ReplicaId) -> list[ReplicaId]:
        """The start of a replica is over, or is not wanted any more. Returns those whose turn it is now, in order."""
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
