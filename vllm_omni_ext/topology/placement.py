"""Assigns CUDA devices to replicas, and parts of a shared device's memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_omni_ext.config.disaggregation import stage_path
from vllm_omni_ext.errors import ConfigError

SHARED_DEVICE_MEMORY = 0.9
"""Part of a device's memory that replicas sharing it get together; the remainder is for CUDA contexts."""

Devices = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Devices and memory that one stage requires.

    Attributes:
        tensor_parallel, pipeline_parallel: their product is the number of devices of one replica.
        replicas: 0 = the stage is on other hosts and gets no device, even if `devices` is set.
        devices: `stages.<name>.devices`: all devices of all replicas in order, or only those of the first replica; None
            = place automatically.
        share: relative part of a shared device's memory (`StageSpec.gpu_share`).
        utilization: `gpu_memory_utilization` if the user set it.
    """

    stage: str
    replicas: int
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    devices: str | None = None
    share: float = 1.0
    utilization: float | None = None

    @property
    def per_replica(self) -> int:
        """Devices of one replica."""
        return self.tensor_parallel * self.pipeline_parallel


def place(demands: Sequence[Demand], device_count: int) -> dict[str, tuple[Devices, ...]]:
    """Assign devices to every replica.

    Configured devices are used as written. Devices of one replica alone are a template that replica r shifts by r times
    the devices per replica: '0,1' makes 0,1 and 2,3. Replicas without configured devices follow in stage order, each on
    the devices with the least load so far, where the load of a replica is its stage's share. With enough devices every
    replica has its own; with two, the largest stage has one for itself; with one, all replicas share it.

    Raises:
        ConfigError: counts that do not match; the message shows the arithmetic.
    """
    placed: dict[str, tuple[Devices, ...]] = {}
    load = [0.0] * device_count
    for demand in demands:
        if not demand.replicas:
            placed[demand.stage] = ()
        elif demand.devices is not None:
            placed[demand.stage] = _written(demand, demand.devices, device_count)
            for device in (d for devices in placed[demand.stage] for d in devices):
                load[device] += demand.share
    for demand in demands:
        if demand.stage not in placed:
            placed[demand.stage] = tuple(_least_loaded(demand, load) for _ in range(demand.replicas))
    return {demand.stage: placed[demand.stage] for demand in demands}


def memory_shares(demands: Sequence[Demand], placed: Mapping[str, tuple[Devices, ...]]) -> dict[str, float]:
    """`gpu_memory_utilization` for each stage that shares a device and whose user did not set it.

    Values set by the user are subtracted from `SHARED_DEVICE_MEMORY` first, and the remainder is split by share. A
    stage has one value for all its replicas: that of its fullest device. A stage alone on its devices has vLLM's
    default.
    """
    shares: dict[str, float] = {}
    for device in sorted({d for replicas in placed.values() for devices in replicas for d in devices}):
        users = [demand for demand in demands for devices in placed[demand.stage] if device in devices]
        if len(users) == 1:
            continue
        unit = _unit_share(device, users)
        for demand in users:
            if demand.utilization is None:
                value = math.floor(demand.share * unit * 1000 + 1e-6) / 1000
                shares[demand.stage] = min(value, shares.get(demand.stage, value))
    return shares


def _written(demand: Demand, text: str, device_count: int) -> tuple[Devices, ...]:
    path = f"{stage_path(demand.stage)}.devices"
    ids = tuple(int(part) for part in text.split(","))
    size, total = demand.per_replica, demand.per_replica * demand.replicas
    if len(ids) not in (size, total):
        template = "" if demand.replicas == 1 else f"; write {total}, or {size} for the first replica"
        raise ConfigError(f"{path}: {_arithmetic(demand)}, but '{text}' names {len(ids)}{template}")
    is_template = len(ids) < total
    if is_template:
        replicas = tuple(tuple(device + at for device in ids) for at in range(0, total, size))
    else:
        replicas = tuple(ids[at : at + size] for at in range(0, total, size))
    for devices in replicas:
        if len(set(devices)) != len(devices):
            names = ",".join(map(str, devices))
            raise ConfigError(f"{path}: a replica would have the same device twice ('{names}'); name different ones")
    if is_template:
        _check_template(demand, text, replicas, device_count)
    for device in ids:
        if device >= device_count:
            raise ConfigError(f"{path}: device {device} does not exist; {_has(device_count)}")
    return replicas


def _check_template(demand: Demand, text: str, replicas: tuple[Devices, ...], device_count: int) -> None:
    """Check that the devices derived from the first replica's exist and do not overlap."""
    path = f"{stage_path(demand.stage)}.devices"
    used = [device for devices in replicas for device in devices]
    come_out = " and ".join(f"'{','.join(map(str, devices))}'" for devices in replicas)
    write = f"write all {len(used)}"
    if max(used) >= device_count:
        raise ConfigError(
            f"{path}: {_arithmetic(demand)}; '{text}' for the first makes {come_out}, but {_has(device_count)}; "
            f"{write} to place them differently or to share"
        )
    if len(set(used)) != len(used):
        raise ConfigError(
            f"{path}: {_arithmetic(demand)}; '{text}' for the first makes {come_out}, which are not {len(used)} "
            f"different ones; {write}"
        )


def _least_loaded(demand: Demand, load: list[float]) -> Devices:
    if demand.per_replica > len(load):
        raise ConfigError(
            f"{stage_path(demand.stage)}: a replica needs {demand.per_replica} devices "
            f"({_parallel(demand)}), but this machine has {len(load)}"
        )
    chosen = sorted(sorted(range(len(load)), key=lambda device: (round(load[device], 9), device))[: demand.per_replica])
    for device in chosen:
        load[device] += demand.share
    return tuple(chosen)


def _unit_share(device: int, users: Sequence[Demand]) -> float:
    """Memory of one unit of `share` on a device."""
    written = [(demand.stage, demand.utilization) for demand in users if demand.utilization is not None]
    taken = sum(value for _, value in written)
    sum_text = " + ".join(f"{stage} {value:g}" for stage, value in written)
    if taken > 1.0 + 1e-9:
        raise ConfigError(
            f"gpu_memory_utilization: device {device} is shared and {sum_text} = {taken:g} is more than 1; "
            "lower one of them or give the stages different devices"
        )
    relative = sum(demand.share for demand in users if demand.utilization is None)
    if relative and SHARED_DEVICE_MEMORY - taken < 0.01:
        waiting = next(demand.stage for demand in users if demand.utilization is None)
        raise ConfigError(
            f"{stage_path(waiting)}.engine.gpu_memory_utilization: {sum_text} leaves nothing of device {device} "
            f"(at most {SHARED_DEVICE_MEMORY:g} of a shared device is handed out); lower it or set this one too"
        )
    return (SHARED_DEVICE_MEMORY - taken) / relative if relative else 0.0


def _has(device_count: int) -> str:
    return "this machine has " + (f"devices 0 to {device_count - 1}" if device_count > 1 else "only device 0")


def _parallel(demand: Demand) -> str:
    text = f"tensor_parallel_size {demand.tensor_parallel}"
    return text if demand.pipeline_parallel == 1 else f"{text} x pipeline_parallel_size {demand.pipeline_parallel}"


def _arithmetic(demand: Demand) -> str:
    replicas = "1 replica" if demand.replicas == 1 else f"{demand.replicas} replicas"
    return f"{replicas} x {_parallel(demand)} = {demand.replicas * demand.per_replica} devices"
