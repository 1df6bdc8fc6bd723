"""The stage `dit`, step by step: its pictures are those of the reference, with any other requests."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from tests.model_plugins.bagel.test_packing import REQUESTS, parameters_of
from tests.support.bagel_generate import generate_image
from tests.support.bagel_runs import difference, golden
from tests.support.dit_room import CLOSE, Room, assert_almost_equal, draw_of, latent_of, pixels_of
from vllm_omni_ext.model_plugins.bagel.denoise import Denoiser
from vllm_omni_ext.model_plugins.bagel.model import Bagel
from vllm_omni_ext.model_plugins.bagel.parameters import image_parameters
from vllm_omni_ext.model_plugins.bagel.requests.payloads import Draw, Drawn, Picture, Preview, Text
from vllm_omni_ext.model_plugins.bagel.stages import drawing
from vllm_omni_ext.wire.envelope import StageError, StageProgress

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def room(checkpoint: Path) -> Callable[..., Room]:
    return lambda **given: Room(checkpoint, **given)


@pytest.mark.parametrize("case", ["t2i", "t2i_nocfg", "edit"])
def test_pictures_equal_the_reference(case: str, model: Bagel, room: Callable[..., Room]) -> None:
    expected, engine = golden(f"{case}_fp32"), room()
    engine.draw("r", draw_of(model, expected.parts, expected.parameters, latent=True))
    engine.run()
    drawn = engine.drawn("r")
    assert engine.messages("r")[:-1] == [StageProgress(done, 7) for done in range(1, 8)]
    assert difference(latent_of(drawn), expected.tensors["latent"]) < CLOSE
    assert_almost_equal(pixels_of(drawn), expected.tensors["image_u8"])
    assert set(drawn.seconds) == {"queue", "prefill", "steps", "vae"} and min(drawn.seconds.values()) >= 0
    assert drawn.thought is None


def request(model: Bagel, at: int, **given: Any) -> Draw:
    return draw_of(model, REQUESTS[at][0], parameters_of(at), latent=True, **given)


@pytest.fixture(scope="module")
def alone(model: Bagel, room: Callable[..., Room]) -> list[Drawn]:
    found = []
    for at in range(len(REQUESTS)):
        engine = room()
        engine.draw("r", request(model, at))
        engine.run()
        found.append(engine.drawn("r"))
    return found


def assert_same(found: Drawn, expected: Drawn) -> None:
    assert difference(latent_of(found), latent_of(expected)) < 1e-5
    assert_almost_equal(pixels_of(found), pixels_of(expected))


@pytest.mark.parametrize("steps", [0, 2, 4])
def test_an_aborted_request_leaves_nothing_behind_after_one_step(
    steps: int, model: Bagel, room: Callable[..., Room], alone: list[Drawn]
) -> None:
    """It waits for its turn, or is denoised with others."""
    engine = room()
    for at in (0, 3, 4):
        engine.draw(f"r{at}", request(model, at))
    for _ in range(steps):
        engine.step()
    job = engine.model._jobs.get("r3")
    assert (job is None) == (steps == 0)
    held = [] if job is None else [weakref.ref(job)]
    if job is not None and job.image is not None:
        held += [weakref.ref(each) for each in (job.image, *job.image.branches.values())]
    del job
    engine.scheduler.finish_requests("r3", RequestStatus.FINISHED_ABORTED)
    engine.step()
    gc.collect()
    assert "r3" not in engine.model._jobs
    assert [each() for each in held] == [None] * len(held)
    engine.run()
    for at in (0, 4):
        assert_same(engine.drawn(f"r{at}"), alone[at])


@pytest.mark.parametrize("apart", [0, 1])
def test_five_different_requests_get_the_pictures_of_each_alone(
    apart: int, model: Bagel, room: Callable[..., Room], alone: list[Drawn]
) -> None:
    """All at once, or one with each step and three at a time."""
    engine = room(seats=3) if apart else room()
    for at in (4, 2, 0, 3, 1):
        engine.draw(f"r{at}", request(model, at))
        for _ in range(apart):
            engine.step()
            assert len(engine.model._jobs) <= 3
    engine.run()
    for at, expected in enumerate(alone):
        assert_same(engine.drawn(f"r{at}"), expected)


def test_an_engine_step_has_one_turn_and_one_denoise_step(
    model: Bagel, room: Callable[..., Room], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, done = room(), list[str]()
    denoise, turn = Denoiser.step, drawing.Drawing.turn
    monkeypatch.setattr(Denoiser, "step", lambda *given: (done.append("denoise"), denoise(*given))[1])
    monkeypatch.setattr(drawing.Drawing, "turn", lambda *given: (done.append("turn"), turn(*given))[1])
    for at in range(len(REQUESTS)):
        engine.draw(f"r{at}", request(model, at, previews=2))
    while engine.scheduler.has_requests():
        done.clear()
        engine.step()
        assert done in (["turn", "denoise"], ["denoise"], ["turn"], [])


@pytest.mark.parametrize(
    ("evaluations", "previews", "steps"),
    [(7, 0, []), (7, 1, [3]), (7, 2, [2, 4]), (7, 6, [1, 2, 3, 4, 5, 6]), (7, 99, [1, 2, 3, 4, 5, 6]), (1, 3, [])],
)
def test_previews_are_evenly_spread(evaluations: int, previews: int, steps: list[int]) -> None:
    assert drawing.preview_steps(evaluations, previews) == steps


def test_previews_come_closer_to_the_picture(model: Bagel, room: Callable[..., Room], alone: list[Drawn]) -> None:
    engine = room()
    engine.draw("r", request(model, 0, previews=3))
    engine.draw("other", request(model, 3))
    engine.run()
    messages = engine.messages("r")
    shown = [each for each in messages if isinstance(each, Preview)]
    assert [(each.number, each.done, each.total) for each in shown] == [(0, 1, 7), (1, 3, 7), (2, 5, 7)]
    for each in shown:  # right after the step that it shows
        assert messages[messages.index(each) - 1] == StageProgress(each.done, 7)
    final = pixels_of(engine.drawn("r")).float()
    off = [(pixels_of(each).float() - final).abs().mean().item() for each in shown]
    assert off == sorted(off, reverse=True)
    assert off[-1] > 0
    assert_same(engine.drawn("r"), alone[0])
    assert_same(engine.drawn("other"), alone[3])


@pytest.mark.parametrize(("case", "given"), [("t2i", False), ("edit", False), ("edit", True)])
def test_a_thought_written_here_or_given_makes_the_picture_of_the_model_alone(
    case: str, given: bool, model: Bagel, room: Callable[..., Room]
) -> None:
    parts = golden(f"{case}_fp32").parts
    values = {"num_timesteps": 5, "seed": 9, "think": True, "max_think_token_n": 12}
    values |= {"height": 48, "width": 64} if case == "t2i" else {}
    parameters = image_parameters(values, edit=case == "edit")
    thought = "a plan" if given else None
    expected, engine = generate_image(model, parts, parameters, thought=thought), room()
    ids = None if thought is None else list(model.tokens.text(thought))[1:-1]
    engine.draw("r", draw_of(model, parts, parameters, thought=ids, latent=True))
    engine.draw("other", request(model, 2))
    engine.run()
    drawn = engine.drawn("r")
    assert drawn.thought == expected.think_text
    assert drawn.thought
    assert difference(latent_of(drawn), expected.image.latent) < 1e-5
    assert_almost_equal(pixels_of(drawn), expected.image.image)
    assert ("think" in drawn.seconds) != given


GOOD = Text([1, 2])


@pytest.mark.parametrize(
    ("parts", "changes", "why"),
    [
        ([], {}, "prompt: must be at least one"),
        ([Text([])], {}, "a text has no token ids"),
        ([Text([384])], {}, "token ids must be from 0 to 383"),
        ([Picture(64, 64, bytes(5))], {}, "64x64 pixels has 5 bytes"),
        ([Picture(60, 64, bytes(60 * 64 * 3)), GOOD], {}, "height of a picture must be a multiple of 16, at most 256"),
        ([GOOD], {"height": 1024}, "height: must be a multiple of 16, at most 256"),
        ([GOOD], {"cfg_interval": (1.0, 0.0)}, "cfg_interval: must not end before"),
    ],
)
def test_a_wrong_request_ends_alone_with_the_reason(
    parts: list[Any], changes: dict[str, Any], why: str, model: Bagel, room: Callable[..., Room], alone: list[Drawn]
) -> None:
    engine = room()
    engine.draw("good", request(model, 0))
    parameters = msgspec.structs.replace(request(model, 0).parameters, **changes)
    engine.draw("bad", Draw(parts=parts, parameters=parameters))
    engine.run()
    (error,) = engine.messages("bad")
    assert isinstance(error, StageError)
    assert why in error.reason
    assert engine.got["bad"][-1].finish_reason == FinishReason.ERROR
    assert_same(engine.drawn("good"), alone[0])


def test_a_message_of_another_kind_is_refused(room: Callable[..., Room]) -> None:
    engine = room()
    for name, message, why in (
        ("bad", {"type": "draw", "parts": 3}, "parts"),
        ("none", None, "needs the message Draw"),
    ):
        engine.draw(name, message)
        engine.run()
        assert why in engine.messages(name)[0].reason


@pytest.mark.parametrize("where", ["prefill", "denoise", "vae"])
def test_a_failure_ends_only_its_own_request(
    where: str, model: Bagel, room: Callable[..., Room], alone: list[Drawn], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure of the common denoise step is found by doing it for each request alone."""
    engine = room()
    name, is_bad = {
        "prefill": ("begin", lambda given: given[2].seed == 4),
        "denoise": ("", lambda given: any(each.parameters.seed == 4 for each in given[1])),
        "vae": ("decode", lambda given: tuple(given[1].shape) == tuple(latent_of(alone[3]).shape)),
    }[where]
    owner: Any = drawing if name else Denoiser
    works = getattr(owner, name or "step")

    def fails(*given: Any, **more: Any) -> Any:
        if is_bad(given):
            raise RuntimeError("out of something")
        return works(*given, **more)

    monkeypatch.setattr(owner, name or "step", fails)
    for at in (0, 3, 4):
        engine.draw(f"r{at}", request(model, at))
    engine.run()
    assert engine.messages("r3")[-1] == StageError("RuntimeError: out of something")
    for at in (0, 4):
        assert_same(engine.drawn(f"r{at}"), alone[at])
