"""Requests that another replica continues after the loss of the one that had begun their text."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.sampling_params import RepetitionDetectionParams, SamplingParams, StructuredOutputsParams

from tests.support.fakes import text_request
from vllm_omni_ext.errors import StageUnavailable
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.orchestrator import messages as m
from vllm_omni_ext.orchestrator.engine_requests import can_resume, client_request, prompt_request
from vllm_omni_ext.orchestrator.machine import RequestMachine
from vllm_omni_ext.orchestrator.placement import Settings
from vllm_omni_ext.orchestrator.state import RequestObserver
from vllm_omni_ext.plugins.flow import ForwardFlow
from vllm_omni_ext.plugins.runtime import RequestOptions
from vllm_omni_ext.pool.stage_pool import StagePool
from vllm_omni_ext.wire.stage_input import RESUMED

REPLICAS = [ReplicaId("ar", number) for number in range(2)]


def asked(*bad_words: list[int], **params: Any) -> Any:
    """A request; `bad_words` are token ids, as vLLM's input processor sets them."""
    request = text_request("a")
    request.sampling_params = SamplingParams(**params)
    request.sampling_params._bad_words_token_ids = list(bad_words) or None
    return request


@pytest.mark.parametrize(
    ("request_", "resumes"),
    [
        (asked(), True),
        (asked(temperature=1.0, seed=4, min_p=0.1, logit_bias={3: 1.0}, stop=["x"], logprobs=2, min_tokens=2), True),
        (asked(repetition_penalty=1.3), True),
        (asked([7], [8]), True),
        (asked([7], [8, 9]), False),
        (asked(presence_penalty=0.5), False),
        (asked(frequency_penalty=-0.5), False),
        (asked(repetition_detection=RepetitionDetectionParams(max_pattern_size=3, min_count=2)), False),
        (asked(thinking_token_budget=0), False),
        (asked(thinking_token_budget=-1), True),  # no limit
        (asked(trace_decode_token_ids=[4, 5]), False),
        (asked(structured_outputs=StructuredOutputsParams(regex="a+")), False),
        (asked(prompt_logprobs=0), False),
    ],
)
def test_a_text_is_continued_only_if_its_generated_tokens_may_become_prompt(request_: Any, resumes: bool) -> None:
    assert can_resume(request_) is resumes


@pytest.mark.parametrize(
    "params", [{}, {"seed": 4, "temperature": 1.0}, {"repetition_penalty": 1.3, "extra_args": {"other": 1}}]
)
def test_a_continued_request_has_the_number_of_tokens_that_are_generated(params: dict[str, Any]) -> None:
    request = asked(max_tokens=20, min_tokens=2, **params)
    made = prompt_request(m.SendPrompt(REPLICAS[0], "a", "a", request=request, tokens=(7, 7, 8)))
    assert made.prompt_token_ids == [1, 2, 3, 7, 7, 8]
    assert made.sampling_params is not None
    assert (made.sampling_params.max_tokens, made.sampling_params.min_tokens) == (17, 0)
    assert made.sampling_params.extra_args == {**params.get("extra_args", {}), RESUMED: 3}
    assert request.sampling_params.extra_args == params.get("extra_args")
    fresh = prompt_request(m.SendPrompt(REPLICAS[0], "a", "a", request=request))
    assert fresh.sampling_params == request.sampling_params


def lose(params: dict[str, Any], *tokens: int) -> list[m.Effect]:
    """Lose the replica of a request that has generated these tokens; return the effects."""
    machine = RequestMachine(Settings(frontend="ar"), {"ar": StagePool("ar", REPLICAS)}, RequestObserver())
    options, client = RequestOptions(modalities=("text",)), client_request(asked(**params))
    opened = m.Opened(request_id="a", external_id="a", flow=ForwardFlow("ar"), options=options, sink="", client=client)
    (sent,) = (each for each in machine.handle(opened) if isinstance(each, m.SendPrompt))
    if tokens:
        machine.handle(m.Output(replica=sent.replica, engine_id=sent.engine_id, tokens=tokens))
    return machine.handle(m.ReplicaLost(sent.replica, "killed"))


def test_a_text_with_a_penalty_on_generated_tokens_fails_after_a_loss_if_it_had_begun() -> None:
    penalty = {"presence_penalty": 0.5}
    (error,) = (each.error for each in lose(penalty, 7, 8) if isinstance(each, m.FailRequest))
    assert isinstance(error, StageUnavailable)
    assert "killed; no other replica can continue the tokens that it has generated" in str(error)
    for params, tokens in ((penalty, ()), ({}, (7, 8))):
        effects = lose(params, *tokens)
        assert not any(isinstance(each, m.FailRequest) for each in effects)
        (again,) = (each for each in effects if isinstance(each, m.SendPrompt))
        assert again.tokens == tokens
