"""The way of a spoken request: events in, actions out."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.talker_ids import AUDIO, HEADER, IDS, SYSTEM, turn, user
from vllm_omni_ext.connectors.chunks import ChunkSchedule
from vllm_omni_ext.connectors.codec_stream import MOST_NEW, FrameLog
from vllm_omni_ext.modalities.chunks import AudioChunk
from vllm_omni_ext.model_plugins.qwen3_omni.flow import (
    TALKER,
    THINKER,
    TOO_SHORT,
    HiddenStates,
    SpeechFlow,
    SpeechPlan,
)
from vllm_omni_ext.model_plugins.qwen3_omni.prompt import (
    TalkerChunk,
    TalkerPrompt,
    find_parts,
    prefix_keys,
    talker_prompt,
)
from vllm_omni_ext.model_plugins.qwen3_omni.voice import CODE2WAV
from vllm_omni_ext.plugins.flow import (
    Action,
    Emit,
    Extend,
    Fail,
    Finish,
    Finished,
    Flow,
    Forward,
    Open,
    Produced,
    Recompute,
    Submit,
)
from vllm_omni_ext.wire.envelope import HiddenStatesChunkReady, StageError
from vllm_omni_ext.wire.stage_input import HiddenStatesRef

TEXT = turn(SYSTEM, 30) + user(20, 21) + HEADER
HEARD = user(20, AUDIO, AUDIO, AUDIO, 21, AUDIO) + HEADER
ONCE, EACH = ChunkSchedule(), ChunkSchedule((1,))
schedules = st.lists(st.integers(0, 4), min_size=1, max_size=3).map(lambda sizes: ChunkSchedule(tuple(sizes)))


def flow_for(
    prompt: list[int], *, text: ChunkSchedule = ONCE, frames: ChunkSchedule = ONCE, positions: bytes | None = None
) -> SpeechFlow:
    parts = find_parts(prompt, IDS)
    assert parts is not None
    speech = SpeechPlan(prompt=prompt, parts=parts, voice="ethan", ids=IDS, sample_rate=24_000, positions=positions)
    return SpeechFlow(speech, text=text, frames=frames)


def thought(*tokens: int, ready: Any = None, finish: Finish | None = None) -> Produced:
    return Produced(THINKER, tokens, ready, finish)


def said(*frames: tuple[int, ...], finish: Finish | None = None) -> Produced:
    return Produced(TALKER, (1,), torch.tensor(frames, dtype=torch.int32) if frames else None, finish)


def sounded(part: int, samples: Any) -> Produced:
    return Produced(CODE2WAV, payload=samples, finish="stop", part=part)


def feed(flow: SpeechFlow, *events: Produced) -> list[Action]:
    return [action for event in events for action in flow.handle(event)]


def extend(*track: int, text: tuple[int, ...] = (), last: bool = False) -> Extend:
    payload = TalkerChunk(text=text, track=track)
    return Extend(stage=TALKER, payload=payload, last=last, prompt_positions=len(text), step_inputs=len(track))


def begun(flow: SpeechFlow) -> list[Action]:
    """The first actions of the flow, without the forwarded request."""
    first, *rest = flow.begin()
    assert first == Forward(THINKER)
    return rest


def of_talker(action: Action) -> TalkerPrompt:
    """The payload that opens the talker; the action has the right counts of its input."""
    assert isinstance(action, Open) and isinstance(action.payload, TalkerPrompt)
    payload = action.payload
    assert (action.prompt_positions, action.step_inputs) == (len(payload.text), len(payload.track))
    assert len(action.prompt) == len(payload.codec) + action.done and action.done == len(payload.frames)
    return payload


def track_of(action: Action) -> list[int]:
    """All text ids that are spoken."""
    payload = of_talker(action)
    return [payload.text[-1], *payload.track]


def talking(**schedules: ChunkSchedule) -> SpeechFlow:
    """A flow whose talker has its whole input."""
    flow = flow_for(TEXT, **schedules)
    feed(flow, thought(40), thought(9, finish="stop"))
    return flow


def test_a_reply_in_one_piece() -> None:
    flow = flow_for(TEXT)
    assert feed(flow, thought(40), thought(41, 42)) == []
    (opened,) = feed(flow, thought(9, finish="stop"))
    parts = find_parts(TEXT, IDS)
    assert parts is not None
    text, codec = talker_prompt(TEXT, parts, "ethan", IDS)
    payload = TalkerPrompt(text=[*text, 40], codec=codec, fill=IDS.tts_pad, track=[41, 42, IDS.tts_eos])
    assert opened == Open(
        stage=TALKER,
        prompt=[IDS.codec_pad] * len(codec),
        payload=payload,
        prompt_positions=len(codec),
        step_inputs=3,
        hidden_spans=[],
        prefix_keys=prefix_keys(TEXT, parts, text, codec),
        stop=(IDS.codec_eos,),
    )
    assert feed(flow, said((1, 2)), said((3, 4))) == []
    (decode,) = feed(flow, said(finish="stop"))
    assert decode == Submit(stage=CODE2WAV, prompt=[1, 2, 3, 4], pooling_task="token_embed")
    sound = torch.ones(5, 1)
    emit, end = feed(flow, sounded(0, sound))
    assert end == Finished()
    assert (emit.chunk.samples.tolist(), emit.chunk.samples.dtype) == ([1.0] * 5, np.float32)
    assert (emit.chunk.last, emit.chunk.sample_rate, emit.chunk.note) == (True, 24_000, None)
    assert emit.chunk.frames.tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("last", "finish"), [((9,), "stop"), ((43,), "length"), ((43,), "repetition"), ((), "stop")], ids=str
)
def test_the_end_mark_takes_the_place_of_the_last_token(last: tuple[int, ...], finish: Finish) -> None:
    (opened,) = feed(flow_for(TEXT), thought(40, 41), thought(*last, finish=finish))
    assert track_of(opened) == [40, 41, IDS.tts_eos]


def test_text_goes_out_as_soon_as_a_chunk_is_full() -> None:
    flow = flow_for(TEXT, text=ChunkSchedule((2, 1)))
    assert feed(flow, thought(40)) == []
    (opened,) = feed(flow, thought(41))
    assert (track_of(opened), opened.last) == ([40, 41], False)
    assert feed(flow, thought(42)) == [extend(42)]
    assert feed(flow, thought(9, finish="stop")) == [extend(IDS.tts_eos, last=True)]


def notice(first: int, count: int, source: str = "A", failed: str = "") -> HiddenStatesChunkReady:
    return HiddenStatesChunkReady(source=source, name=f"{source}/r", first=first, count=count, failed=failed)


def ref(count: int, source: str = "A") -> HiddenStatesRef:
    return HiddenStatesRef(source=source, name=f"{source}/r", count=count)


def location(count: int, source: str = "A", *, last: bool = False) -> Extend:
    """The message to the talker about the location of hidden states."""
    return Extend(stage=TALKER, last=last, hidden_states=ref(count, source))


def exported(pieces: list[tuple[int, int]], source: str = "A") -> list[Produced]:
    return [thought(ready=notice(first, stop - first, source)) for first, stop in pieces]


@pytest.mark.parametrize("text", [ONCE, EACH], ids=str)
@pytest.mark.parametrize("stops", [[], [3], [1, 2], [4], [1, 3, 4]], ids=str)
def test_the_talker_gets_all_hidden_states_or_the_request_fails(stops: list[int], text: ChunkSchedule) -> None:
    positions = np.zeros((3, 20), np.int32).tobytes()
    flow = flow_for(HEARD, text=text, positions=positions)
    assert feed(flow, *exported(list(pairwise([0, *stops])))) == []
    first, *_ = feed(flow, thought(40), thought(41), thought(9, finish="stop"))
    if (got := max(stops, default=0)) < 4:
        assert first == Fail(f"the thinker handed over {got} of 4 hidden states of multimodal positions")
        return
    assert first.hidden_states == ref(4)
    assert (first.hidden_spans, of_talker(first).positions) == ([(4, 7), (8, 9)], positions)


@pytest.mark.parametrize(
    ("chunk", "reason"),
    [
        (notice(1, 1), "hidden states 2 to 1 are missing"),
        (notice(3, 1), "hidden states 2 to 3 are missing"),
        (notice(0, 0, failed="no room"), "could not hand its hidden states over: no room"),
    ],
    ids=["repeat", "gap", "failed export"],
)
def test_hidden_states_with_a_gap_a_repeat_or_a_failed_export_are_an_error(
    chunk: HiddenStatesChunkReady, reason: str
) -> None:
    hidden = HiddenStates(4)
    hidden.add(notice(0, 2))
    with pytest.raises(ValueError, match=reason):
        hidden.add(chunk)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6), st.booleans()), max_size=20))
def test_a_location_is_returned_with_all_that_precede_it(events: list[tuple[int, int, bool]]) -> None:
    """Each event: a location, its first hidden state if it is new, and whether the best location is lost instead."""
    hidden, stored = HiddenStates(99), dict[str, tuple[int, int]]()
    gone = set[str]()
    for number, start, lose in events:
        name = "ABCD"[number]
        if lose and (found := hidden.ref) is not None:
            hidden.lose(found)
            gone |= {each.source for each, _ in found.places()}
        elif name not in gone:
            begin, end = stored.get(name, (start, start))
            hidden.add(HiddenStatesChunkReady(source=name, name="r", first=end, count=1, start=begin))
            stored[name] = begin, end + 1
        left = {name: at for name, at in stored.items() if name not in gone}
        reached = 0
        while (further := max((end for begin, end in left.values() if begin <= reached), default=0)) > reached:
            reached = further
        assert hidden.count == reached
        if (best := hidden.ref) is not None:
            position = 0
            for each, end in best.places():
                begin, stop = left[each.source]
                assert begin == each.start <= position < end <= stop
                position = end
            assert position == best.count


def lost(reason: str = "it is gone") -> Produced:
    return Produced(TALKER, (), StageError(reason), "error")


def test_lost_hidden_states_are_computed_again_a_few_times() -> None:
    flow = flow_for(HEARD, text=EACH)
    feed(flow, thought(40, ready=notice(0, 4)), thought(9, finish="stop"))
    for source in "BCD":
        opened, again = feed(flow, lost())
        assert again == Recompute(THINKER)
        assert isinstance(opened, Open) and opened.hidden_states is None
        for first, count in ((0, 1), (1, 3)):
            assert feed(flow, thought(ready=notice(first, count, source))) == [
                location(first + count, source, last=True)
            ]
    assert feed(flow, lost()) == [Fail("the talker could not take the thinker's hidden states: it is gone")]


def test_an_incomplete_copy_does_not_prevent_recomputation() -> None:
    """It may have been lost, too: the hidden states are computed again, and the most complete copy is used."""
    flow = flow_for(HEARD, text=EACH)
    feed(flow, thought(40, ready=notice(0, 4)), *exported([(0, 2)], "B"))
    opened, again = feed(flow, lost())
    assert again == Recompute(THINKER)
    assert opened.hidden_states == ref(2, "B") and of_talker(opened).track == []
    assert feed(flow, *exported([(0, 2)], "C")) == []
    assert feed(flow, *exported([(2, 3)], "C")) == [location(3, "C")]
    assert feed(flow, *exported([(4, 4)], "A")) == [], "a lost copy is not used again"
    more, token = feed(flow, thought(41, ready=notice(3, 1, "C")))
    assert more == location(4, "C")
    assert token == extend(41)


def test_each_chunk_of_hidden_states_goes_to_a_talker_that_computes_ahead() -> None:
    flow = flow_for(HEARD, text=EACH)
    (opened,) = begun(flow)
    assert opened.hidden_states is None
    first, second = feed(flow, *exported([(0, 1), (1, 4)]))
    assert first == location(1)
    assert second == location(4)
    assert feed(flow, thought(40)) == [extend(text=(40,))]


@pytest.mark.parametrize("codec", [ONCE, EACH], ids=str)
def test_a_talker_that_ends_at_once_has_no_sound_and_a_note(codec: ChunkSchedule) -> None:
    emit, end = feed(talking(frames=codec), said(finish="stop"))
    assert end == Finished()
    assert (len(emit.chunk.samples), len(emit.chunk.frames)) == (0, 0)
    assert "before its first frame" in emit.chunk.note


def test_the_frame_of_the_talkers_last_step_is_left_out() -> None:
    (decode,) = feed(talking(), said((1, 2)), said((3, 4), finish="length"))
    assert decode.prompt == [1, 2]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (sounded(0, None), "there are no samples for the frames"),
        (sounded(0, torch.zeros(0)), "there are no samples for the frames"),
        (sounded(0, StageError("part 2 came where 1 was due")), "part 2 came where 1 was due"),
        (sounded(1, torch.ones(2)), "part 1 was answered where 0 was expected"),
        (replace(sounded(0, torch.ones(2)), part=None), "part None was answered where 0 was expected"),
    ],
    ids=["none", "empty", "refusal", "out of order", "no part"],
)
def test_a_wrong_answer_of_code2wav_fails_the_request(answer: Produced, reason: str) -> None:
    (fail,) = feed(talking(frames=EACH), said((1, 2)), said((3, 4)), answer)[2:]
    assert fail == Fail(f"code2wav could not decode the frames: {reason}")


@pytest.mark.parametrize("finish", ["abort", "error"])
@pytest.mark.parametrize("stage", [THINKER, TALKER, CODE2WAV])
def test_a_stage_that_aborts_or_fails_fails_the_request(stage: str, finish: Finish) -> None:
    flow = flow_for(TEXT)
    feed(flow, thought(40))
    (fail,) = feed(flow, Produced(stage, (41,), None, finish))
    assert fail == Fail(f"the {stage} stage ended the request: {finish}")


# -- any schedule, any order, any loss ---------------------------------------------------------------

SAMPLES_A_FRAME = 3
LOOK_AHEAD = 1


class Replicas:
    """A thinker, a talker and a code2wav with given replies, which forget everything when they are lost.

    code2wav makes 3 samples a frame, the last one only with the next frame: sample n is n.
    """

    def __init__(self, flow: Flow, steps: list[list[int]], frames: list[tuple[int, int]]) -> None:
        self.flow, self.steps, self.frames = flow, steps, frames
        self.thought = self.said = 0
        self.track: list[int] | None = None
        self.track_closed = self.parts_closed = False
        self.parts: list[Submit] = []
        self.parts_in = self.samples_out = 0
        self.codes: list[int] = []
        self.heard: list[float] = []
        self.chunk: AudioChunk | None = None
        self.finished = False
        self.do(flow.begin())

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            assert not self.finished
            match action:
                case Forward():
                    assert self.thought == 0
                case Open(last=last):
                    payload = of_talker(action)
                    known = len(payload.text) == len(payload.codec)
                    self.track = [payload.text[-1], *payload.track] if known else []
                    self.track_closed = last
                    assert [tuple(frame) for frame in payload.frames] == self.frames[: self.said]
                case Extend(payload=TalkerChunk(text=text, track=track), last=last):
                    assert self.track is not None and not self.track_closed
                    assert bool(text) == (not self.track)
                    assert (action.prompt_positions, action.step_inputs) == (len(text), len(track))
                    self.track += [*text, *track]
                    self.track_closed = last
                case Submit(part=part, last=last):
                    assert part == 0 or not self.parts_closed
                    self.parts.append(action)
                    self.parts_closed = last
                case Emit(AudioChunk() as chunk):
                    assert self.chunk is None or not self.chunk.last
                    self.heard += chunk.samples.tolist()
                    assert chunk.frames is not None
                    assert [tuple(each) for each in chunk.frames.tolist()] == self.frames[: len(chunk.frames)]
                    assert len(self.heard) == max(0, len(chunk.frames) * SAMPLES_A_FRAME - LOOK_AHEAD)
                    self.chunk = chunk
                case Finished():
                    self.finished = True
                case _:
                    raise AssertionError(action)

    def think(self) -> bool:
        """One step of the thinker; False if it or the flow has ended."""
        if self.finished or self.thought == len(self.steps):
            return False
        self.thought += 1
        finish: Finish | None = "stop" if self.thought == len(self.steps) else None
        self.do(self.flow.handle(thought(*self.steps[self.thought - 1], finish=finish)))
        return True

    def talk(self) -> bool:
        """One step of the talker; False if its input is missing or it has ended."""
        if self.finished or self.track is None or self.said > len(self.frames):
            return False
        if not self.track_closed and self.said >= len(self.track):
            return False
        done = self.said == len(self.frames)
        self.do(self.flow.handle(said(finish="stop") if done else said(self.frames[self.said])))
        self.said += 1
        return True

    def sound(self) -> bool:
        """One step of code2wav; False if there is nothing to do."""
        if not self.parts:
            return False
        part = self.parts.pop(0)
        if part.part == 0:
            self.parts_in, self.samples_out, self.codes = 0, 0, []
        assert part.part == self.parts_in
        self.parts_in += 1
        self.codes += part.prompt
        assert self.codes == [code for frame in self.frames for code in frame][: len(self.codes)]
        stop = max(0, len(self.codes) // 2 * SAMPLES_A_FRAME - LOOK_AHEAD)
        samples = torch.arange(self.samples_out, stop, dtype=torch.float32)
        self.samples_out = stop
        self.do(self.flow.handle(sounded(part.part, samples)))
        return True

    def lose(self, stage: str) -> None:
        if self.finished:
            return
        if stage == TALKER and self.track is not None and self.said <= len(self.frames):
            self.track = None
            self.do(self.flow.replay(TALKER))
        if stage == CODE2WAV and (self.parts or self.parts_in):
            self.parts.clear()
            self.do(self.flow.replay(CODE2WAV))

    def check(self, spoken: list[int]) -> None:
        assert self.finished and self.chunk is not None and self.chunk.last
        assert self.chunk.frames is not None
        if not spoken:
            assert (self.heard, len(self.chunk.frames), self.chunk.note) == ([], 0, TOO_SHORT)
            return
        whole = [*spoken, IDS.tts_eos]
        assert self.track is not None and self.parts_closed
        if self.thought == len(self.steps):  # the talker may end before the thinker
            assert self.track == whole and self.track_closed
        assert self.track == whole[: len(self.track)]
        assert self.heard == list(range(len(self.frames) * SAMPLES_A_FRAME - LOOK_AHEAD))
        assert len(self.chunk.frames) == len(self.frames)


ids = st.integers(40, 60)
codes = st.integers(0, 63)


@given(
    st.lists(ids, max_size=3),
    st.lists(st.lists(ids, max_size=3), min_size=1, max_size=6),
    st.lists(st.tuples(codes, codes), min_size=1, max_size=12),
    schedules,
    schedules,
    st.lists(st.sampled_from("tfsCT"), max_size=60),
    st.permutations("tfs"),
)
def test_any_schedule_any_order_and_any_losses_change_nothing(prefix, steps, frames, text, codec, moves, rest) -> None:
    """The prompt may have begun the spoken turn; steps have any number of tokens."""
    replicas = Replicas(flow_for([*TEXT, *prefix], text=text, frames=codec), steps, frames)
    stages = {
        "t": replicas.think,
        "f": replicas.talk,
        "s": replicas.sound,
        "C": lambda: replicas.lose(CODE2WAV),
        "T": lambda: replicas.lose(TALKER),
    }
    for move in moves:
        stages[move]()
    while any(stages[name]() for name in rest):
        pass
    tokens = [token for step in steps for token in step]
    replicas.check([*prefix, *(tokens[:-1] if steps[-1] else tokens)])


def test_chunks_shrink_when_the_client_has_little_left_to_play() -> None:
    """12.5 frames a second: half a second after the first four frames there is nothing left to wait for."""
    flow = talking(frames=ChunkSchedule((4, 25), rate=12.5))
    feed(flow, *(said((i, i)) for i in range(4)), replace(sounded(0, torch.ones(4)), at=100.0))
    frame = said((5, 5))
    assert flow.handle(replace(frame, at=100.05)) == []
    for part, at, codes in ((1, 100.1, [5, 5] * 2), (2, 100.5, [5, 5])):
        (submitted,) = flow.handle(replace(frame, at=at))
        assert (submitted.part, submitted.prompt) == (part, codes)


def test_parts_are_due_when_the_client_has_played_the_sound_before_them() -> None:
    flow = talking(frames=ChunkSchedule((1,), rate=12.5))

    def due(at: float) -> float:
        (part,) = flow.handle(replace(said((5, 5)), at=at))
        return part.due

    assert [due(50.0), due(50.01)] == [50.0, pytest.approx(50.08)]
    flow.handle(replace(sounded(0, torch.ones(1365)), at=50.2))
    assert due(50.21) == pytest.approx(50.2 + 1365 / 24_000 + 0.08)
    (again,) = flow.replay(CODE2WAV)
    assert again.due == pytest.approx(50.2 + 1365 / 24_000), "a replica that was lost makes the listener wait"
    assert due(50.22) >= again.due


@pytest.mark.parametrize(
    ("load", "rate", "frames"), [(1.0, 12.5, [1, 1]), (1.5, 12.5, [2, 1]), (9.0, 12.5, [2, 1]), (9.0, 0.0, [1, 1])]
)
def test_with_other_requests_the_first_part_has_two_frames(load: float, rate: float, frames: list[int]) -> None:
    flow = talking(frames=ChunkSchedule((1,), rate=rate))
    frame = replace(said((5, 5)), at=50.0, load=load)
    parts = feed(flow, frame, frame, frame)
    assert [len(part.prompt) // 2 for part in parts][:2] == frames


def test_with_other_requests_an_answer_of_one_frame_is_still_sent() -> None:
    flow = talking(frames=ChunkSchedule((1,), rate=12.5))
    assert flow.handle(replace(said((5, 5)), load=2.0)) == []
    (part,) = flow.handle(replace(said(finish="stop"), load=2.0))
    assert part.prompt == [5, 5] and part.last


@pytest.mark.parametrize(("rate", "most"), [(0.0, 101), (12.5, 40)], ids=["sizes alone", "adaptive"])
def test_the_talker_gets_text_in_fewer_chunks_while_it_has_enough(rate: float, most: int) -> None:
    """The talker makes a frame for every second token; then it makes frames until it has used all text it has."""
    flow = flow_for(TEXT, text=EACH, frames=ChunkSchedule((25,), rate))
    begun(flow)
    chunks: list[list[int]] = []
    frames = 0

    def take(*events: Produced) -> None:
        for action in feed(flow, *events):
            if isinstance(action, Extend):
                chunks.append([*action.payload.text, *action.payload.track])  # type: ignore[union-attr]

    for number in range(100):
        take(thought(40 + number))
        if number % 2:
            take(said((5, 6)))
            frames += 1
    while frames < sum(map(len, chunks)):
        take(said((5, 6)))
        frames += 1
    assert [token for chunk in chunks for token in chunk] == list(range(40, 140))
    assert len(chunks) <= most


def test_without_a_rate_parts_have_no_time() -> None:
    (part,) = feed(talking(frames=EACH), said((1, 2)))
    assert isinstance(part, Submit) and part.due is None


# -- frames of a reply ---------------------------------------------------------------------------------

GROUPS = 3
CALLS = st.lists(st.tuples(st.sampled_from(["add", "between"]), st.integers(0, 40), st.floats(0, 1)), max_size=60)


@pytest.mark.parametrize("tensor", [True, False])
@given(calls=CALLS)
def test_frames_are_those_that_were_added(calls: list[tuple[str, int, float]], tensor: bool) -> None:
    log, added = FrameLog(), list[list[int]]()
    views = []
    for call, count, where in calls:
        if call == "add":
            new = [[len(added) + row, row, -1] for row in range(count)]
            rows = np.array(new, np.int64).reshape(-1, GROUPS)
            log.add(torch.from_numpy(rows) if tensor else rows)
            added += new
        else:
            start = int(where * len(added))
            stop = min(len(added), start + count)
            views.append((start, stop, log.between(start, stop)))
        assert log.count == len(added)
    for start, stop, view in views:  # later frames have not changed earlier views
        assert view.tolist() == added[start:stop]


@pytest.mark.parametrize("read", [False, True], ids=["no part needs them", "each is a part"])
def test_frames_are_stored_from_time_to_time(read: bool) -> None:
    log = FrameLog()
    for number in range(3 * MOST_NEW + 1):
        log.add(torch.full((1, GROUPS), number))
        if read:
            assert log.between(number, number + 1).tolist() == [[number] * GROUPS]
        assert len(log._new) < MOST_NEW
    assert log.between(0, log.count).tolist() == [[number] * GROUPS for number in range(log.count)]
