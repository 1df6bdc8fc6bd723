"""Keys of `extra_args` that a client must not set, through any endpoint."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from tests.orchestrator.test_admission import Desk
from vllm_omni_ext.disaggregation.parameters import KEY
from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.omni import AsyncOmni, _check_kv_transfer
from vllm_omni_ext.wire.stage_input import RESERVED


@pytest.mark.parametrize("given", [{}, {"transfer_id": "x"}, {"do_remote_decode": True}, "x", 3])
def test_parameters_of_a_kv_transfer_are_refused(given: Any) -> None:
    with pytest.raises(VLLMValidationError, match=f"^{KEY}: replicas set it themselves") as caught:
        _check_kv_transfer(SamplingParams(extra_args={KEY: given, "other": 1}))
    assert caught.value.parameter == KEY


async def test_parameters_of_a_refused_kv_transfer_reach_no_engine() -> None:
    """vLLM's server calls this for a refused request, with the parameters of the client."""
    omni: Any = None  # any use of it fails
    await AsyncOmni.notify_kv_transfer_request_rejected(omni, "r", {"do_remote_prefill": True}, data_parallel_rank=None)


async def test_a_prompt_in_parts_is_refused_by_name() -> None:
    async def parts() -> AsyncGenerator[Any, None]:
        yield {"prompt_token_ids": [1]}

    omni: Any = SimpleNamespace(_refuse_if_draining=lambda: None)
    with pytest.raises(RequestError, match=r"^prompt: may not be an async generator") as caught:
        AsyncOmni.generate(omni, parts(), SamplingParams(), "r")
    assert caught.value.parameter == "prompt"


@pytest.mark.parametrize("extra", [None, {}, {"other": 1}, {KEY: None}])
def test_other_extra_arguments_are_accepted_and_keys_of_the_package_removed(extra: dict[str, Any] | None) -> None:
    params = SamplingParams(extra_args=extra)
    _check_kv_transfer(params)
    Desk().admission.ticket(params, None)
    assert params.extra_args == extra
    for key in RESERVED:
        params.extra_args = {key: 1, "other": 2}
        Desk().admission.ticket(params, None)
        assert params.extra_args == {"other": 2}, key
