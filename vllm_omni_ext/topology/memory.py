"""Computes the memory that each replica needs on its CUDA devices, and divides devices between replicas. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_omni_ext.config.disaggregation import stage_path
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.plugins.memory import LIBRARY_BYTES, EncoderMemory, StageFacts

GIB = 1 << 30
MIB = 1 << 20

CONTEXT_BYTES = 600 * MIB
"""A process's CUDA context with the code of its kernels: about 0.5 GiB on an H100. It is allocated before vLLM
measures free memory, so that `gpu_memory_utilization` does not include it.
"""

COMMUNICATION_BYTES = GIB
"""NCCL's channels and vLLM's buffers for all-reduce, if a replica has several devices. An estimate. Like the CUDA
context, they are allocated before vLLM measures free memory."""

GRAPH_LAYER_BYTES = 512 << 10
"""Bytes of one layer in one captured CUDA graph, an estimate. For models with 32 to 36 layers, vLLM logs 0.5 to 0.85
GiB for 67 graphs, i.e. about half of this value for a layer and graph; the other half is for layers with experts."""

MOST_CAPTURED_TOKENS = 512
"""Largest batch that vLLM captures by default, in tokens: twice `max_num_seqs`, and at most this."""

LOGIT_BYTES = 18
"""Bytes per logit at the peak of sampling: 2 for 16 bits, 4 each for float32, scaled, probability and sorted."""

COUNT_BITS = 33
"""Bits per vocabulary entry of each sequence for penalties: an int32 count and one bit for the prompt."""

DEFAULT_BLOCK_TOKENS = 16
"""Tokens of a block of vLLM's KV cache, if `block_size` is not set."""

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "float": 4}
"""Bytes per number by `EngineArgs.dtype`. All other dtypes have 2, also `auto`, which is never float32 on CUDA."""

ONLINE_BYTES: Mapping[str, float] = {
    "fp8": 1,
    "fp8_per_tensor": 1,
    "fp8_per_channel": 1,
    "fp8_per_block": 1 + 1 / 128,
    "int8_per_channel_weight_only": 1,
    "mxfp8": 1 + 1 / 32,
    "nvfp4_per_token": 0.5 + 1 / 16,
}
"""Bytes per weight by `EngineArgs.quantization`, for the methods that vLLM applies to any checkpoint while loading."""

DRIVER_BYTES = int(0.8 * GIB)
"""Memory of the driver in bytes. CUDA reports a lower total to a process than NVML by this value (0.4 GiB on a small
card, 0.8 on an A100)."""

MARGIN = 0.02
"""Fraction of `Sheet.visible` that is kept free for fragmentation and for errors of the estimates."""

DEFAULT_UTILIZATION = 0.92
"""vLLM's default `gpu_memory_utilization`. A replica that is alone on its devices gets more only if it needs more."""

NOMINAL_DEVICE, NOMINAL_SHARE = 10**24, 10**12
"""Sizes in bytes for a plan for which the real sizes of stages or devices are not known. Each device is assumed to have
`NOMINAL_DEVICE` bytes (a nominal device), and each replica to need `NOMINAL_SHARE` times its stage's
`StageSpec.gpu_share`. The remaining memory is divided in proportion to `gpu_share`."""

SHARED_DEVICE_MEMORY = 0.9
"""Fraction of a nominal device (see `NOMINAL_DEVICE`) that all its replicas get together; CUDA contexts take the
remainder."""


class DoesNotFit(ConfigError):
    """A device is too small for its replicas.

    Args:
        sheets: the memory of each replica on all devices, with the smallest possible KV caches.
    """

    def __init__(self, message: str, sheets: Sequence[Sheet]) -> None:
        super().__init__(message)
        self.sheets = tuple(sheets)


