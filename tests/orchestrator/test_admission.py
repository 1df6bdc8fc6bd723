"""Tickets, the one plan of each request, and its parameters for vLLM."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import PlaceholderRange
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM

from tests.support.fakes import Bench, ScriptedFlow, drained, text_request
from vllm_omni_ext.errors import ConfigError, RequestError, RequestFailed, StageUnavailable
from vllm_omni_ext.omni import AsyncOmni
from vllm_omni_ext.orchestrator.admission import Admission, Ticket
from vllm_omni_ext.orchestrator.answers import chunks, merged, until
from vllm_omni_ext.orchestrator.messages import END
from vllm_omni_ext.plugins.flow import Finished, ForwardFlow, Open
from vllm_omni_ext.plugins.runtime import Capabilities, Planned, Rendered, RequestOptions
from vllm_omni_ext.plugins.spec import SAMPLING_PARAMS
from vllm_omni_ext.wire.stage_input import TICKET

BOTH = RequestOptions(modalities=("text", "audio"))
TEXT = RequestOptions(modalities=("text",))
RENDERED = Rendered(prompt=[1, 2, 3])


@dataclass
class Runtime:
    """Plans a text or a voice, and records the requests."""

    planned: list[tuple[Rendered, RequestOptions]] = field(default_factory=list)
    frontend_args: dict[str, Any] = field(default_factory=dict)
    error: RequestError | None = None
    fields: Any = None

    def capabilities(self) -> Capabilities:
        return Capabilities(modalities=("text", "audio"), default_modalities=("text", "audio"))

    def validate(self, options: RequestOptions) -> None:
        if "smell" in options.modalities:
            raise RequestError("modalities: 'smell' is not available", parameter="modalities")

    def plan(self, request: Rendered, options: RequestOptions) -> Planned:
        self.planned.append((request, options))
        if self.error is not None:
            raise self.error
        if options.modalities == ("text",):
            return Planned(flow=ForwardFlow("text"))
        flow = ScriptedFlow(lambda event: [], [Open(stage="voice", prompt=[0])])
        return Planned(
            flow=flow,
            frontend_args=self.frontend_args,
            skip_prefix_cache=bool(self.frontend_args),
            budgets={"voice": 7},
        )

    def decode(self, stage: str, tensor: Any) -> Any:
        return tensor


def with_video(length: int, embeds: Any) -> Rendered:
    where = PlaceholderRange(offset=0, length=length, is_embed=embeds)
    return Rendered(prompt=[1] * length, features=[SimpleNamespace(modality="video", mm_position=where)])


class Desk:
    """An admission over fake replicas."""

    def __init__(self, **counts: int) -> None:
        self.runtime = Runtime()
        self.bench = Bench(lambda event: [], **counts)
        self.admission = Admission(self.runtime, self.bench.orchestrator, "text")

    def admit(self, request: Rendered, options: RequestOptions, answers: int = 1) -> Ticket:
        ticket = self.admission.ticket(None, options)
        self.admission.admit(ticket, request, answers=answers)
        return ticket


def test_a_ticket_leads_to_its_options_once() -> None:
    desk = Desk()
    tickets = [desk.admission.expect(Ticket(options=options)) for options in (BOTH, TEXT)]
    assert len(set(tickets)) == 2 and desk.admission.held() == 2
    params = SamplingParams(extra_args={TICKET: tickets[0], "mine": 1})
    assert desk.admission.ticket(params, None).options is BOTH
    assert params.extra_args == {"mine": 1}
    params = SamplingParams(extra_args={TICKET: tickets[0]})
    assert desk.admission.ticket(params, None).options.modalities == ("text",), "text alone is the default"
    assert params.extra_args is None
    desk.admission.withdraw(tickets[1])
    desk.admission.withdraw("unknown")
    assert desk.admission.held() == 0


def test_all_text_so_far_can_be_requested() -> None:
    desk = Desk()
    for all_text, kind in ((True, RequestOutputKind.CUMULATIVE), (False, RequestOutputKind.FINAL_ONLY)):
        params = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY)
        params.extra_args = {TICKET: desk.admission.expect(Ticket(options=BOTH, all_text=all_text))}
        desk.admission.ticket(params, None)
        assert params.output_kind is kind


def test_options_that_cannot_be_met_are_refused_at_once() -> None:
    desk, smell = Desk(), RequestOptions(modalities=("smell",))
    for refuse in (
        lambda: desk.admission.expect(Ticket(options=smell)),
        lambda: desk.admission.ticket(SamplingParams(), smell),
    ):
        with pytest.raises(RequestError, match="smell"):
            refuse()
    assert desk.admission.held() == 0


def test_a_request_that_the_plugin_refuses_is_not_started() -> None:
    desk = Desk()
    desk.runtime.error = RequestError("prompt: no", parameter="prompt")
    with pytest.raises(RequestError, match="prompt: no"):
        desk.admit(RENDERED, BOTH)
    assert desk.bench.of("text/0").added == [] and desk.admission.held() == 0


def test_only_the_stages_of_the_flow_are_needed() -> None:
    desk = Desk(voice=0)
    with pytest.raises(StageUnavailable, match="stage 'voice' has no live replica"):
        desk.admit(RENDERED, BOTH)
    assert desk.admit(RENDERED, TEXT).forwarded


def test_several_answers_are_for_text_alone() -> None:
    desk = Desk()
    assert desk.admit(RENDERED, TEXT, answers=3).sink is None
    with pytest.raises(RequestError, match="n: must be 1 when text, audio is requested") as refused:
        desk.admit(RENDERED, BOTH, answers=2)
    assert refused.value.parameter == "n"


def test_a_medium_of_more_tokens_than_the_limit_is_refused() -> None:
    desk = Desk()
    desk.admission = Admission(desk.runtime, desk.bench.orchestrator, "text", max_media_tokens=8)
    for length, embeds in ((8, None), (9, torch.arange(9) < 8)):
        desk.admit(with_video(length, embeds), TEXT)
    with pytest.raises(
        RequestError, match=r"^messages: a part of type video has 9 tokens, but limits.max_media_tokens is 8$"
    ) as e:
        desk.admit(with_video(9, None), TEXT)
    assert e.value.parameter == "messages" and desk.admission.held() == 0


async def test_the_parameters_of_the_plan_are_in_the_requests_of_its_stages() -> None:
    desk = Desk()
    desk.runtime.frontend_args = {"export": [[0, 2]]}
    ticket, request = desk.admit(RENDERED, BOTH), text_request("r", {"mine": 1})
    key = desk.admission.attach(ticket, request)
    await desk.admission.open(request)
    (sent,) = desk.bench.of("text/0").added
    assert sent.sampling_params is not None
    assert sent.sampling_params.extra_args == {"export": [[0, 2]], "mine": 1}
    assert sent.sampling_params.skip_reading_prefix_cache is True
    (opened,) = desk.bench.of("voice/0").added
    assert opened.sampling_params is not None and opened.sampling_params.max_tokens == 7
    assert desk.runtime.planned == [(RENDERED, BOTH)], "planned once"
    desk.admission.withdraw(key)
    await desk.bench.orchestrator.abort(["r"])
    assert desk.admission.held() == desk.bench.orchestrator.held() == 0


async def test_several_answers_share_one_plan() -> None:
    desk = Desk()
    ticket, extra = desk.admit(RENDERED, TEXT, answers=2), {"mine": 1}
    first, second = text_request("0_r", extra), text_request("1_r", extra)
    desk.admission.attach(ticket, first)
    assert first.sampling_params is not None and second.sampling_params is not None
    second.sampling_params.extra_args = first.sampling_params.extra_args
    for request in (first, second):
        await desk.admission.open(request)
    sent = desk.bench.of("text/0").added
    assert [each.sampling_params.extra_args for each in sent if each.sampling_params] == [{"mine": 1}] * 2
    assert len(desk.runtime.planned) == 1


async def test_a_request_without_a_plan_is_for_the_frontend() -> None:
    desk = Desk()
    await desk.admission.open(text_request("r"))
    await desk.bench.produce("text", "r", 10, end="stop")
    assert desk.bench.orchestrator.held() == 0 and desk.runtime.planned == []


async def test_a_request_without_the_frontend() -> None:
    desk = Desk(text=0)
    desk.runtime.plan = lambda request, options: Planned(flow=Alone())  # type: ignore[method-assign]
    ticket = desk.admit(Rendered(), RequestOptions(modalities=("audio",)))
    assert not ticket.forwarded and ticket.sink is not None
    await desk.admission.start(ticket, "r", "external r")
    assert desk.bench.orchestrator.count(frontend=False) == 1 and desk.bench.orchestrator.count(frontend=True) == 0
    await desk.bench.produce("voice", "r", 1, end="stop")
    assert ticket.sink.get_nowait() is END and drained(ticket.sink) == []
    assert desk.bench.orchestrator.held() == 0


class Alone:
    """One request to one stage, whose end is all there is."""

    stages = frozenset({"voice"})
    outputs = frozenset({"audio"})

    def begin(self) -> list[Any]:
        return [Open(stage="voice", prompt=[0])]

    def handle(self, event: Any) -> list[Any]:
        return [Finished()]

    def replay(self, stage: str) -> list[Any]:
        return self.begin()


class OpensFrontend(Alone):
    """The flow opens the frontend itself."""

    stages = frozenset({"text"})

    def begin(self) -> list[Any]:
        return [Open(stage="text", prompt=[7, 7])]


async def test_a_flow_that_opens_the_frontend_uses_the_clients_parameters() -> None:
    desk, extra = Desk(), {"mine": 1}
    desk.runtime.plan = lambda request, options: Planned(flow=OpensFrontend())  # type: ignore[method-assign]
    ticket = desk.admission.ticket(None, RequestOptions(modalities=("audio",)))
    params = SamplingParams(temperature=0.25, max_tokens=9, seed=3, logit_bias={5: 1.0}, extra_args=extra)
    desk.admission.admit(ticket, RENDERED, params=params)
    await desk.admission.start(ticket, "r", "external r")
    (sent,) = desk.bench.of("text/0").added
    got = sent.sampling_params
    assert got is not None and got.extra_args is not None
    assert (got.temperature, got.max_tokens, got.seed, got.logit_bias) == (0.25, 9, 3, {5: 1.0})
    assert got.extra_args["mine"] == 1 and params.extra_args == extra, "the client's own parameters stay as they are"


def omni_of(desk: Desk) -> Any:
    omni: Any = AsyncOmni.__new__(AsyncOmni)
    omni.admission, omni._fleet_open = desk.admission, None
    omni.plan = SimpleNamespace(frontend=lambda: SimpleNamespace(params_type=SAMPLING_PARAMS))
    return omni


async def test_only_the_frontend_that_a_flow_opens_gets_the_clients_adapter_and_cache_salt() -> None:
    class OpensBoth(OpensFrontend):
        stages = frozenset({"text", "voice"})

        def begin(self) -> list[Any]:
            return [Open(stage="text", prompt=[7]), Open(stage="voice", prompt=[7])]

    desk, request = Desk(), text_request("r")
    desk.runtime.plan = lambda request, options: Planned(flow=OpensBoth())  # type: ignore[method-assign]
    request.lora_request, request.cache_salt = LoRARequest("adapter", 1, "/adapter"), "salt"
    ticket = omni_of(desk)._admit(request, desk.admission.ticket(None, BOTH), SamplingParams())
    await desk.admission.start(ticket, "r", "external r")
    sent = [each for stage in ("text", "voice") for each in desk.bench.of(f"{stage}/0").added]
    assert [each.lora_request for each in sent] == [request.lora_request, None]
    assert [each.cache_salt for each in sent] == ["salt", None]


async def test_ids_that_end_a_text_do_not_end_a_request_that_a_flow_opens() -> None:
    """They may be codes of a sound. vLLM adds those of the tokenizer and the generation config to the parameters."""
    desk, request, given = Desk(), text_request("r"), SamplingParams(stop_token_ids=[11])
    desk.runtime.plan = lambda request, options: Planned(flow=OpensFrontend())  # type: ignore[method-assign]
    request.sampling_params = given.clone()
    request.sampling_params.update_from_generation_config({"eos_token_id": [7, 8]}, 9)
    ticket = desk.admission.ticket(None, RequestOptions(modalities=("audio",)))
    await desk.admission.start(omni_of(desk)._admit(request, ticket, given), "r", "external r")
    (sent,) = desk.bench.of("text/0").added
    got = sent.sampling_params
    assert got is not None
    assert (got.stop_token_ids, got.eos_token_id, got._all_stop_token_ids) == ([11], None, {11})
    assert request.sampling_params.eos_token_id == 9, "a forwarded request is a text"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", {"stop": ["!"]}),
        ("logprobs", {"logprobs": 1}),
        ("prompt_logprobs", {"prompt_logprobs": 1}),
        ("response_format", {"structured_outputs": StructuredOutputsParams(choice=["a"])}),
    ],
)
def test_parameters_of_text_are_refused_where_the_flow_makes_none(field: str, value: dict[str, Any]) -> None:
    desk = Desk()
    desk.runtime.plan = lambda request, options: Planned(flow=OpensFrontend())  # type: ignore[method-assign]
    ticket = desk.admission.ticket(None, RequestOptions(modalities=("audio",)))
    with pytest.raises(RequestError, match=f"^{field}: is not available when audio is requested; leave") as refused:
        desk.admission.admit(ticket, RENDERED, params=SamplingParams(**value))
    assert refused.value.parameter == field
    other = Desk()
    other.admission.admit(other.admission.ticket(None, TEXT), RENDERED, params=SamplingParams(**value))


def test_fields_of_a_text_are_refused_if_no_request_is_forwarded() -> None:
    desk = Desk()
    fields = ("logprobs", "stop")
    desk.admission.admit(Ticket(options=TEXT, text_fields=fields), RENDERED)
    desk.runtime.plan = lambda request, options: Planned(flow=Alone())  # type: ignore[method-assign]
    desk.admission.admit(Ticket(options=BOTH), RENDERED, params=SamplingParams(stop=["!"]))
    with pytest.raises(RequestError, match=r"^logprobs: is not available when text, audio is requested") as refused:
        desk.admission.admit(Ticket(options=BOTH, text_fields=fields), RENDERED)
    assert refused.value.parameter == "logprobs"


def test_parameters_of_a_stage_that_a_direct_request_does_not_use_are_refused() -> None:
    desk = Desk()
    desk.runtime.plan = lambda request, options: Planned(flow=Alone())  # type: ignore[method-assign]
    for named in ({"voice"}, {"voice", "sound"}):
        ticket = desk.admit(Rendered(), RequestOptions(modalities=("audio",), named=frozenset(named)))
        if "sound" not in named:
            desk.admission.refuse_unused(ticket)
            continue
        message = r"^sound: this request does not use the stage; its answer is audio$"
        with pytest.raises(RequestError, match=message) as refused:
            desk.admission.refuse_unused(ticket)
        assert refused.value.parameter == "sound"


async def frontend(*outputs: Any) -> Any:
    for output in outputs:
        await asyncio.sleep(0)
        if isinstance(output, Exception):
            raise output
        yield output


async def test_a_merged_answer_ends_when_both_sources_have_ended() -> None:
    sink: asyncio.Queue[Any] = asyncio.Queue()
    for item in ("sound", END):
        sink.put_nowait(item)
    assert [item async for item in merged(frontend("a", "b"), chunks(sink))] == ["sound", "a", "b"]


async def test_an_error_ends_an_answer() -> None:
    error = RequestFailed("no")
    sink: asyncio.Queue[Any] = asyncio.Queue()
    sink.put_nowait(error)
    with pytest.raises(RequestFailed, match="no"):
        _ = [item async for item in chunks(sink)]
    wrapped = ValueError("vLLM's")
    wrapped.__cause__ = error
    with pytest.raises(RequestFailed, match="no"):
        _ = [item async for item in merged(frontend(wrapped), chunks(asyncio.Queue()))]


async def test_an_answer_has_a_deadline() -> None:
    with pytest.raises(RequestFailed, match=r"longer than 0\.01 s"):
        _ = [item async for item in until(0.01, chunks(asyncio.Queue()))]


async def test_a_request_whose_caller_is_cancelled_during_the_send_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM then aborts nothing, so the package must."""
    desk, sending = Desk(), asyncio.Event()
    request, aborted = text_request("r"), list[set[str]]()

    async def generate(*_: Any, **__: Any) -> Any:
        sending.set()
        await asyncio.Event().wait()
        yield None

    async def abort(request_ids: set[str]) -> None:
        aborted.append(request_ids)

    def known(request_ids: list[str], *, internal: bool) -> list[str]:
        return request_ids if internal else []

    monkeypatch.setattr(AsyncLLM, "generate", generate)
    omni: Any = AsyncOmni.__new__(AsyncOmni)
    omni.admission = desk.admission
    omni.output_processor, omni.orchestrator = SimpleNamespace(abort_requests=known), SimpleNamespace(abort=abort)
    answer = omni._answer(request, desk.admit(RENDERED, TEXT), {})
    asking = asyncio.ensure_future(anext(answer))
    await sending.wait()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    omni._fleet_open = None
    assert aborted == [{"r"}] and desk.admission.held() == 0


def test_the_default_modalities_may_be_configured() -> None:
    runtime, orchestrator = Runtime(), Desk().bench.orchestrator

    def default(names: str | None) -> tuple[str, ...]:
        made = Admission(runtime, orchestrator, "text", default_modalities=names)
        assert made.capabilities.modalities == ("text", "audio")
        return made.capabilities.default_modalities

    assert [default(names) for names in (None, "text", "audio,text")] == [
        ("text", "audio"),
        ("text",),
        ("audio", "text"),
    ]
    with pytest.raises(ConfigError, match="default_modalities: this model has no 'smell'; use text, audio"):
        default("text,smell")
