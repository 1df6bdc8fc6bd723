"""The scheduler's half of the Mooncake connector: validates request parameters and answers prefill requests."""

from __future__ import annotations

import logging
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import MooncakeConnectorScheduler

from vllm_omni_ext.disaggregation.block_hold import BlockHold
from vllm_omni_ext.disaggregation.bootstrap import TransferEndpoint
from vllm_omni_ext.disaggregation.parameters import answer, understood
from vllm_omni_ext.ids import DECODE, PREFILL

log = logging.getLogger(__name__)


class OmniMooncakeScheduler(MooncakeConnectorScheduler):
    """vLLM's scheduler half, with the block hold of one replica.

    Attributes:
        place: the endpoint from which blocks can be fetched; None in a decode replica.
        guard: holds the blocks into which a transfer may write.
    """

    def __init__(self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self.place: TransferEndpoint | None = None
        self.guard = BlockHold(vllm_config.parallel_config.world_size)
        self._role = PREFILL if self.is_kv_producer else DECODE

    def on_new_request(self, request: Any) -> None:
        """Drop transfer parameters that this replica cannot use; the request is then computed locally."""
        params = request.kv_transfer_params
        if params is not None and not understood(self._role, params):
            log.error("%s: kv_transfer_params that a %s replica cannot use: %r", request.request_id, self._role, params)
            request.kv_transfer_params = None
        super().on_new_request(request)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Handle allocated blocks; hold those that a transfer will write to."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        expected = self._reqs_need_recv.get(request.request_id)
        if expected is not None and any(expected[1]):
            transfer = request.request_id, request.kv_transfer_params["transfer_id"]
            self.guard.hold(transfer, [block for group in blocks.blocks for block in group if not block.is_null])

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Return this step's work for the workers; `idle_step`: the step computes nothing."""
        metadata = super().build_connector_meta(scheduler_output)
        metadata.idle_step = not scheduler_output.total_num_scheduled_tokens
        return metadata

    def request_finished(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """Handle the end of a request. Returns (True, answer for the client) if its blocks are kept."""
        kept, params = super().request_finished(request, block_ids)
        if kept:
            assert self.place is not None
            params = answer(request.kv_transfer_params["transfer_id"], self.place.engine_id, self.place.url)
        return kept, params
