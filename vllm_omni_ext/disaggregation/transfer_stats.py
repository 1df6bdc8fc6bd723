"""Transfer statistics of a worker: vLLM's, the time that decode waited, and totals since the start."""

from __future__ import annotations

from collections import Counter
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.stats import MooncakeKVConnectorStats

WAITED = "wait_duration"
"""Column: seconds from the start of a transfer until its blocks arrived, on the decode side."""


class TransferStats(MooncakeKVConnectorStats):
    """Adds one column to vLLM's statistics, and `totals`, which are not reset by reading."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.totals: Counter[str] = Counter()

    def reset(self) -> None:
        """Start a new interval."""
        super().reset()
        self.data[WAITED] = []

    def is_empty(self) -> bool:
        """Whether nothing was counted in this interval."""
        return super().is_empty() and not self.data[WAITED]

    def record_transfer(self, duration_s: float, total_bytes: int, num_descs: int) -> None:
        """Count sent blocks."""
        super().record_transfer(duration_s, total_bytes, num_descs)
        self.totals.update(transfers=1, bytes=total_bytes)
        self.totals["seconds"] += duration_s  # type: ignore[assignment]

    def record_failed_transfer(self) -> None:
        """Count a failed transfer on the sending side."""
        super().record_failed_transfer()
        self.totals["failed_transfers"] += 1

    def record_failed_recv(self) -> None:
        """Count a request whose blocks did not arrive."""
        super().record_failed_recv()
        self.totals["failed_receives"] += 1

    def record_kv_expired_req(self) -> None:
        """Count a request whose blocks were not fetched in time."""
        super().record_kv_expired_req()
        self.totals["expired"] += 1

    def record_received(self, seconds: float) -> None:
        """Count a request whose blocks have all arrived."""
        with self._lock:
            self.data[WAITED].append(seconds)
        self.totals["received"] += 1
        self.totals["waited_seconds"] += seconds  # type: ignore[assignment]

    def clone_and_reset(self) -> TransferStats:
        """Return the interval's statistics in a form that can be sent, and start a new interval."""
        with self._lock:
            data: dict[str, Any] = {name: list(column) for name, column in self.data.items()}
            self.reset()
        return TransferStats(data=data)