@dataclass(frozen=True, kw_only=True)
class Need:
    """The memory that a replica needs on each of its devices, in bytes.

    Attributes:
        weights: weights as loaded, after quantization.
        activations: peak of a step or of the encoder's largest input, workspaces included.
        encodes: the stage has an encoder, and vLLM profiles it with a picture or a video.
        graphs: CUDA graphs.
        buffers: buffers for all sequences, without the KV cache.
        context: memory that is allocated before vLLM measures free memory.
        kv_token: KV cache of one token; 0 = the stage has no KV cache.
        sequence_tokens: tokens of the longest sequence, for which the KV cache must have room.
        block_tokens: tokens of a block of the KV cache.
    """

    weights: int = 0
    activations: int = 0
    graphs: int = 0
    buffers: int = 0
    context: int = 0
    encodes: bool = False
    kv_token: int = 0
    sequence_tokens: int = 0
    block_tokens: int = DEFAULT_BLOCK_TOKENS

    @property
    def fixed(self) -> int:
        """Return the bytes that vLLM counts in `gpu_memory_utilization`, without the KV cache and the CUDA context."""
        return self.weights + self.activations + self.graphs + self.buffers

    @property
    def least_kv(self) -> int:
        """Return the bytes of a KV cache for one sequence of full length, and for the block that vLLM reserves."""
        blocks = -(-self.sequence_tokens // self.block_tokens) + 1
        return blocks * self.block_tokens * self.kv_token


def need(facts: StageFacts, args: Mapping[str, Any], media: int | None = None) -> Need:
    """Return the memory that a replica needs on each of its devices.

    Args:
        facts: sizes of the stage in the checkpoint.
        args: the stage's `EngineArgs` fields: those of the user, with the defaults of the pipeline and the machine.
        media: most tokens that the encoder computes in one step; None: as many as one sequence may have.
    """
    tensor, pipeline = int(args.get("tensor_parallel_size", 1)), int(args.get("pipeline_parallel_size", 1))
    width = DTYPE_BYTES.get(str(args.get("dtype", "auto")).removeprefix("torch."), 2)
    sequences, tokens = int(args.get("max_num_seqs") or 0), int(args.get("max_num_batched_tokens") or 0)
    given = args.get("max_model_len") or facts.max_model_len
    chosen = isinstance(given, int) and given > 0  # -1: vLLM chooses a length that fits
    length = int(given) if chosen else 1
    heads = max(1, facts.kv_heads // tensor) if facts.kv_layers else 0
    step = tokens * (facts.step_elements + facts.split_step_elements // tensor) + facts.pass_elements
    peak, rows = step * width + sequences * facts.vocabulary * LOGIT_BYTES, 0
    if facts.encoder is not None:
        encoded = _encoded_tokens(facts.encoder, args, length if chosen else facts.max_model_len)
        computed = encoded if media is None else min(encoded, media)
        encoder = computed * (facts.encoder.token_bytes + facts.encoder.split_token_bytes // tensor)
        peak, rows = max(peak, encoder), encoded * facts.encoder.output_elements * width  # held during decoder steps
    return Need(
        weights=_weights(facts, args, width, tensor * pipeline),
        activations=peak + rows + LIBRARY_BYTES + facts.library_bytes,
        graphs=facts.recorded_bytes
        + (0 if args.get("enforce_eager") else _graphs(facts.graph_layers, sequences) // pipeline),
        buffers=sequences * (facts.sequence_elements * width + facts.vocabulary * COUNT_BITS // 8),
        context=CONTEXT_BYTES + (COMMUNICATION_BYTES if tensor * pipeline > 1 else 0),
        encodes=rows > 0,
        kv_token=math.ceil(facts.kv_layers / pipeline) * heads * 2 * _kv_bytes(args, facts.kv_head_dim, width),
        sequence_tokens=length,
        block_tokens=args.get("block_size") or DEFAULT_BLOCK_TOKENS,
    )


def nominal_need(share: float) -> Need:
    """Return the memory that a replica needs on a nominal device (see `NOMINAL_DEVICE`).

    Args:
        share: `StageSpec.gpu_share` of the replica's stage.
    """
    return Need(kv_token=round(share * NOMINAL_SHARE), block_tokens=1)


def _weights(facts: StageFacts, args: Mapping[str, Any], width: int, ranks: int) -> int:
    quantized = ONLINE_BYTES.get(str(args.get("quantization")), width)
    total = 0.0
    for part in facts.weights:
        size = part.elements * (quantized if part.quantizable else width) + part.stored_bytes
        total += size / (ranks if part.split else 1)
    return math.ceil(max(0.0, total - float(args.get("cpu_offload_gb") or 0) * GIB))


def _encoded_tokens(encoder: EncoderMemory, args: Mapping[str, Any], length: int) -> int:
    """Return the number of tokens of the image or video with which vLLM profiles the encoder."""
    limits = args.get("limit_mm_per_prompt") or {}
    allowed = {kind: _count(limits.get(kind, 1)) > 0 for kind in ("image", "video")}
    if args.get("language_model_only") or not any(allowed.values()):
        return 0
    images = min(encoder.most_images, length // encoder.image_tokens) if allowed["video"] else 1
    return max(1, images) * encoder.image_tokens


def _count(limit: Any) -> int:
    """Return the number in a value of `limit_mm_per_prompt`: an integer, or a mapping with `count`."""
    value = limit.get("count", 1) if isinstance(limit, Mapping) else limit
    return int(value) if isinstance(value, int) else 1


def _graphs(layers: int, sequences: int) -> int:
    """Return the bytes of all captured CUDA graphs: for 1, 2, 4 tokens, every 8th up to 256, every 16th above."""
    largest = min(2 * sequences, MOST_CAPTURED_TOKENS)
    sizes = (1, 2, 4, *range(8, 256, 8), *range(256, MOST_CAPTURED_TOKENS + 1, 16))
    return layers * len([size for size in sizes if size <= largest]) * GRAPH_LAYER_BYTES


def _kv_bytes(args: Mapping[str, Any], head_dim: int, width: int) -> int:
    """Return the bytes of one head's key in the KV cache, which are also those of its value.

    TurboQuant and UltraQuant count as 16 bits, because vLLM stores the first and the last layers unquantized.
    """
    dtype = str(args.get("kv_cache_dtype", "auto"))
    if dtype == "auto":
        return head_dim * width
    if dtype in ("nvfp4", "nvfp4_4over6"):
        return head_dim // 2 + head_dim // 16  # a scale of one byte for 16 numbers
    scale = 4 if dtype.endswith("per_token_head") else 0
    if dtype.startswith("int4"):
        return head_dim // 2 + scale
    return head_dim * (1 if dtype.startswith(("fp8", "int8")) else 2) + scale


@dataclass(frozen=True, kw_only=True)
class Demand:
    """The devices and the memory that the replicas of one stage need, with the user's settings of both.

    Attributes:
        need: memory on each device of each replica.
        replicas: 0 = the stage is on other hosts and gets no device, even if `devices` is set.
        tensor_parallel, pipeline_parallel: their product is the number of devices of one replica.
        devices: `stages.<name>.devices`: comma-separated numbers of all devices of all replicas in order, or only those
            of the first replica; None = place automatically.
        utilization: `gpu_memory_utilization`, if the user has set it; else None.
        kv_bytes: bytes of the KV cache on each device, if the user has set them; else None.
    """

    stage: str
    need: Need
    replicas: int = 1
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    devices: str | None = None
    utilization: float | None = None
    kv_bytes: int | None = None

    @property
    def per_replica(self) -> int:
        """Return the number of devices of one replica."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def kv(self) -> int:
        """Return the bytes of the smallest KV cache: the user's value, or room for one sequence of full length."""
        return self.need.least_kv if self.kv_bytes is None else self.kv_bytes

    @property
    def grows(self) -> bool:
        """Whether the KV cache gets a share of a device's remaining memory, because the user has set no size for it."""
        return bool(self.need.kv_token) and self.utilization is None and self.kv_bytes is None

    @property
    def size(self) -> int:
        """Return the bytes that a replica needs at least on a device, without the CUDA context."""
        return self.need.fixed + self.kv

    def least(self, visible: int) -> int:
        """Return the bytes that a replica takes at least on a device, without its CUDA context.

        The result is the property `size`, or the fraction `gpu_memory_utilization` of `visible` if the user has set it.

        Args:
            visible: bytes of the device that a process can use (`Sheet.visible`).
        """
        return self.size if self.utilization is None else int(self.utilization * visible)


@dataclass(frozen=True, kw_only=True)
class Share:
    """The memory of one replica on one device.

    Attributes:
        replica: id of the replica, such as "STAGE/0".
        demand: the needs of the replica's stage.
        kv_bytes: bytes of the KV cache; less than `Need.least_kv`, the bytes for one longest sequence, only if
            the user has set the size or `gpu_memory_utilization`.
    """

    replica: str
    demand: Demand
    kv_bytes: int

    @property
    def need(self) -> Need:
        """Return the memory that the replica needs."""
        return self.demand.need

    @property
    def kv_tokens(self) -> int:
        """Return the number of tokens for which the KV cache has room; 0 without a KV cache."""
        return self.kv_bytes // self.need.kv_token if self.need.kv_token else 0

    @property
    def total(self) -> int:
        """Return all bytes of the replica on the device, its CUDA context included."""
        return self.need.fixed + self.need.context + self.kv_bytes


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """One device, and the memory of each replica on it.

    Attributes:
        device: number of the device.
        device_bytes: the device's memory as NVML reports it.
        shares: memory of each replica.
    """

    device: int
    device_bytes: int
    shares: tuple[Share, ...]

    @property
    def nominal(self) -> bool:
        """Whether the device has nominal sizes, because the real ones are not known (see `NOMINAL_DEVICE`)."""
        return self.device_bytes == NOMINAL_DEVICE

    @property
    def visible(self) -> int:
        """Return the total bytes that CUDA reports to a process; `gpu_memory_utilization` is a fraction of them."""
        return max(0, self.device_bytes - DRIVER_BYTES)

    @property
    def usable(self) -> int:
        """Return the bytes that can be assigned to replicas, their CUDA contexts included."""
        return int(self.visible * (SHARED_DEVICE_MEMORY if self.nominal else 1 - MARGIN))

    @property
    def needed(self) -> int:
        """Return the bytes that the replicas need at least, their CUDA contexts included."""
        return sum(each.demand.least(self.visible) + each.need.context for each in self.shares)

    @property
    def free(self) -> int:
        """Return the unassigned bytes of `usable`; negative if the device is too small."""
        return self.usable - sum(share.total for share in self.shares)


def divide(
    demands: Sequence[Demand], placed: Mapping[str, tuple[tuple[int, ...], ...]], device_bytes: Sequence[int]
) -> tuple[dict[str, float], tuple[Sheet, ...]]:
    """Assign the memory of all devices to replicas.

    Every replica gets the memory that it needs, with a KV cache for one sequence of full length. The remaining memory
    of a device is added to its KV caches, in equal numbers of tokens. A replica alone on a device gets at most
    `DEFAULT_UTILIZATION` that way. Values set by the user stay unchanged. All replicas of a stage get the same values:
    those for the device of the stage with the least remaining memory.

    Args:
        demands: needs of each stage.
        placed: the devices of each replica, by stage (result of `placement.place`).
        device_bytes: memory of each device as NVML reports it, or `NOMINAL_DEVICE`.

    Returns:
        `gpu_memory_utilization` by stage, where it differs from vLLM's default, and a `Sheet` for each device.

    Raises:
        DoesNotFit: a device is too small.
        ConfigError: a value that the user has set is too small, or their sum is too large.
    """
    sheets = [_least(number, size, demands, placed) for number, size in enumerate(device_bytes)]
    for sheet in sheets:
        _check_user_values(sheet)
    _check_fits(sheets)
    extra: dict[str, int] = {}
    utilizations: dict[str, float] = {}
    for demand in demands:
        mine = [sheet for sheet in sheets if any(share.demand is demand for share in sheet.shares)]
        if mine and demand.grows:
            extra[demand.stage] = min(_extra_tokens(demand, sheet) for sheet in mine) * demand.need.kv_token
        if mine and demand.utilization is None:
            value = _utilization(demand, demand.size + extra.get(demand.stage, 0), mine)
            utilizations |= {} if value is None else {demand.stage: value}
    for number, sheet in enumerate(sheets):
        grown = (replace(each, kv_bytes=each.kv_bytes + extra.get(each.demand.stage, 0)) for each in sheet.shares)
        sheets[number] = replace(sheet, shares=tuple(grown))
    return utilizations, tuple(sheets)


def _least(
    number: int, size: int, demands: Sequence[Demand], placed: Mapping[str, tuple[tuple[int, ...], ...]]
) -> Sheet:
    """Return the `Sheet` of a device with the smallest KV cache of each replica.

    If the user has set `gpu_memory_utilization` and no size, the KV cache gets the memory that is left within this
    value.

    Args:
        number: number of the device.
        size: memory of the device as NVML reports it, or `NOMINAL_DEVICE`.
        placed: see `divide`.
    """
    sheet, shares = Sheet(device=number, device_bytes=size, shares=()), []
    for demand in demands:
        kv = demand.kv
        if demand.utilization is not None and demand.kv_bytes is None and demand.need.kv_token:
            kv = max(0, demand.least(sheet.visible) - demand.need.fixed)
        for index, devices in enumerate(placed[demand.stage]):
            if number in devices:
                shares.append(Share(replica=f"{demand.stage}/{index}", demand=demand, kv_bytes=kv))
    return replace(sheet, shares=tuple(shares))


def _extra_tokens(demand: Demand, sheet: Sheet) -> int:
    """Return the number of tokens that can be added to each KV cache of a device for which `Demand.grows` is true."""
    room = sheet.usable - sheet.needed
    if len(sheet.shares) == 1:
        default = int(DEFAULT_UTILIZATION * sheet.visible) - demand.size
        room = min(room, max(default, int(MARGIN * sheet.visible)))
    return max(0, room) // sum(share.need.kv_token for share in sheet.shares if share.demand.grows)


def _utilization(demand: Demand, take: int, sheets: Sequence[Sheet]) -> float | None:
    """Return the `gpu_memory_utilization` with which a stage's replicas get `take` bytes on each device.

    None: vLLM's default is enough. `sheets` are the devices of the stage.
    """
    sizes = {sheet.visible for sheet in sheets}
    default = DEFAULT_UTILIZATION * min(sizes)
    alone = all(len(sheet.shares) == 1 for sheet in sheets)
    if alone and take <= default and default + demand.need.context <= (1 - MARGIN) * min(sizes):
        return None
    if len(sizes) > 1:
        names = ", ".join(str(sheet.device) for sheet in sheets)
        raise ConfigError(
            f"{stage_path(demand.stage)}.devices: devices {names} differ in memory, and a stage has one share for all "
            "its replicas; name devices of the same size, or write engine.gpu_memory_utilization"
        )
    if sheets[0].nominal:
        return math.floor(take / sizes.pop() * 1000 + 1e-6) / 1000
    return math.ceil(take / sizes.pop() * 10_000) / 10_000  # rounded up: not less than `take`


def _check_user_values(sheet: Sheet) -> None:
    """Raise ConfigError for a size set by the user that cannot hold the weights and one sequence of full length."""
    for demand in (share.demand for share in sheet.shares):
        need, path, part = demand.need, stage_path(demand.stage), demand.utilization
        if demand.kv_bytes is not None and need.kv_token and demand.kv_bytes < need.least_kv:
            tokens = max(0, demand.kv_bytes // (need.kv_token * need.block_tokens) - 1) * need.block_tokens
            raise ConfigError(
                f"{path}.kv_cache_bytes: {demand.kv_bytes} hold {tokens} tokens of {need.kv_token} bytes, but a "
                f"sequence may have {need.sequence_tokens}; write at least {need.least_kv}, or engine.max_model_len: "
                f"{tokens}"
            )
        if part is not None and part * sheet.visible < need.weights + demand.kv:
            least = math.ceil(demand.size / sheet.visible * 100) / 100 if sheet.visible else math.inf
            instead = f"write {least:g}" if least <= 1 else "use a larger device or more of them"
            raise ConfigError(
                f"{path}.engine.gpu_memory_utilization: {part:g} of device {sheet.device} is "
                f"{gib(int(part * sheet.visible))} GiB, but weights ({gib(need.weights)}) and KV cache "
                f"({gib(demand.kv)} for {need.sequence_tokens} tokens) are {gib(need.weights + demand.kv)} GiB; "
                f"{instead}"
            )


def _check_fits(sheets: Sequence[Sheet]) -> None:
    """Raise DoesNotFit for the device that lacks the most bytes.

    If the user has set the `gpu_memory_utilization` of all replicas of a device, only their sum is checked
    (ConfigError). A nominal device (see `NOMINAL_DEVICE`) is too small if the values that the user has set leave less
    than 0.01 of it to the other replicas.
    """
    short: list[Sheet] = []
    for sheet in sheets:
        demands = [share.demand for share in sheet.shares]
        written = [(each.stage, each.utilization) for each in demands if each.utilization is not None]
        sum_text = " + ".join(f"{stage} {value:g}" for stage, value in written)
        total = sum(value for _, value in written)
        if len(written) == len(demands):
            if total > 1 + 1e-9:
                raise ConfigError(
                    f"gpu_memory_utilization: the replicas on device {sheet.device} have {sum_text} = {total:g}, "
                    "which is more than 1; lower one of them or give the stages different devices"
                )
        elif sheet.nominal and SHARED_DEVICE_MEMORY - total < 0.01:
            waiting = next(each.stage for each in demands if each.utilization is None)
            raise ConfigError(
                f"{stage_path(waiting)}.engine.gpu_memory_utilization: {sum_text} leaves nothing of device "
                f"{sheet.device} (at most {SHARED_DEVICE_MEMORY:g} of a shared device is handed out); lower it or set "
                "this one too"
            )
        elif sheet.needed > sheet.usable:
            short.append(sheet)
    if short:
        raise DoesNotFit(_too_small(max(short, key=lambda sheet: sheet.needed - sheet.usable)), sheets)


def _too_small(sheet: Sheet) -> str:
    parts = []
    for share in sheet.shares:
        n, demand = share.need, share.demand
        inner = f"weights {gib(n.weights)}"
        if n.kv_token:
            inner += f", KV cache of {n.sequence_tokens} tokens {gib(demand.kv)}"
        inner += f", activations {gib(n.activations)}, graphs and buffers {gib(n.graphs + n.buffers)}"
        size = gib(demand.least(sheet.visible) + n.context)
        parts.append(f"{share.replica} {size} ({inner}, context {gib(n.context)})")
    return (
        f"memory: device {sheet.device} has {gib(sheet.usable)} GiB to hand out of {gib(sheet.device_bytes)}, but "
        f"{gib(sheet.needed)} are needed: {' + '.join(parts)}"
    )


def gib(size: int) -> str:
    """Return a number of bytes as text in GiB, with one decimal and without the unit."""
    return f"{size / GIB:.1f}"
