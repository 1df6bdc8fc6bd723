"""Parameters of a stage: vLLM's sampling parameters, or a struct of the plugin."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import pytest

from vllm_omni_ext.plugins.params import make_params, param_names
from vllm_omni_ext.plugins.spec import SAMPLING_PARAMS


class Denoise(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    steps: Annotated[int, msgspec.Meta(ge=1)] = 50
    guidance: float = 4.0


DENOISE = f"{__name__}:Denoise"


def test_names() -> None:
    assert param_names(DENOISE) == ("steps", "guidance")
    assert {"temperature", "max_tokens", "seed"} <= set(param_names(SAMPLING_PARAMS))
    assert not any(name.startswith("_") for name in param_names(SAMPLING_PARAMS))


def test_a_struct_of_the_plugin() -> None:
    assert make_params(DENOISE, {"steps": 3, "guidance": 2}) == Denoise(steps=3, guidance=2.0)
    assert make_params(DENOISE, {}) == Denoise()


def test_sampling_parameters() -> None:
    params = make_params(SAMPLING_PARAMS, {"temperature": 0.5, "stop": "x"})
    assert (params.temperature, params.stop) == (0.5, ["x"])


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (DENOISE, {"steps": 0}, r"`int` >= 1 - at `\$\.steps`"),
        (DENOISE, {"steps": "many"}, r"Expected `int`, got `str` - at `\$\.steps`"),
        (DENOISE, {"step": 1}, "unknown field `step`"),
        (SAMPLING_PARAMS, {"temperature": -1.0}, "temperature must be non-negative"),
        (SAMPLING_PARAMS, {"temprature": 1.0}, "temprature"),
    ],
)
def test_wrong_values_are_named(kind: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_params(kind, values)
