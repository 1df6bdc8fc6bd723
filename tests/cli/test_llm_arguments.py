"""Keywords of `LLM.chat` and `LLM.generate` are used, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.sampling_params import SamplingParams

from vllm_omni_ext.cli.settings import from_kwargs
from vllm_omni_ext.llm_arguments import Keywords
from vllm_omni_ext.topology.plan import Plan


@pytest.fixture(scope="module")
def plan(model: str) -> Plan:
    return from_kwargs(model)


def render(conversation: Any, chat_template: str | None = None, tools: Any = None) -> None:
    """Has the keywords of vLLM's own method."""


def keywords(plan: Plan, **more: Any) -> Keywords:
    known = ("sampling_params", "modalities")
    return Keywords("chat", more, plan, fields=("voice", "speaker"), render=render, known=known)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("nosuch", ""),
        ("voise", "; did you mean 'voice'?"),
        ("modalites", "; did you mean 'modalities'?"),
        ("temprature", "; did you mean 'temperature'?"),
        ("taker", "; did you mean 'talker'?"),
        ("conversation", ""),
        ("extra_args", ""),
    ],
)
def test_an_unknown_keyword_is_a_type_error(plan: Plan, name: str, advice: str) -> None:
    with pytest.raises(TypeError) as caught:
        keywords(plan, **{name: 1})
    assert str(caught.value) == f"chat() got an unexpected keyword argument '{name}'{advice}"


def test_each_keyword_goes_to_its_receiver(plan: Plan) -> None:
    found = keywords(plan, voice="ethan", tools=[], talker={"top_k": 3}, temperature=0, max_completion_tokens=7)
    assert (found.fields, found.rendering) == ({"voice": "ethan"}, {"tools": []})
    assert found.params == {"talker": {"top_k": 3}, "thinker": {"temperature": 0, "max_tokens": 7}}
    assert found.over(None) == found.params
    assert keywords(plan, voice="x").over("anything") == "anything"


def test_a_seed_is_for_each_stage_that_has_none(plan: Plan) -> None:
    found = keywords(plan, seed=7, talker={"seed": 3})
    assert found.params == {"talker": {"seed": 3}, "thinker": {"seed": 7}}


def test_parameters_of_a_stage_in_two_places_are_refused(plan: Plan) -> None:
    params = SamplingParams(max_tokens=3)
    talker = keywords(plan, talker={"top_k": 3})
    assert talker.over(params) == {"thinker": params, "talker": {"top_k": 3}}
    for given, more in (
        (params, {"temperature": 0}),
        ({"talker": {"seed": 1}}, {"talker": {"top_k": 3}}),
        ({"thinker": params}, {"thinker": {"seed": 1}}),
    ):
        with pytest.raises(TypeError, match=r"in sampling_params and as keywords$"):
            keywords(plan, **more).over(given)
    with pytest.raises(TypeError, match=r"temperature both as keywords and in thinker"):
        keywords(plan, temperature=0, thinker={"seed": 1})
