"""The scheduler of the stage `dit`, without any computation."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest
from vllm import SamplingParams
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from tests.support.bagel_generate import prepare_image
from tests.support.bagel_runs import picture
from tests.support.dit_room import config_of, draw_of
from vllm_omni_ext.model_plugins.bagel.memory import kv_bytes_per_token
from vllm_omni_ext.model_plugins.bagel.model import Bagel
from vllm_omni_ext.model_plugins.bagel.parameters import image_parameters
from vllm_omni_ext.model_plugins.bagel.stages import scheduler as module
from vllm_omni_ext.model_plugins.bagel.stages.scheduler import CONTEXT_BYTES, ROW_TOKENS, DitScheduler
from vllm_omni_ext.wire.envelope import StageError, unpack
from vllm_omni_ext.wire.stage_input import FILLER, PART, PartHeader

SMALL, WIDE = (48, 48), (96, 96)
ROWS = {SMALL: 2 * (9 + 2), WIDE: 2 * (36 + 2)}
"""Tokens of a denoise step with two branches."""


def request(model: Bagel, name: str, size: tuple[int, int] = SMALL, parts: Any = ("fox",), **given: Any) -> Request:
    edit = not isinstance(parts[0], str)
    values = given if edit else {"height": size[0], "width": size[1], **given}
    draw = draw_of(model, parts, image_parameters(values, edit=edit))
    payload = msgspec.to_builtins(draw, builtin_types=(bytes,))
    header = PartHeader(stream=name, part=0, last=True, empty=True, payload=payload)
    return Request(name, list(FILLER), SamplingParams(extra_args={PART: header.as_extra()}), None)


def made(checkpoint: Path, **given: Any) -> DitScheduler:
    return DitScheduler(vllm_config=config_of(checkpoint, **given))


def begun(scheduler: DitScheduler) -> list[str]:
    return [new.req_id for new in scheduler.schedule().scheduled_new_reqs]


def refusals(scheduler: DitScheduler) -> dict[str, str]:
    nothing = ModelRunnerOutput(req_ids=[], req_id_to_index={})
    found = {}
    for outputs in scheduler.update_from_output(scheduler.schedule(), nothing).values():
        for each in outputs.outputs:
            message = unpack(each.pooling_output)
            assert isinstance(message, StageError)
            assert each.finished
            found[each.request_id] = message.reason
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seats", [1, 2, 3, 9])
@pytest.mark.parametrize("rows", [ROWS[WIDE], ROWS[WIDE] + ROWS[SMALL], 3 * ROWS[WIDE]])
@pytest.mark.parametrize("sizes", list(itertools.product((SMALL, WIDE), repeat=4)))
def test_requests_begin_in_their_order_while_there_is_room(
    sizes: tuple[tuple[int, int], ...], rows: int, seats: int, model: Bagel, checkpoint: Path
) -> None:
    """Each step, the oldest running request ends: all begin in their order, and never more at once than fit."""
    scheduler = made(checkpoint, seats=seats, rows=rows)
    for at, size in enumerate(sizes):
        scheduler.add_request(request(model, str(at), size))
    running: list[int] = []
    order: list[int] = []
    while scheduler.has_requests():
        new = [int(name) for name in begun(scheduler)]
        running += new
        order += new
        used = sum(ROWS[sizes[at]] for at in running)
        assert used <= rows
        assert len(running) <= seats
        if len(order) < len(sizes):  # the next one had no room
            assert len(running) == seats or used + ROWS[sizes[len(order)]] > rows
        if running:
            scheduler.finish_requests(str(running.pop(0)), RequestStatus.FINISHED_STOPPED)
    assert order == list(range(len(sizes)))


def test_aborted_requests_make_room_and_small_ones_do_not_overtake_a_large_one(model: Bagel, checkpoint: Path) -> None:
    scheduler = made(checkpoint, rows=ROWS[WIDE])
    for name, size in (("first", SMALL), ("large", WIDE), ("gone", WIDE), ("small", SMALL)):
        scheduler.add_request(request(model, name, size))
    assert begun(scheduler) == ["first"]
    assert begun(scheduler) == []
    scheduler.finish_requests(["first", "gone"], RequestStatus.FINISHED_ABORTED)
    assert begun(scheduler) == ["large"]
    scheduler.finish_requests("large", RequestStatus.FINISHED_ABORTED)
    assert begun(scheduler) == ["small"]


def test_a_request_that_does_not_even_fit_alone_is_refused_at_once(model: Bagel, checkpoint: Path) -> None:
    scheduler = made(checkpoint, rows=ROWS[SMALL])
    scheduler.add_request(request(model, "runs"))
    scheduler.add_request(request(model, "wide", WIDE))
    scheduler.add_request(request(model, "wrong", (40, 40)))
    assert refusals(scheduler) == {
        "wide": "the request needs 76 tokens of a denoise step, but the limit is 22",
        "wrong": "height: must be a multiple of 16, at most 256, not 40",
    }
    assert refusals(scheduler) == {}
    assert scheduler.get_request_counts() == (1, 0)


def test_a_refused_request_can_be_aborted_before_its_answer(model: Bagel, checkpoint: Path) -> None:
    scheduler = made(checkpoint, rows=1)
    scheduler.add_request(request(model, "wide"))
    assert scheduler.get_request_counts() == (0, 1)
    (ended,) = scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    assert ended.is_finished()
    assert not scheduler.has_requests()


@pytest.mark.parametrize(
    ("parts", "values"),
    [
        (["a fox"], {"height": 64, "width": 96}),
        (["a fox"], {"height": 64, "width": 96, "cfg_text_scale": 1.0}),
        (["a", "b"], {"height": 48, "width": 64, "cfg_img_scale": 2.0}),
        ([picture(60, 80, 1), "make it blue"], {}),
        (["x", picture(90, 33, 1), picture(50, 50, 2), "blue"], {}),
        ([picture(90, 50, 2), picture(50, 50, 3), "both"], {"cfg_img_scale": 1.0}),
        ([picture(60, 80, 1), "make it blue"], {"think": True}),
    ],
)
def test_costs_are_those_of_the_request(parts: Any, values: dict[str, Any], model: Bagel, checkpoint: Path) -> None:
    """A thought has its greatest length."""
    scheduler = made(checkpoint)
    found = scheduler.costs(request(model, "r", parts=parts, **values))
    parameters = image_parameters(values, edit=not isinstance(parts[0], str))
    running, thought = prepare_image(model, parts, parameters, thought="a plan")
    assert found[ROW_TOKENS] == sum(running.places.shape[0] + 2 for _ in running.branches)
    contexts = {}
    for context in running.branches.values():
        while context.before is not None:
            contexts[id(context)] = sum(key.nbytes + value.nbytes for key, value in context.layers)
            context = context.before
    difference = 0
    if thought is not None:
        longer = parameters.max_think_token_n + 2 - len(model.tokens.text(thought))
        difference = longer * kv_bytes_per_token(model.sizes.llm, 4)
    assert found[CONTEXT_BYTES] == sum(contexts.values()) + running.latent.nbytes + difference


def test_memory_limits_requests_too(model: Bagel, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = made(checkpoint).costs(request(model, "r"))[CONTEXT_BYTES]
    monkeypatch.setattr(module, "CPU_CONTEXT_BYTES", 2 * one)
    scheduler = made(checkpoint)
    for name in ("a", "b", "c"):
        scheduler.add_request(request(model, name))
    assert begun(scheduler) == ["a", "b"]


def test_a_reply_costs_its_longest_length_and_the_end_of_a_stream_nothing(model: Bagel, checkpoint: Path) -> None:
    scheduler = made(checkpoint, rows=0)
    of_a_token = kv_bytes_per_token(model.sizes.llm, 4)
    for most, length in ((100, 110), (99999, 2048)):
        reply = Request("r", [1] * 10, SamplingParams(max_tokens=most), None)
        assert scheduler.costs(reply) == {CONTEXT_BYTES: length * of_a_token, ROW_TOKENS: 1}
    end = SamplingParams(extra_args={PART: PartHeader.end("s").as_extra()})
    scheduler.add_request(Request("end", list(FILLER), end, None))
    assert begun(scheduler) == ["end"]
