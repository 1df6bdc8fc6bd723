"""Parameters of a stage as an object, or as a dict of changes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams

from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.model_plugins.bagel.requests.payloads import DitParams
from vllm_omni_ext.plugins.spec import SAMPLING_PARAMS
from vllm_omni_ext.serving.options import stage_params

OWN: Any = SimpleNamespace(
    model_stage="draw", params_type="vllm_omni_ext.model_plugins.bagel.requests.payloads:DitParams"
)
SAMPLED: Any = SimpleNamespace(model_stage="write", params_type=SAMPLING_PARAMS, engine_args={})
POOLING: Any = SimpleNamespace(model_stage="decode", params_type=SAMPLING_PARAMS, engine_args={"runner": "pooling"})


def test_given_parameters_replace_configured_ones() -> None:
    given, configured = DitParams(seed=3), {"seed": 1, "height": 16}
    assert stage_params(OWN, given, {}) is given
    made = stage_params(OWN, {"seed": 2, "cfg_interval": [0, 1]}, configured)
    assert made == DitParams(seed=2, height=16, cfg_interval=(0.0, 1.0))
    assert stage_params(SAMPLED, given := SamplingParams(prompt_logprobs=1), {}, frontend=True) is given
    made = stage_params(SAMPLED, {"max_tokens": 5, "stop": "x"}, {"temperature": 0.5})
    assert isinstance(made, SamplingParams)
    assert (made.max_tokens, made.temperature, made.stop) == (5, 0.5, ["x"])


@pytest.mark.parametrize(
    ("stage", "given", "name"),
    [
        (OWN, {"steps": 1}, "draw.steps"),
        (OWN, {"cfg_interval": [1.0]}, "draw.cfg_interval"),
        (OWN, 3, "draw"),
        (SAMPLED, {"temperature": "hot"}, "write.temperature"),
        (SAMPLED, {"seeds": 1}, "write.seeds"),
        (SAMPLED, DitParams(), "write"),
        (POOLING, {"temperature": 1.0}, "decode"),
        (POOLING, SamplingParams(), "decode"),
        (SAMPLED, SamplingParams(logprobs=0), "write.logprobs"),
        (SAMPLED, SamplingParams(prompt_logprobs=1), "write.prompt_logprobs"),
    ],
)
def test_a_wrong_parameter_is_named(stage: Any, given: Any, name: str) -> None:
    with pytest.raises(RequestError) as caught:
        stage_params(stage, given, {})
    assert caught.value.parameter == name
