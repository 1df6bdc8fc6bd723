"""Input rows of the talker: a function of the request's own history, however it is cut."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_omni_ext.engine.feeder import Span
from vllm_omni_ext.model_plugins.qwen3_omni.prompt import MULTIMODAL, NO_CODEC
from vllm_omni_ext.model_plugins.qwen3_omni.talker_feed import FIRST_FRAMES, TalkerFeeder

HIDDEN, VOCAB, CODES, GROUPS, EOS, FILL = 3, 20, 10, 4, 9, 19
PROMPT = [1, 2, MULTIMODAL, 3, MULTIMODAL, MULTIMODAL, 4]
CODEC = [NO_CODEC] * 5 + [6, 7]
GREEDY = SimpleNamespace(temperature=0.0, seed=None)


class Weights:
    """Random tables; the predictor's codes are a function of its inputs and of who asks."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.text_table = torch.randn(VOCAB, HIDDEN, generator=generator)
        self.codec_table = torch.randn(CODES, HIDDEN, generator=generator)
        self.codec_eos = EOS
        self.tables = [torch.randn(CODES, HIDDEN, generator=generator) for _ in range(GROUPS - 1)]
        self.code_predictor: Any = SimpleNamespace(groups=GROUPS, frame_rows=self.frame_rows)
        self.frames: Any = SimpleNamespace(make=self.make)
        self.draws: list[Any] = []

    def codec_rows(self, ids: Tensor) -> Tensor:
        return self.codec_table[ids]

    def project_hidden(self, rows: Tensor) -> Tensor:
        return rows[:, :HIDDEN] * 2 + 1

    def frame_rows(self, codes: Tensor) -> Tensor:
        return torch.stack([table[codes[:, i].long()] for i, table in enumerate(self.tables)]).sum(dim=0)

    def make(self, hidden: Tensor, live: list[int], first: list[int], draws: Any) -> Tensor:
        self.draws = list(draws)
        rest = (hidden[live].sum(dim=1).long()[:, None] + torch.arange(GROUPS - 1)) % CODES
        return torch.cat([torch.tensor(first)[:, None], rest], dim=1).int()


WEIGHTS = Weights()


def make() -> TalkerFeeder:
    return TalkerFeeder(WEIGHTS, device=torch.device("cpu"))


def handoff(track: list[int], text: list[int] = PROMPT, codec: list[int] = CODEC, **more: Any) -> dict[str, Any]:
    rows = [[p, p + 1] for p, token in enumerate(text) if token == MULTIMODAL]
    return {"text": text, "codec": codec, "fill": FILL, "track": track, "rows": rows, **more}


def hidden_rows(count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, 5, generator=torch.Generator().manual_seed(seed))


def sample(feeder: TalkerFeeder, req_id: str, code: int, hidden: int) -> Tensor | None:
    return feeder.sampled([req_id], [[code]], torch.full((1, 2), float(hidden)))[0]


def spoken(track: list[int], frames: list[tuple[int, int]], feeder: TalkerFeeder, req_id: str = "a") -> None:
    """A request with its rows and frames (first code, hidden value)."""
    feeder.open(req_id, handoff(track), GREEDY)
    feeder.extend(req_id, {}, hidden_rows(3))
    for code, hidden in frames:
        sample(feeder, req_id, code, hidden)


def by_hand(track: list[int], frames: list[tuple[int, int]]) -> Tensor:
    """All rows of that request, one position after the other."""
    projected, rows = iter(WEIGHTS.project_hidden(hidden_rows(3))), []
    for text, code in zip(PROMPT, CODEC, strict=True):
        row = next(projected) if text == MULTIMODAL else WEIGHTS.text_table[text]
        rows.append(row if code == NO_CODEC else row + WEIGHTS.codec_table[code])
    for step, (code, hidden) in enumerate(frames):
        row = WEIGHTS.text_table[track[step] if step < len(track) else FILL] + WEIGHTS.codec_table[code]
        for group, table in enumerate(WEIGHTS.tables):
            row = row + table[(2 * hidden + group) % CODES]
        rows.append(row)
    return torch.stack(rows)


