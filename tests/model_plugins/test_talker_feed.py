"""Input embeddings of the talker depend on the request's own history only, in any split."""

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

from vllm_omni_ext.engine.input_provider import Span
from vllm_omni_ext.model_plugins.qwen3_omni.prompt import MULTIMODAL, NO_CODEC, TalkerChunk, TalkerPrompt
from vllm_omni_ext.model_plugins.qwen3_omni.talker_feed import FIRST_FRAMES, TalkerInputProvider

HIDDEN, VOCAB, CODES, GROUPS, EOS, FILL = 3, 20, 10, 4, 9, 19
PROMPT = [1, 2, MULTIMODAL, 3, MULTIMODAL, MULTIMODAL, 4]
CODEC = [NO_CODEC] * 5 + [6, 7]
GREEDY = SimpleNamespace(temperature=0.0, seed=None)


class Weights:
    """Random tables; the predictor's codes are a function of its inputs."""

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


def make() -> TalkerInputProvider:
    return TalkerInputProvider(WEIGHTS, device=torch.device("cpu"))


def payload(track: list[int], text: list[int] = PROMPT, codec: list[int] = CODEC, **more: Any) -> TalkerPrompt:
    return TalkerPrompt(text=text, codec=codec, fill=FILL, track=track, **more)


def open_(provider: TalkerInputProvider, req_id: str, given_: TalkerPrompt, params: Any = GREEDY) -> None:
    spans = [(p, p + 1) for p, token in enumerate(given_.text) if token == MULTIMODAL]
    provider.open(req_id, given_, spans, params)


def hidden_rows(count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, 5, generator=torch.Generator().manual_seed(seed))


def sample(input_provider: TalkerInputProvider, req_id: str, code: int, hidden: int) -> Tensor | None:
    return input_provider.sampled([req_id], [[code]], torch.full((1, 2), float(hidden)))[0]


def spoken(
    track: list[int], frames: list[tuple[int, int]], input_provider: TalkerInputProvider, req_id: str = "a"
) -> None:
    """A request with its hidden states and frames (first code, hidden value)."""
    open_(input_provider, req_id, payload(track[:1]))
    for entry in track[1:]:
        input_provider.extend(req_id, TalkerChunk(track=(entry,)))
    for row in hidden_rows(3).split(2):  # they come in pieces
        input_provider.add_hidden_states(req_id, row)
    for code, hidden in frames:
        sample(input_provider, req_id, code, hidden)


def by_hand(track: list[int], frames: list[tuple[int, int]]) -> Tensor:
    """All input embeddings of that request, by position."""
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
@given(st.permutations(["a", "b", "c"]), st.data())
def test_rows_depend_on_their_own_request_and_not_on_the_split_into_spans(order: list[str], data: Any) -> None:
    input_provider, wholes = make(), dict[str, Tensor]()
    for name in ("a", "b", "c"):
        track, frames = data.draw(tracks), data.draw(codes)
        spoken(track, frames, input_provider, name)
        wholes[name] = by_hand(track, frames)
    spans = []
    for name in order:
        length = len(wholes[name])
        marks = sorted(data.draw(st.sets(st.integers(1, length - 1))) | {0, length})
        spans += [Span(name, a, b - a) for a, b in itertools.pairwise(marks)]
    joined = torch.cat([wholes[name] for name in order])
    torch.testing.assert_close(input_provider.rows(spans), joined)
    torch.testing.assert_close(torch.cat([input_provider.rows([span]) for span in spans]), joined)
    whole = [Span(name, 0, len(wholes[name])) for name in order]
    torch.testing.assert_close(input_provider.rows(whole), joined)


def test_opening_again_after_a_preemption_keeps_the_history() -> None:
    input_provider, frames = make(), [(1, 2), (3, 4)]
    spoken([5], frames, input_provider)
    input_provider.extend("a", TalkerChunk(track=(6,)))
    open_(input_provider, "a", payload([5]))
    assert len(input_provider) == 1
    torch.testing.assert_close(input_provider.rows([Span("a", 0, 9)]), by_hand([5, 6], frames))


def test_a_history_grows_with_its_reply() -> None:
    input_provider, frames = make(), [(step % EOS, step % 40) for step in range(3 * FIRST_FRAMES)]
    spoken([], frames, input_provider)
    assert input_provider._requests["a"].history.shape == (4 * FIRST_FRAMES, GROUPS)
    whole = by_hand([], frames)
    torch.testing.assert_close(input_provider.rows([Span("a", 0, len(whole))]), whole)


