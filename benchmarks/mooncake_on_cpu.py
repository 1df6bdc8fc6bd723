"""vLLM's own MooncakeConnector, with a start on machines without an accelerator.

A stock server finds it through `kv_connector_module_path`.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import MooncakeConnector

from vllm_omni_ext.disaggregation.mooncake_connector import device_index


class StockMooncakeConnector(MooncakeConnector):
    """Constructs vLLM's connector inside `device_index`: the constructor reads the accelerator's number."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with device_index():
            super().__init__(*args, **kwargs)
