"""What a client must not put into `extra_args`, through whichever endpoint it comes."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from tests.orchestrator.test_admission import Desk
from vllm_omni_ext.disaggregation.parameters import KEY
from vllm_omni_ext.omni import AsyncOmni, _check_kv_transfer
from vllm_omni_ext.wire.stage_input import RESERVED


@pytest.mark.parametrize("given", [{}, {"transfer_id": "x"}, {"do_remote_decode": True}, "x", 3])
def test_a_kv_cache_is_refused(given: Any) -> None:
    with pytest.raises(VLLMValidationError, match=f"^{KEY}: replicas settle among themselves") as caught:
        _check_kv_transfer(SamplingParams(extra_args={KEY: given, "other": 1}))
    assert caught.value.parameter == KEY


async def test_kv_cache_parameters_reach_no_engine() -> None:
    """vLLM's server calls this for a request that was refused, with what the client had written."""
    nobody: Any = None  # any use of it fails
    await AsyncOmni.notify_kv_transfer_request_rejected(
        nobody, "r", {"do_remote_prefill": True}, data_parallel_rank=None
    )


@pytest.mark.parametrize("extra", [None, {}, {"other": 1}, {KEY: None}])
def test_other_extra_arguments_are_accepted(extra: dict[str, Any] | None) -> None:
    params = SamplingParams(extra_args=extra)
    _check_kv_transfer(params)
    Desk().admission.options_of(params, None)
    assert params.extra_args == extra


@pytest.mark.parametrize("key", sorted(RESERVED))
def test_our_own_keys_are_taken_out(key: str) -> None:
    params = SamplingParams(extra_args={key: 1, "other": 2})
    Desk().admission.options_of(params, None)
    assert params.extra_args == {"other": 2}