def test_a_closed_request_is_freed() -> None:
    input_provider = make()
    spoken([5], [(1, 2)], input_provider)
    input_provider.close("a")
    input_provider.close("a")
    assert len(input_provider) == 0
    with pytest.raises(KeyError):
        input_provider.rows([Span("a", 0, 1)])
    spoken([6], [(3, 4)], input_provider)  # the same id again
    torch.testing.assert_close(input_provider.rows([Span("a", 0, 8)]), by_hand([6], [(3, 4)]))


def test_frames_are_complete_and_the_end_has_none() -> None:
    input_provider = make()
    for name in "abcd":
        spoken([], [], input_provider, name)
    hidden = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    made = input_provider.sampled(list("abcd"), [[4], [EOS], [], [5]], hidden)
    frames = [None if frame is None else frame.tolist() for frame in made]
    assert frames == [[[4, 0, 1, 2]], None, None, [[5, 3, 4, 5]]]
    assert made[0] is not None and made[0].dtype == torch.int32
    assert len(WEIGHTS.draws) == 2
    assert input_provider.sampled(["b"], [[EOS]], hidden[:1]) == [None]
    sample(input_provider, "c", 8, 1)  # "b" and "c" have no frame yet: their next one is their first
    torch.testing.assert_close(input_provider.rows([Span("c", 7, 1)]), _row(8, [2, 3, 4])[None])


def _row(first: int, rest: list[int]) -> Tensor:
    total = WEIGHTS.text_table[FILL] + WEIGHTS.codec_table[first]
    return total + sum(table[code] for table, code in zip(WEIGHTS.tables, rest, strict=True))


@pytest.mark.parametrize(
    ("sampling", "greedy", "seed"),
    [({"temperature": 0.0, "seed": 3}, True, 3), ({"temperature": 0.9, "seed": None}, False, None)],
)
def test_residual_codes_use_the_requests_sampling(sampling: Any, greedy: bool, seed: int | None) -> None:
    input_provider = make()
    open_(input_provider, "a", payload([], text=[1], codec=[NO_CODEC]), SimpleNamespace(**sampling))
    sample(input_provider, "a", 1, 1)
    (draw,) = WEIGHTS.draws
    assert draw.greedy is greedy
    assert (None if draw.generator is None else draw.generator.initial_seed()) == seed
    before = draw.generator
    sample(input_provider, "a", 1, 1)
    assert WEIGHTS.draws[0].generator is before  # one stream of numbers for the whole request


@pytest.mark.parametrize("length", [2, 4, 7])
def test_positions_go_on_after_the_highest_of_the_prompt(length: int) -> None:
    prompt = np.array([[0, 1, 1, 5], [0, 1, 2, 5], [0, 1, 3, 5]], np.int32)
    input_provider = make()
    open_(input_provider, "a", payload([], text=[1] * 4, codec=[NO_CODEC] * 4, positions=prompt.tobytes()))
    positions, delta = input_provider.positions("a", length)
    expected = np.concatenate([prompt, np.broadcast_to(np.arange(6, 9), (3, 3))], axis=1)[:, :length]
    assert positions.tolist() == expected.tolist()
    assert positions.dtype == torch.int64
    assert delta == 2  # position p of the request has rope position p + delta
    open_(input_provider, "text", payload([]))
    positions, delta = input_provider.positions("text", length)
    assert (positions.tolist(), delta) == ([list(range(length))] * 3, 0)


@given(st.integers(0, 6), st.integers(0, 4))
def test_a_request_taken_over_has_the_rows_of_the_one_that_was_lost(made: int, more: int) -> None:
    track, frames = list(range(8)), [(code % EOS, code + 2) for code in range(made + more)]
    lost, other = make(), make()
    spoken(track, frames, lost)
    history = lost._requests["a"].history[:made].tolist()
    open_(other, "b", payload(track, frames=history))
    other.add_hidden_states("b", hidden_rows(3))
    for code, hidden in frames[made:]:
        sample(other, "b", code, hidden)
    length = len(PROMPT) + made + more
    assert torch.equal(other.rows([Span("b", 0, length)]), lost.rows([Span("a", 0, length)]))
