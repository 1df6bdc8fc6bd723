"""Divides the memory of CUDA devices between replicas, and refuses devices that are too small. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_omni_ext.config.disaggregation import stage_path
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.topology.needs import GIB, Need
from vllm_omni_ext.topology.placement import Devices

DRIVER_BYTES = int(0.8 * GIB)
"""Memory of the driver: a process sees that much less than NVML reports (0.4 GiB on a small card, 0.8 on an A100)."""

MARGIN = 0.02
"""Part of the visible memory that is kept free for fragmentation and for errors of the estimates."""

DEFAULT_UTILIZATION = 0.92
"""vLLM's default `gpu_memory_utilization`; a replica alone on its devices takes no more without need."""

_STEPS = 10_000
"""Shares are written with four decimals."""


class DoesNotFit(ConfigError):
    """A device is too small.

    Args:
        sheets: the devices with the smallest KV caches.
    """

    def __init__(self, message: str, sheets: Sequence[Sheet]) -> None:
        super().__init__(message)
        self.sheets = tuple(sheets)


@dataclass(frozen=True, kw_only=True)
class Ask:
    """Memory needs of one stage.

    Attributes:
        need: memory needed on each device of each replica.
        utilization: `gpu_memory_utilization` if the user set it.
        kv_bytes: KV cache per device if the user set it.
    """

    stage: str
    need: Need
    utilization: float | None = None
    kv_bytes: int | None = None

    @property
    def kv(self) -> int:
        """Minimum size of the KV cache."""
        return self.need.least_kv if self.kv_bytes is None else self.kv_bytes

    @property
    def grows(self) -> bool:
        """Whether the KV cache grows into the remaining memory."""
        return bool(self.need.kv_token) and self.utilization is None and self.kv_bytes is None

    def least(self, visible: int) -> int:
        """Minimum bytes of a device for the replica, without its context."""
        return self.need.fixed + self.kv if self.utilization is None else int(self.utilization * visible)


@dataclass(frozen=True, kw_only=True)
class Share:
    """One replica's part of one device. `kv_bytes` is below the minimum of `need` only if the user set it."""

    replica: str
    need: Need
    kv_bytes: int

    @property
    def kv_tokens(self) -> int:
        """Tokens the KV cache holds."""
        return self.kv_bytes // self.need.kv_token if self.need.kv_token else 0

    @property
    def total(self) -> int:
        """All bytes of the replica on the device, its context included."""
        return self.need.fixed + self.need.context + self.kv_bytes


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """One device: its memory in bytes as NVML reports it, and the shares of its replicas."""

    device: int
    device_bytes: int
    shares: tuple[Share, ...]

    @property
    def usable(self) -> int:
        """Bytes that can be assigned to replicas."""
        return usable_bytes(self.device_bytes)

    @property
    def taken(self) -> int:
        """Bytes of all shares together."""
        return sum(share.total for share in self.shares)

    @property
    def free(self) -> int:
        """Unassigned bytes, without the reserve; negative if the device is too small."""
        return self.usable - self.taken


def visible_bytes(device_bytes: int) -> int:
    """Bytes of a device that a process sees; `gpu_memory_utilization` is a part of them."""
    return max(0, device_bytes - DRIVER_BYTES)


def usable_bytes(device_bytes: int) -> int:
    """Bytes of a device that can be assigned, contexts included."""
    return int(visible_bytes(device_bytes) * (1 - MARGIN))


def divide(
    asks: Sequence[Ask], placed: Mapping[str, tuple[Devices, ...]], device_bytes: Sequence[int]
) -> tuple[dict[str, float], tuple[Sheet, ...]]:
    """Assign the memory of all devices to replicas.

    Every replica gets its need with the KV cache of one full sequence. The remaining memory of a device goes to its KV
    caches, in equal numbers of tokens; a replica alone on a device takes at most `DEFAULT_UTILIZATION` that way. Values
    set by the user stay unchanged. All replicas of a stage have the values of its fullest device.

    Returns:
        `gpu_memory_utilization` by stage, where it differs from vLLM's default, and one sheet per device.

    Raises:
        DoesNotFit: a device is too small.
        ConfigError: a value that the user set for one stage is too small.
    """
    known = {ask.stage: ask for ask in asks if placed[ask.stage]}
    users = {
        device: [
            (f"{stage}/{number}", ask)
            for stage, ask in known.items()
            for number, devices in enumerate(placed[stage])
            if device in devices
        ]
        for device in range(len(device_bytes))
    }
    for device, found in users.items():
        for _, ask in found:
            _check_said(ask, device, visible_bytes(device_bytes[device]))
    least = [_sheet(device, found, device_bytes[device], {}) for device, found in users.items()]
    _check_fits(least, users)
    extra = {stage: _extra_tokens(ask, users, device_bytes) for stage, ask in known.items()}
    sheets = tuple(_sheet(device, found, device_bytes[device], extra) for device, found in users.items())
    utilizations = {
        stage: value
        for stage, ask in known.items()
        if ask.utilization is None and (value := _utilization(ask, extra[stage], users, device_bytes)) is not None
    }
    return utilizations, sheets


_Users = Mapping[int, Sequence[tuple[str, Ask]]]


