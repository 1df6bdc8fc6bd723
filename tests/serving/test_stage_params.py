"""Parameters of a stage as an object, or as a dict of changes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams

from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.model_plugins.bagel.requests.fields import Fields
from vllm_omni_ext.model_plugins.bagel.requests.payloads import DitParams
from vllm_omni_ext.plugins.runtime import Capabilities
from vllm_omni_ext.plugins.spec import SAMPLING_PARAMS
from vllm_omni_ext.serving.options import RequestFields, stage_params
from vllm_omni_ext.serving.served import ServedModel

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


def test_the_seed_of_a_text_is_not_that_of_a_stage_with_own_parameters() -> None:
    """vLLM accepts a negative seed, the stage does not."""
    own = SimpleNamespace(**vars(OWN), engine_args={}, params={})
    speak = SimpleNamespace(**{**vars(SAMPLED), "model_stage": "speak"}, params={})
    plan = SimpleNamespace(model_stages=lambda: [SAMPLED, own, speak], frontend=lambda: SAMPLED, chunks={})
    model: Any = ServedModel.__new__(ServedModel)
    model.omni, model.fields = SimpleNamespace(plan=plan), RequestFields(Fields)
    model.capabilities = Capabilities(modalities=("text", "image"), default_modalities=("text",))
    model.modalities = dict.fromkeys(("text", "image"), SimpleNamespace(read=lambda body, stream: (None, {})))
    found = model.read({"seed": -2}, stream=False, seed=-2).options
    assert found.params.keys() == {"speak"} and found.params["speak"].seed == -2
    with pytest.raises(RequestError, match=r"^seed: ") as caught:
        model.read({"seed": -2, "modalities": ["image"]}, stream=False, seed=-2)
    assert caught.value.parameter == "seed"