tracks = st.lists(st.integers(0, VOCAB - 1), max_size=8)
codes = st.lists(st.tuples(st.integers(0, EOS - 1), st.integers(0, 40)), max_size=8)


@settings(deadline=None)
@given(tracks, codes, st.data())
def test_any_split_gives_the_rows_of_one_go(track: list[int], frames: list[tuple[int, int]], data: Any) -> None:
    feeder, whole = make(), by_hand(track, frames)
    spoken(track, frames, feeder)
    torch.testing.assert_close(feeder.rows([Span("a", 0, len(whole))]), whole)
    marks = sorted(data.draw(st.sets(st.integers(1, len(whole) - 1))) | {0, len(whole)})
    spans = [Span("a", a, b - a) for a, b in itertools.pairwise(marks)]
    torch.testing.assert_close(torch.cat([feeder.rows([span]) for span in spans]), whole)
    torch.testing.assert_close(feeder.rows(spans), whole)


@settings(deadline=None)
@given(st.permutations(["a", "b", "c"]), st.data())
def test_requests_of_a_batch_do_not_mix(order: list[str], data: Any) -> None:
    feeder = make()
    given_ = {name: (data.draw(tracks), data.draw(codes)) for name in ("a", "b", "c")}
    for name, (track, frames) in given_.items():
        spoken(track, frames, feeder, name)
    wholes = [by_hand(*given_[name]) for name in order]
    spans = [Span(name, 0, len(whole)) for name, whole in zip(order, wholes, strict=True)]
    torch.testing.assert_close(feeder.rows(spans), torch.cat(wholes))


@given(tracks, st.data())
def test_a_track_in_pieces_is_the_track(track: list[int], data: Any) -> None:
    cut = data.draw(st.integers(0, len(track)))
    feeder, frames = make(), [(1, 2), (3, 4), (5, 6)]
    spoken(track[:cut], frames, feeder)
    for entry in track[cut:]:
        feeder.extend("a", {"track": [entry], "last": False}, None)
    feeder.extend("a", {"last": True}, None)
    torch.testing.assert_close(feeder.rows([Span("a", 0, 10)]), by_hand(track, frames))


def test_rows_in_pieces_are_the_rows() -> None:
    feeder = make()
    feeder.open("a", handoff([]), GREEDY)
    for row in hidden_rows(3):
        feeder.extend("a", {}, row[None])
    torch.testing.assert_close(feeder.rows([Span("a", 0, 7)]), by_hand([], []))


def test_opening_again_after_a_preemption_keeps_the_history() -> None:
    feeder, frames = make(), [(1, 2), (3, 4)]
    spoken([5], frames, feeder)
    feeder.extend("a", {"track": [6]}, None)
    feeder.open("a", handoff([5]), GREEDY)
    assert len(feeder) == 1
    torch.testing.assert_close(feeder.rows([Span("a", 0, 9)]), by_hand([5, 6], frames))


def test_a_history_grows_with_its_reply() -> None:
    """Room is made for the frames that there are, however many were asked for."""
    feeder = make()
    feeder.open("a", handoff([], text=[1], codec=[NO_CODEC]), GREEDY)
    frames = [(step % EOS, step % 40) for step in range(3 * FIRST_FRAMES)]
    for code, hidden in frames:
        sample(feeder, "a", code, hidden)
    assert feeder._requests["a"].history.shape == (4 * FIRST_FRAMES, GROUPS)
    expected = torch.stack(
        [_row(code, [(2 * hidden + i) % CODES for i in range(GROUPS - 1)]) for code, hidden in frames]
    )
    torch.testing.assert_close(feeder.rows([Span("a", 1, len(frames))]), expected)


