"""Load and admission counters that the API servers of a deployment share in memory."""

from __future__ import annotations

from ctypes import Array, c_int, c_longlong
from typing import Any

from vllm.utils.system_utils import get_mp_context
from vllm.v1.engine.admission_control import SharedAdmissionStats

NOT_ACCEPTING = 2**31 - 1
"""Load of an API server that accepts no connections, so that it is never the least loaded one (vLLM's launcher)."""


class SharedCounters:
    """Counters with one slot per API server. Each server writes its own slot; the head clears the slot of a dead
    server.

    Attributes:
        loads: open connections per API server. The server with the fewest accepts the next connection.
        admitted: unfinished requests per API server, laid out as vLLM's admission control does: `--max-num-queued-reqs`
            limits the sum.
    """

    def __init__(self, servers: int) -> None:
        context: Any = get_mp_context()
        self.loads: Array[c_int] = context.RawArray(c_int, [NOT_ACCEPTING] * servers)
        self.admitted: Array[c_longlong] = context.RawArray(c_longlong, SharedAdmissionStats.num_counters(servers))

    def clear(self, server: int) -> None:
        """Clear the slot of an API server that has died: it accepts no connections and its requests have ended."""
        self.loads[server] = NOT_ACCEPTING
        self.admitted[server * SharedAdmissionStats.COUNTERS_PER_SLOT] = 0
