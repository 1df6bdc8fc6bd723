"""vLLM's own MooncakeConnector, changed so that it starts on machines without an accelerator.

`pd_stock.py` passes this module to stock servers as `kv_connector_module_path`.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import MooncakeConnector

from vllm_omni_ext.disaggregation.mooncake_connector import device_index


class StockMooncakeConnector(MooncakeConnector):
    """vLLM's connector, constructed inside `device_index`, because its constructor reads the accelerator's index."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with device_index():
            super().__init__(*args, **kwargs)