def test_a_closed_request_is_forgotten() -> None:
    feeder = make()
    spoken([5], [(1, 2)], feeder)
    feeder.close("a")
    feeder.close("a")
    assert len(feeder) == 0
    with pytest.raises(KeyError):
        feeder.rows([Span("a", 0, 1)])
    spoken([6], [(3, 4)], feeder)  # the same id starts anew
    torch.testing.assert_close(feeder.rows([Span("a", 0, 8)]), by_hand([6], [(3, 4)]))


def test_frames_are_complete_and_the_end_has_none() -> None:
    feeder = make()
    for name in "abcd":
        spoken([], [], feeder, name)
    hidden = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    made = feeder.sampled(list("abcd"), [[4], [EOS], [], [5]], hidden)
    assert [None if frame is None else frame.tolist() for frame in made] == [
        [[4, 0, 1, 2]],
        None,
        None,
        [[5, 3, 4, 5]],
    ]
    assert made[0] is not None
    assert made[0].dtype == torch.int32
    assert len(WEIGHTS.draws) == 2
    assert feeder.sampled(["b"], [[EOS]], hidden[:1]) == [None]
    # "b" and "c" have no frame yet: their next one is their first
    sample(feeder, "c", 8, 1)
    torch.testing.assert_close(feeder.rows([Span("c", 7, 1)]), _row(8, [2, 3, 4])[None])


def _row(first: int, rest: list[int]) -> Tensor:
    total = WEIGHTS.text_table[FILL] + WEIGHTS.codec_table[first]
    return total + sum(table[code] for table, code in zip(WEIGHTS.tables, rest, strict=True))


@pytest.mark.parametrize(
    ("sampling", "greedy", "seed"),
    [({"temperature": 0.0, "seed": 3}, True, 3), ({"temperature": 0.9, "seed": None}, False, None)],
)
def test_residual_codes_are_drawn_as_the_request_says(sampling: Any, greedy: bool, seed: int | None) -> None:
    feeder = make()
    feeder.open("a", handoff([], text=[1], codec=[NO_CODEC]), SimpleNamespace(**sampling))
    sample(feeder, "a", 1, 1)
    (draw,) = WEIGHTS.draws
    assert draw.greedy is greedy
    assert (None if draw.generator is None else draw.generator.initial_seed()) == seed
    before = draw.generator
    sample(feeder, "a", 1, 1)
    assert WEIGHTS.draws[0].generator is before  # one stream of numbers for the whole request


def test_positions_of_text_are_a_plain_count() -> None:
    feeder = make()
    feeder.open("a", handoff([]), GREEDY)
    positions, delta = feeder.positions("a", 4)
    assert (positions.tolist(), delta) == ([[0, 1, 2, 3]] * 3, 0)


@pytest.mark.parametrize("length", [2, 4, 7])
def test_given_positions_go_on_after_their_highest(length: int) -> None:
    prompt = np.array([[0, 1, 1, 5], [0, 1, 2, 5], [0, 1, 3, 5]], np.int32)
    feeder = make()
    feeder.open("a", handoff([], text=[1] * 4, codec=[NO_CODEC] * 4, positions=prompt.tobytes()), GREEDY)
    positions, delta = feeder.positions("a", length)
    expected = np.concatenate([prompt, np.broadcast_to(np.arange(6, 9), (3, 3))], axis=1)[:, :length]
    assert positions.tolist() == expected.tolist()
    assert positions.dtype == torch.int64
    assert delta == 2  # position p of the request has rope position p + delta


@given(st.integers(0, 6), st.integers(0, 4))
def test_a_request_taken_over_has_the_rows_of_the_one_that_was_lost(made: int, more: int) -> None:
    track, frames = list(range(8)), [(code % EOS, code + 2) for code in range(made + more)]
    lost, other = make(), make()
    spoken(track, frames, lost)
    history = lost._requests["a"].history[:made].tolist()
    other.open("b", handoff(track, frames=history), GREEDY)
    other.extend("b", {}, hidden_rows(3))
    for code, hidden in frames[made:]:
        sample(other, "b", code, hidden)
    length = len(PROMPT) + made + more
    assert torch.equal(other.rows([Span("b", 0, length)]), lost.rows([Span("a", 0, length)]))
