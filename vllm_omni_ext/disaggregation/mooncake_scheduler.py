"""The scheduler's half: vLLM's, which checks what requests carry and answers for those whose blocks are kept."""

from __future__ import annotations

import logging
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import MooncakeConnectorScheduler

from vllm_omni_ext.disaggregation.bootstrap import Place
from vllm_omni_ext.disaggregation.guard import Guard
from vllm_omni_ext.disaggregation.parameters import DECODE, PREFILL, answer, understood

log = logging.getLogger(__name__)


class OmniMooncakeScheduler(MooncakeConnectorScheduler):
    """Of one replica.

    Attributes:
        place: where blocks are to be had; None in a decode replica.
        guard: blocks that may be written to from outside.
    """

    def __init__(self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self.place: Place | None = None
        self.guard = Guard(vllm_config.parallel_config.world_size)
        self._role = PREFILL if self.is_kv_producer else DECODE

    def on_new_request(self, request: Any) -> None:
        """A request that asks for what this replica cannot do is computed here."""
        params = request.kv_transfer_params
        if params is not None and not understood(self._role, params):
            log.error("%s: kv_transfer_params that a %s replica cannot use: %r", request.request_id, self._role, params)
            request.kv_transfer_params = None
        super().on_new_request(request)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks have been allocated; those of a transfer are promised to its sender."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        promised = self._reqs_need_recv.get(request.request_id)
        if promised is not None and any(promised[1]):
            transfer = request.request_id, request.kv_transfer_params["transfer_id"]
            self.guard.hold(transfer, [block for group in blocks.blocks for block in group if not block.is_null])

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """What the workers are to do in this step, and whether it computes anything (`idle_step`)."""
        metadata = super().build_connector_meta(scheduler_output)
        metadata.idle_step = not scheduler_output.total_num_scheduled_tokens
        return metadata

    def request_finished(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended: True and the answer for its client if its blocks are kept."""
        kept, params = super().request_finished(request, block_ids)
        if kept:
            assert self.place is not None
            params = answer(request.kv_transfer_params["transfer_id"], self.place.engine_id, self.place.url)
        return kept, params
