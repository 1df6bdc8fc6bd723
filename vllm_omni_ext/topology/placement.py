"""Assigns CUDA devices to replicas, and determines the order in which replicas start. Pure.

Replicas that share a device start one after the other, all others at the same time. vLLM computes the size of a KV
cache from the device's free memory before it loads the weights and after its profile run. If two replicas started at
once, vLLM would count memory that one allocates or frees in between as the other's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vllm_omni_ext.config.disaggregation import stage_path
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.topology.memory import Demand, Sheet
from vllm_omni_ext.topology.plan import Plan, ReplicaPlan

Devices = tuple[int, ...]

WHOLE_DEVICE = 1.0
"""Fraction of a device that `start_order` assumes for a replica whose plan has no `gpu_memory_utilization`."""


def place(
    demands: Sequence[Demand], device_count: int, device_bytes: Sequence[int] = ()
) -> dict[str, tuple[Devices, ...]]:
    """Return the devices of every replica, by stage.

    Devices that the user has configured are used as written. If only the first replica's devices are configured, each
    further replica gets the next ones: '0,1' makes 0,1 and 2,3. Replicas without configured devices follow in stage
    order. Each gets the devices with the least memory assigned so far, of those with room for it. With enough devices,
    every replica has its own.

    Args:
        demands: memory and number of devices that each stage needs.
        device_count: number of devices of this machine.
        device_bytes: memory of each device as NVML reports it; empty: not known.

    Raises:
        ConfigError: the number of configured devices is wrong, or a device does not exist.
    """
    placed: dict[str, tuple[Devices, ...]] = {}
    load = [0] * device_count
    room = [Sheet(device=device, device_bytes=size, shares=()).usable for device, size in enumerate(device_bytes)]
    for demand in demands:
        if not demand.replicas:
            placed[demand.stage] = ()
        elif demand.devices is not None:
            placed[demand.stage] = _written(demand, demand.devices, device_count)
            for device in (d for devices in placed[demand.stage] for d in devices):
                load[device] += demand.size
    for demand in demands:
        if demand.stage not in placed:
            placed[demand.stage] = tuple(_least_loaded(demand, load, room) for _ in range(demand.replicas))
    return {demand.stage: placed[demand.stage] for demand in demands}


def _written(demand: Demand, text: str, device_count: int) -> tuple[Devices, ...]:
    path = f"{stage_path(demand.stage)}.devices"
    ids = tuple(int(part) for part in text.split(","))
    size, total = demand.per_replica, demand.per_replica * demand.replicas
    if len(ids) not in (size, total):
        template = "" if demand.replicas == 1 else f"; write {total}, or {size} for the first replica"
        raise ConfigError(f"{path}: {_arithmetic(demand)}, but '{text}' names {len(ids)}{template}")
    if len(ids) < total:
        replicas = tuple(tuple(device + at for device in ids) for at in range(0, total, size))
    else:
        replicas = tuple(ids[at : at + size] for at in range(0, total, size))
    for devices in replicas:
        if len(set(devices)) != len(devices):
            names = ",".join(map(str, devices))
            raise ConfigError(f"{path}: a replica would have the same device twice ('{names}'); name different ones")
    if len(ids) < total:
        used = [device for devices in replicas for device in devices]
        derived = " and ".join(f"'{','.join(map(str, devices))}'" for devices in replicas)
        made = f"{path}: {_arithmetic(demand)}; '{text}' for the first makes {derived}"
        if max(used) >= device_count:
            raise ConfigError(
                f"{made}, but {_has(device_count)}; write all {total} to place them differently or to share"
            )
        if len(set(used)) != total:
            raise ConfigError(f"{made}, which are not {total} different ones; write all {total}")
    for device in ids:
        if device >= device_count:
            raise ConfigError(f"{path}: device {device} does not exist; {_has(device_count)}")
    return replicas


def _least_loaded(demand: Demand, load: list[int], room: Sequence[int]) -> Devices:
    """Return the devices of one replica, and add its memory to `load`.

    Args:
        load: bytes assigned so far, by device.
        room: bytes that can be assigned, by device; empty: not known.
    """

    def order(device: int) -> tuple[bool, int, int]:
        size = room[device] if room else 0
        return bool(room) and load[device] + demand.size + demand.need.context > size, load[device], -size

    if demand.per_replica > len(load):
        raise ConfigError(
            f"{stage_path(demand.stage)}: a replica needs {demand.per_replica} devices "
            f"({_parallel(demand)}), but this machine has {len(load)}"
        )
    chosen = sorted(sorted(range(len(load)), key=order)[: demand.per_replica])
    for device in chosen:
        load[device] += demand.size
    return tuple(chosen)


def _has(device_count: int) -> str:
    return "this machine has " + (f"devices 0 to {device_count - 1}" if device_count > 1 else "only device 0")


def _parallel(demand: Demand) -> str:
    text = f"tensor_parallel_size {demand.tensor_parallel}"
    return text if demand.pipeline_parallel == 1 else f"{text} x pipeline_parallel_size {demand.pipeline_parallel}"


def _arithmetic(demand: Demand) -> str:
    replicas = "1 replica" if demand.replicas == 1 else f"{demand.replicas} replicas"
    return f"{replicas} x {_parallel(demand)} = {demand.replicas * demand.per_replica} devices"


def start_order(plan: Plan) -> list[ReplicaId]:
    """Return the ids of all replicas in start order: those with the most device memory first, equals in plan order.

    The largest replica starts first because loading and profiling temporarily need more memory than the replica keeps
    (weights that are quantized while they are read, activations of the profile run). An empty device has this memory. A
    model that does not fit is also detected before another replica starts on the device.
    """

    def memory(replica: ReplicaPlan) -> float:
        part = plan.stage(replica.id.stage).engine_args.get("gpu_memory_utilization")
        return len(replica.devices) * (WHOLE_DEVICE if part is None else float(part))

    return [replica.id for replica in sorted(plan.replicas(), key=memory, reverse=True)]


def devices_of(plan: Plan) -> dict[ReplicaId, tuple[int, ...]]:
    """Return the devices of every replica, in start order; empty tuples on a CPU machine."""
    return {replica: plan.replica(replica).devices for replica in start_order(plan)}


def longest_sequence(devices: Mapping[ReplicaId, Sequence[int]]) -> int:
    """Return the largest number of replicas that start one after the other because they share devices; at least 1.

    The longest possible wait for the last of them is this number times the start timeout.

    Args:
        devices: devices of every replica, in the order in which the replicas enter `Turns`.
    """
    last: dict[int, int] = {}
    for used in devices.values():
        mine = 1 + max((last.get(device, 0) for device in used), default=0)
        last.update(dict.fromkeys(used, mine))
    return max(last.values(), default=1)


class Turns:
    """Decides when each replica may start: after all replicas that entered before it and share a device with it.

    Args:
        devices: devices of every replica that may enter; a replica without devices never waits.
    """

    def __init__(self, devices: Mapping[ReplicaId, Sequence[int]]) -> None:
        self._devices = {replica: frozenset(used) for replica, used in devices.items()}
        self._queue: dict[ReplicaId, bool] = {}
        """For each replica in order of arrival: whether it is starting (True) or waits (False)."""

    def enter(self, replica: ReplicaId) -> list[ReplicaId]:
        """Add a replica that is to be started.

        Returns:
            [replica] if it may start now; an empty list if it must wait until `leave` returns it.
        """
        self._queue[replica] = False
        return self._next()

    def leave(self, replica: ReplicaId) -> list[ReplicaId]:
        """Remove a replica that has started or has failed. Return the waiting replicas that may start now, in order."""
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
