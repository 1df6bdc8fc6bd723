"""Numbers that the API servers of a deployment show each other, in memory they share."""

from __future__ import annotations

from ctypes import Array, c_int, c_longlong
from typing import Any

from vllm.utils.system_utils import get_mp_context
from vllm.v1.engine.admission_control import SharedAdmissionStats

NOT_ACCEPTING = 2**31 - 1
"""Load of an API server that takes no connections: it never has the least (vLLM's launcher)."""


class Board:
    """One place for each API server, written by it alone; when it has died, by the head.

    Attributes:
        loads: its open connections. A new one is taken by the API server with the fewest.
        admitted: its requests that have not ended, spaced as vLLM's admission control does: `--max-num-queued-reqs`
            limits the sum.
    """

    def __init__(self, servers: int) -> None:
        context: Any = get_mp_context()
        self.loads: Array[c_int] = context.RawArray(c_int, [NOT_ACCEPTING] * servers)
        self.admitted: Array[c_longlong] = context.RawArray(c_longlong, SharedAdmissionStats.num_counters(servers))

    def clear(self, server: int) -> None:
        """An API server has died: it takes no connections, and its requests are gone."""
        self.loads[server] = NOT_ACCEPTING
        self.admitted[server * SharedAdmissionStats.COUNTERS_PER_SLOT] = 0