def _sheet(device: int, users: Sequence[tuple[str, Ask]], size: int, extra: Mapping[str, int]) -> Sheet:
    shares = []
    for replica, ask in users:
        kv = ask.kv + extra.get(ask.stage, 0) * ask.need.kv_token
        if ask.utilization is not None and ask.kv_bytes is None and ask.need.kv_token:
            kv = max(0, int(ask.utilization * visible_bytes(size)) - ask.need.fixed)
        shares.append(Share(replica=replica, need=ask.need, kv_bytes=kv))
    return Sheet(device=device, device_bytes=size, shares=tuple(shares))


def _extra_tokens(ask: Ask, users: _Users, device_bytes: Sequence[int]) -> int:
    """Tokens beyond one sequence for which every device of the stage has room."""
    if not ask.grows:
        return 0
    rooms = []
    for device, found in users.items():
        if not any(other is ask for _, other in found):
            continue
        visible = visible_bytes(device_bytes[device])
        taken = sum(other.least(visible) + other.need.context for _, other in found)
        room = usable_bytes(device_bytes[device]) - taken
        if len(found) == 1:
            room = min(room, max(int(DEFAULT_UTILIZATION * visible) - ask.least(visible), int(MARGIN * visible)))
        rooms.append(max(0, room) // sum(other.need.kv_token for _, other in found if other.grows))
    return min(rooms)


def _utilization(ask: Ask, extra: int, users: _Users, device_bytes: Sequence[int]) -> float | None:
    """The part of its fullest device that a stage takes; None if that is vLLM's default."""
    mine = [(device, len(found)) for device, found in users.items() if any(other is ask for _, other in found)]
    take = ask.least(0) + extra * ask.need.kv_token
    sizes = {visible_bytes(device_bytes[device]) for device, _ in mine}
    default = DEFAULT_UTILIZATION * min(sizes)
    alone = all(count == 1 for _, count in mine)
    if alone and take <= default and default + ask.need.context <= (1 - MARGIN) * min(sizes):
        return None
    if len(sizes) > 1:
        names = ", ".join(str(device) for device, _ in mine)
        raise ConfigError(
            f"{stage_path(ask.stage)}.devices: devices {names} differ in memory, and a stage has one share for all its "
            "replicas; name devices of the same size, or write engine.gpu_memory_utilization"
        )
    return math.ceil(take / sizes.pop() * _STEPS) / _STEPS


def _check_said(ask: Ask, device: int, visible: int) -> None:
    """Refuse a user's size that cannot hold the weights and one sequence."""
    need, path = ask.need, stage_path(ask.stage)
    if ask.kv_bytes is not None and need.kv_token and ask.kv_bytes < need.least_kv:
        tokens = max(0, ask.kv_bytes // (need.kv_token * need.block_tokens) - 1) * need.block_tokens
        raise ConfigError(
            f"{path}.kv_cache_bytes: {ask.kv_bytes} hold {tokens} tokens of {need.kv_token} bytes, but a sequence may "
            f"have {need.sequence_tokens}; write at least {need.least_kv}, or engine.max_model_len: {tokens}"
        )
    if ask.utilization is not None and ask.utilization * visible < need.weights + ask.kv:
        least = math.ceil((need.fixed + ask.kv) / visible * 100) / 100
        instead = f"write {least:g}" if least <= 1 else "use a larger device or more of them"
        raise ConfigError(
            f"{path}.engine.gpu_memory_utilization: {ask.utilization:g} of device {device} is "
            f"{gib(int(ask.utilization * visible))} GiB, but weights ({gib(need.weights)}) and KV cache ({gib(ask.kv)} "
            f"for {need.sequence_tokens} tokens) are {gib(need.weights + ask.kv)} GiB; {instead}"
        )


def _check_fits(sheets: Sequence[Sheet], users: _Users) -> None:
    """Refuse devices that are too small, by the worst. If the user set every share, only their sum is checked."""
    short: list[tuple[int, Sheet]] = []
    for sheet in sheets:
        visible = visible_bytes(sheet.device_bytes)
        written = [ask.utilization for _, ask in users[sheet.device] if ask.utilization is not None]
        if len(written) == len(sheet.shares):
            if sum(written) > 1 + 1e-9:
                raise ConfigError(
                    f"gpu_memory_utilization: the replicas on device {sheet.device} have {sum(written):g} together, "
                    "which is more than 1; lower one of them or give the stages different devices"
                )
            continue
        needed = sum(ask.least(visible) + ask.need.context for _, ask in users[sheet.device])
        if needed > sheet.usable:
            short.append((needed, sheet))
    if short:
        needed, worst = max(short, key=lambda found: found[0] - found[1].usable)
        raise DoesNotFit(_too_small(worst, users[worst.device], needed), sheets)


def _too_small(sheet: Sheet, users: Sequence[tuple[str, Ask]], needed: int) -> str:
    visible = visible_bytes(sheet.device_bytes)
    parts = []
    for replica, ask in users:
        n = ask.need
        inner = f"weights {gib(n.weights)}"
        if n.kv_token:
            inner += f", KV cache of {n.sequence_tokens} tokens {gib(ask.kv)}"
        inner += f", activations {gib(n.activations)}, graphs and buffers {gib(n.graphs + n.buffers)}"
        parts.append(f"{replica} {gib(ask.least(visible) + n.context)} ({inner}, context {gib(n.context)})")
    return (
        f"memory: device {sheet.device} has {gib(sheet.usable)} GiB to hand out of {gib(sheet.device_bytes)}, but "
        f"{gib(needed)} are needed: {' + '.join(parts)}"
    )


def gib(size: int) -> str:
    """Bytes as GiB with one decimal."""
    return f"{size / GIB:.1f}"
