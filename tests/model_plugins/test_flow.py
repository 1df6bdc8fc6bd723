"""The way of a spoken request: events in, actions out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.talker_ids import AUDIO, HEADER, IDS, SYSTEM, turn, user
from vllm_omni_ext.connectors.chunks import ALL, ChunkSchedule
from vllm_omni_ext.modalities.chunks import AudioChunk
from vllm_omni_ext.model_plugins.qwen3_omni.flow import (
    TALKER,
    THINKER,
    TOO_SHORT,
    HiddenStates,
    ReadAloudFlow,
    SpeechFlow,
    SpeechPlan,
)
from vllm_omni_ext.model_plugins.qwen3_omni.payloads import TalkerChunk, TalkerPrompt
from vllm_omni_ext.model_plugins.qwen3_omni.prompt import find_parts, talker_prompt
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
    """What the flow does at once beside forwarding the request."""
    first, *rest = flow.begin()
    assert first == Forward(THINKER)
    return rest


def of_talker(action: Action) -> TalkerPrompt:
    """The payload that opens the talker; what is said of its input beside it is true."""
    assert isinstance(action, Open) and isinstance(action.payload, TalkerPrompt)
    payload = action.payload
    assert (action.prompt_positions, action.step_inputs) == (len(payload.text), len(payload.track))
    assert len(action.prompt) == len(payload.codec) + action.done and action.done == len(payload.frames)
    return payload


def track_of(action: Action) -> list[int]:
    """All text ids that are spoken."""
    payload = of_talker(action)
    return [payload.text[-1], *payload.track]


@dataclass
class Stages:
    """Takes down what the stages behind the thinker receive."""

    text: list[int] = field(default_factory=list)
    closed: list[bool] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    spoken: list[bool] = field(default_factory=list)
    opened: list[str] = field(default_factory=list)
    rest: list[Action] = field(default_factory=list)

    def take(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Open(stage="talker", last=last):
                    self.opened.append(TALKER)
                    payload = of_talker(action)
                    known = len(payload.text) == len(payload.codec)
                    self.text += [*payload.text[-1:], *payload.track] if known else []
                    self.closed.append(last)
                case Extend(stage="talker", payload=TalkerChunk(text=text, track=track), last=last):
                    assert self.opened[:1] == [TALKER]
                    assert bool(text) == (self.text == [])
                    assert (action.prompt_positions, action.step_inputs) == (len(text), len(track))
                    self.text += [*text, *track]
                    self.closed.append(last)
                case Submit(stage="code2wav", part=part, prompt=prompt, last=last):
                    assert part == self.opened.count(CODE2WAV)
                    self.opened.append(CODE2WAV)
                    self.codes += prompt
                    self.spoken.append(last)
                case _:
                    self.rest.append(action)


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


@pytest.mark.parametrize("finish", ["stop", "length", "repetition"])
@pytest.mark.parametrize("last", [9, 43], ids=["end token", "any token"])
def test_the_end_mark_takes_the_place_of_the_last_token(finish: Finish, last: int) -> None:
    (opened,) = feed(flow_for(TEXT), thought(40, 41), thought(last, finish=finish))
    assert track_of(opened) == [40, 41, IDS.tts_eos]


def test_an_end_without_a_token_takes_no_token_away() -> None:
    (opened,) = feed(flow_for(TEXT), thought(40, 41), thought(finish="stop"))
    assert track_of(opened) == [40, 41, IDS.tts_eos]


@pytest.mark.parametrize("text", [ONCE, EACH, ChunkSchedule((4,))], ids=str)
def test_a_reply_of_one_token_has_no_sound_and_a_note(text: ChunkSchedule) -> None:
    emit, end = feed(flow_for(TEXT, text=text), thought(9, finish="stop"))
    assert end == Finished()
    chunk = emit.chunk
    assert (len(chunk.samples), chunk.last, chunk.note, len(chunk.frames)) == (0, True, TOO_SHORT, 0)


@pytest.mark.parametrize("text", [ONCE, EACH], ids=str)
def test_a_turn_that_the_prompt_has_begun_is_spoken_too(text: ChunkSchedule) -> None:
    stages, flow = Stages(), flow_for([*TEXT, 50, 51], text=text)
    stages.take(feed(flow, thought(9, finish="length")))
    assert stages.text == [50, 51, IDS.tts_eos]
    stages, flow = Stages(), flow_for([*TEXT, 50, 51], text=text)
    stages.take(feed(flow, thought(finish="stop")))
    assert stages.text == [50, 51, IDS.tts_eos]
    stages, flow = Stages(), flow_for([*TEXT, 50], text=text)
    stages.take(feed(flow, thought(40), thought(41), thought(9, finish="stop")))
    assert stages.text == [50, 40, 41, IDS.tts_eos]


@given(
    st.lists(st.integers(40, 60), max_size=3),
    st.lists(st.lists(st.integers(40, 60), min_size=1, max_size=3), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 63), st.integers(0, 63)), min_size=1, max_size=12),
    schedules,
    schedules,
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_schedules_change_nothing_of_what_arrives(prefix, steps, frames, text, codec, ahead, random) -> None:
    """Any schedules, any order of the two stages' events; the talker may be opened with the request."""
    flow, stages = flow_for([*TEXT, *prefix], text=text, frames=codec), Stages()
    stages.take(begun(flow) if ahead else [])
    thoughts = [thought(*step, finish="stop" if i == len(steps) - 1 else None) for i, step in enumerate(steps)]
    talk = [*(said(frame) for frame in frames), said(finish="stop")]
    while thoughts or (talk and stages.text):
        if thoughts and not (stages.text and talk and random.random() < 0.5):
            stages.take(flow.handle(thoughts.pop(0)))
        else:
            stages.take(flow.handle(talk.pop(0)))
    spoken = [*prefix, *(token for step in steps for token in step)][:-1]
    if not spoken:
        assert [type(action) for action in stages.rest] == [Emit, Finished]
        return
    assert stages.text == [*spoken, IDS.tts_eos]
    assert stages.closed == [False] * (len(stages.closed) - 1) + [True]
    assert stages.codes == [code for frame in frames for code in frame]
    assert stages.spoken == [False] * (len(stages.spoken) - 1) + [True]
    assert stages.opened[0] == TALKER
    assert TALKER not in stages.opened[1:]
    assert stages.rest == []
    if text.sizes[0] == ALL:
        assert len(stages.closed) == 1
    if codec.sizes[0] == ALL:
        assert stages.opened == [TALKER, CODE2WAV]


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


@pytest.mark.parametrize("pieces", [[(0, 4)], [(0, 1), (1, 3), (3, 4)]], ids=str)
@pytest.mark.parametrize("prefix", [[], [50, 51]], ids=["", "begun"])
@pytest.mark.parametrize("text", [ONCE, EACH], ids=str)
def test_hidden_states_arrive_in_chunks(pieces: list[tuple[int, int]], prefix: list[int], text: ChunkSchedule) -> None:
    flow = flow_for([*HEARD, *prefix], text=text, positions=b"xyz")
    assert feed(flow, *exported(pieces)) == []
    opened, *_ = feed(flow, thought(40), thought(41), thought(9, finish="stop"))
    assert opened.hidden_states == ref(4)
    assert (opened.hidden_spans, of_talker(opened).positions) == ([(4, 7), (8, 9)], b"xyz")


def test_hidden_states_may_come_with_the_first_token() -> None:
    flow = flow_for(HEARD, text=EACH)
    (opened,) = feed(flow, thought(40, ready=notice(0, 4)))
    assert opened.hidden_states == ref(4)


@pytest.mark.parametrize(("pieces", "got"), [([], 0), ([(0, 3)], 3), ([(0, 1), (1, 2)], 2)], ids=str)
def test_missing_hidden_states_fail_the_request(pieces: list[tuple[int, int]], got: int) -> None:
    flow = flow_for(HEARD)
    (fail,) = feed(flow, *exported(pieces), thought(40, 41), thought(9, finish="stop"))
    assert fail == Fail(f"the thinker handed over {got} of 4 hidden states of multimodal positions")


@pytest.mark.parametrize("first", [1, 3])
def test_a_gap_or_a_repeat_in_the_hidden_states_is_an_error(first: int) -> None:
    hidden = HiddenStates(4)
    hidden.add(notice(0, 2))
    with pytest.raises(ValueError, match=f"hidden states 2 to {first} are missing"):
        hidden.add(notice(first, 1))


def test_hidden_states_that_could_not_be_put_are_an_error() -> None:
    with pytest.raises(ValueError, match="could not hand its hidden states over: no room"):
        HiddenStates(4).add(notice(0, 0, failed="no room"))


def test_a_thinker_that_takes_over_exports_again() -> None:
    """The first copy is used until the second one has as many."""
    flow = flow_for(HEARD, text=EACH)
    assert feed(flow, *exported([(0, 3)]), *exported([(0, 2)], "B")) == []
    assert feed(flow, *exported([(2, 4)], "B")) == []
    (opened,) = feed(flow, thought(40))
    assert opened.hidden_states == ref(4, "B")


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


def test_a_talker_starts_again_with_the_hidden_states_of_another_thinker() -> None:
    flow = flow_for(HEARD, text=EACH)
    feed(flow, *exported([(0, 4)], "A"), thought(40), *exported([(0, 4)], "B"))
    (opened,) = feed(flow, lost())
    assert opened.hidden_states == ref(4, "B")


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


def test_tokens_of_the_thinker_are_used_during_recomputation() -> None:
    flow = flow_for(HEARD, text=EACH)
    flow.begin()
    feed(flow, *exported([(0, 2)]))
    _, again = feed(flow, lost())
    assert again == Recompute(THINKER)
    assert feed(flow, thought(40), thought(9, finish="stop")) == [
        extend(text=(40,)),
        extend(IDS.tts_eos, last=True),
    ]
    assert feed(flow, *exported([(0, 4)], "B")) == [location(4, "B", last=True)]


def test_a_replayed_talker_gets_the_location_of_its_hidden_states() -> None:
    flow = flow_for(HEARD, text=EACH)
    feed(flow, thought(40, ready=notice(0, 4)), *exported([(0, 4)], "B"))
    (opened,) = flow.replay(TALKER)
    assert opened.hidden_states == ref(4, "B")


@pytest.mark.parametrize("codec", [ONCE, EACH], ids=str)
def test_a_talker_that_ends_at_once_has_no_sound_and_a_note(codec: ChunkSchedule) -> None:
    flow = flow_for(TEXT, frames=codec)
    feed(flow, thought(40), thought(9, finish="stop"))
    emit, end = feed(flow, said(finish="stop"))
    assert end == Finished()
    assert (len(emit.chunk.samples), len(emit.chunk.frames)) == (0, 0)
    assert "before its first frame" in emit.chunk.note


def test_the_frame_of_the_talkers_last_step_is_left_out() -> None:
    flow = flow_for(TEXT)
    feed(flow, thought(40), thought(9, finish="stop"), said((1, 2)))
    (decode,) = feed(flow, said((3, 4), finish="length"))
    assert decode.prompt == [1, 2]


@pytest.mark.parametrize("payload", [None, torch.zeros(0)], ids=["none", "empty"])
def test_no_samples_for_frames_are_a_failure(payload: Any) -> None:
    flow = flow_for(TEXT)
    feed(flow, thought(40), thought(9, finish="stop"), said((1, 2)), said(finish="stop"))
    (fail,) = feed(flow, sounded(0, payload))
    assert fail == Fail("code2wav could not decode the frames: there are no samples for the frames")


@pytest.mark.parametrize("finish", ["abort", "error"])
@pytest.mark.parametrize("stage", [THINKER, TALKER, CODE2WAV])
def test_a_stage_that_gives_up_is_a_failure(stage: str, finish: Finish) -> None:
    flow = flow_for(TEXT)
    feed(flow, thought(40))
    (fail,) = feed(flow, Produced(stage, (41,), None, finish))
    assert fail == Fail(f"the {stage} stage ended the request: {finish}")


# -- any schedule, any order, any loss ---------------------------------------------------------------

REPLY = [41, 42, 43, 44]
FRAMES = [(i, 10 + i) for i in range(7)]
SAMPLES_A_FRAME = 3
LOOK_AHEAD = 1
CUTS = [ChunkSchedule(sizes) for sizes in ((ALL,), (1,), (2,), (1, 2, 4), (4, 25), (3, ALL))]


class Replicas:
    """A thinker, a talker and a code2wav that say what they would say, and forget everything when they are lost.

    code2wav makes 3 samples a frame, the last one only with the next frame: sample n is n.
    """

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.thought = self.said = 0
        self.track: list[int] | None = None
        self.track_closed = False
        self.parts: list[Submit] = []
        self.frames_in = self.samples_out = 0
        self.heard: list[float] = []
        self.frames: list[list[int]] = []
        self.ends = 0
        self.finished = False
        self.do(flow.begin())

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Forward():
                    assert self.thought == 0
                case Open(last=last):
                    payload = of_talker(action)
                    known = len(payload.text) == len(payload.codec)
                    self.track = [payload.text[-1], *payload.track] if known else []
                    self.track_closed = last
                    assert [tuple(frame) for frame in payload.frames] == FRAMES[: self.said]
                    assert action.done == self.said
                case Extend(payload=TalkerChunk(text=text, track=track), last=last):
                    assert self.track is not None and not self.track_closed
                    assert bool(text) == (not self.track)
                    self.track += [*text, *track]
                    self.track_closed = last
                case Submit():
                    self.parts.append(action)
                case Emit(AudioChunk(samples=samples, frames=frames, last=last)):
                    self.heard += samples.tolist()
                    assert frames is not None
                    self.frames = frames.tolist()
                    self.ends += last
                case Finished():
                    self.finished = True
                case _:
                    raise AssertionError(action)

    def think(self) -> bool:
        """One step of the thinker; False if it has ended."""
        if self.thought == len(REPLY) + 1:
            return False
        self.thought += 1
        done = self.thought == len(REPLY) + 1
        self.do(self.flow.handle(thought(9, finish="stop") if done else thought(REPLY[self.thought - 1])))
        return True

    def talk(self) -> bool:
        """One step of the talker; False if its input is missing or it has ended."""
        if self.track is None or self.said > len(FRAMES):
            return False
        if not self.track_closed and self.said >= len(self.track):
            return False
        done = self.said == len(FRAMES)
        self.do(self.flow.handle(said(finish="stop") if done else said(FRAMES[self.said])))
        self.said += 1
        return True

    def sound(self) -> bool:
        """One step of code2wav; False if there is nothing to do."""
        if not self.parts:
            return False
        part = self.parts.pop(0)
        if part.part == 0:
            self.frames_in = self.samples_out = 0
        self.frames_in += len(part.prompt) // 2
        stop = max(0, self.frames_in * SAMPLES_A_FRAME - LOOK_AHEAD)
        samples = torch.arange(self.samples_out, stop, dtype=torch.float32)
        self.samples_out = stop
        self.do(self.flow.handle(sounded(part.part, samples)))
        return True

    def lose(self, stage: str) -> None:
        if stage == TALKER and self.track is not None and self.said <= len(FRAMES):
            self.track = None
            self.do(self.flow.replay(TALKER))
        if stage == CODE2WAV and (self.parts or self.frames_in) and not self.finished:
            self.parts.clear()
            self.do(self.flow.replay(CODE2WAV))

    def check(self) -> None:
        assert self.finished and self.ends == 1
        assert self.track == [*REPLY, IDS.tts_eos] and self.track_closed
        assert self.heard == list(range(len(FRAMES) * SAMPLES_A_FRAME - LOOK_AHEAD))
        assert [tuple(frame) for frame in self.frames] == FRAMES


def play(replicas: Replicas, order: str, lost: tuple[int, str] | None = None) -> int:
    """Run to the end; `order` names who goes first whenever several can. Returns the number of steps."""
    steps = {"t": replicas.think, "f": replicas.talk, "s": replicas.sound}
    count = 0
    while any(steps[name]() for name in order):
        count += 1
        if lost is not None and count == lost[0]:
            replicas.lose(lost[1])
    replicas.check()
    return count


@pytest.mark.parametrize("frames", CUTS, ids=str)
@pytest.mark.parametrize("text", CUTS, ids=str)
@pytest.mark.parametrize("order", ["tfs", "sft", "fst"])
@pytest.mark.parametrize("stage", [TALKER, CODE2WAV])
def test_a_loss_at_any_point_changes_nothing(
    text: ChunkSchedule, frames: ChunkSchedule, order: str, stage: str
) -> None:
    steps = play(Replicas(flow_for(TEXT, text=text, frames=frames)), order)
    for at in range(1, steps + 1):
        play(Replicas(flow_for(TEXT, text=text, frames=frames)), order, lost=(at, stage))


@pytest.mark.parametrize("cut", range(1 << (len(FRAMES) - 1)))
def test_every_cut_of_the_frames_sounds_the_same(cut: int) -> None:
    sizes, size = [], 1
    for i in range(len(FRAMES) - 1):
        if cut >> i & 1:
            sizes.append(size)
            size = 0
        size += 1
    replicas = Replicas(flow_for(TEXT, text=EACH, frames=ChunkSchedule((*sizes, size))))
    play(replicas, "fst")


@given(schedules, schedules, st.lists(st.sampled_from("tfsCT"), max_size=60))
def test_any_order_and_any_losses_change_nothing(text: ChunkSchedule, frames: ChunkSchedule, moves: list[str]) -> None:
    replicas = Replicas(flow_for(TEXT, text=text, frames=frames))
    steps = {
        "t": replicas.think,
        "f": replicas.talk,
        "s": replicas.sound,
        "C": lambda: replicas.lose(CODE2WAV),
        "T": lambda: replicas.lose(TALKER),
    }
    for move in moves:
        steps[move]()
    play(replicas, "tfs")


def test_chunks_carry_the_frames_of_their_samples() -> None:
    flow = flow_for(TEXT, text=EACH, frames=ChunkSchedule((1, 2)))
    feed(flow, thought(40), thought(41), said((1, 2)))
    (emit,) = feed(flow, said((3, 4)), sounded(0, torch.ones(2)))
    assert (emit.chunk.frames.tolist(), emit.chunk.last) == ([[1, 2]], False)


@pytest.mark.parametrize("part", [None, 1, 2])
def test_an_answer_out_of_turn_is_a_failure(part: int | None) -> None:
    flow = flow_for(TEXT, frames=EACH)
    feed(flow, thought(40), thought(9, finish="stop"), said((1, 2)), said((3, 4)))
    (fail,) = feed(flow, Produced(CODE2WAV, payload=torch.ones(2), part=part))
    assert fail == Fail(f"code2wav could not decode the frames: part {part} was answered where 0 was expected")


def test_a_refusal_of_the_vocoder_reaches_the_client() -> None:
    flow = flow_for(TEXT, frames=EACH)
    feed(flow, thought(40), thought(9, finish="stop"), said((1, 2)))
    (fail,) = feed(flow, sounded(0, StageError("part 2 came where 1 was due")))
    assert fail == Fail("code2wav could not decode the frames: part 2 came where 1 was due")


def test_what_the_client_still_has_to_play_makes_chunks_smaller() -> None:
    """12.5 frames a second: half a second after the first four frames there is nothing left to wait for."""
    flow = flow_for(TEXT, frames=ChunkSchedule((4, 25), rate=12.5))
    feed(flow, thought(40), thought(9, finish="stop"), *(said((i, i)) for i in range(4)))
    heard = Produced(CODE2WAV, payload=torch.ones(4), finish="stop", part=0, at=100.0)
    assert [type(action) for action in flow.handle(heard)] == [Emit]

    def at(time: float) -> list[Action]:
        return flow.handle(Produced(TALKER, (1,), torch.tensor([(5, 5)], dtype=torch.int32), at=time))

    assert at(100.05) == []
    (part,) = at(100.1)
    assert (part.part, part.prompt) == (1, [5, 5, 5, 5])
    (part,) = at(100.5)
    assert (part.part, part.prompt) == (2, [5, 5])


def test_parts_are_due_when_the_listener_has_played_the_sound_before_them() -> None:
    flow = flow_for(TEXT, frames=ChunkSchedule((1,), rate=12.5))
    feed(flow, thought(40), thought(9, finish="stop"))

    def frame(time: float) -> Submit:
        (part,) = flow.handle(Produced(TALKER, (1,), torch.tensor([(5, 5)], dtype=torch.int32), at=time))
        assert isinstance(part, Submit)
        return part

    assert [frame(50.0).due, frame(50.01).due] == [50.0, pytest.approx(50.08)]
    flow.handle(Produced(CODE2WAV, payload=torch.ones(1365), finish="stop", part=0, at=50.2))
    assert frame(50.21).due == pytest.approx(50.2 + 1365 / 24_000 + 0.08)
    (again,) = flow.replay(CODE2WAV)
    assert isinstance(again, Submit)
    assert again.due == pytest.approx(50.2 + 1365 / 24_000), "a replica that was lost makes the listener wait"
    assert (frame(50.22).due or 0) >= again.due


@pytest.mark.parametrize(
    ("load", "rate", "frames"), [(1.0, 12.5, [1, 1]), (1.5, 12.5, [2, 1]), (9.0, 12.5, [2, 1]), (9.0, 0.0, [1, 1])]
)
def test_beside_other_requests_the_first_part_has_two_frames(load: float, rate: float, frames: list[int]) -> None:
    flow = flow_for(TEXT, frames=ChunkSchedule((1,), rate=rate))
    feed(flow, thought(40), thought(9, finish="stop"))
    parts: list[Action] = []
    for _ in range(3):
        parts += flow.handle(Produced(TALKER, (1,), torch.tensor([(5, 5)], dtype=torch.int32), at=50.0, load=load))
    assert [len(part.prompt) // 2 for part in parts if isinstance(part, Submit)][:2] == frames


def test_an_answer_of_one_frame_beside_others() -> None:
    flow = flow_for(TEXT, frames=ChunkSchedule((1,), rate=12.5))
    feed(flow, thought(40), thought(9, finish="stop"))
    frame = torch.tensor([(5, 5)], dtype=torch.int32)
    assert flow.handle(Produced(TALKER, (1,), frame, load=2.0)) == []
    (part,) = flow.handle(Produced(TALKER, (1,), frame, finish="stop", load=2.0))
    assert isinstance(part, Submit) and part.prompt == [5, 5] and part.last


def test_without_a_rate_parts_have_no_time() -> None:
    flow = flow_for(TEXT, frames=EACH)
    actions = feed(flow, thought(40), thought(9, finish="stop"), said((1, 2)))
    assert [action.due for action in actions if isinstance(action, Submit)] == [None]


# -- a text that is known ----------------------------------------------------------------------------


def test_a_text_that_is_read_out_needs_no_thinker() -> None:
    parts = find_parts(TEXT, IDS)
    assert parts is not None
    speech = SpeechPlan(prompt=TEXT, parts=parts, voice="ethan", ids=IDS, sample_rate=24_000)
    flow = ReadAloudFlow(speech, REPLY, frames=ChunkSchedule((2, 3)))
    assert (flow.stages, flow.outputs) == ({TALKER, CODE2WAV}, {"audio"})
    replicas = Replicas(flow)
    replicas.thought = len(REPLY) + 1
    play(replicas, "fst")


@pytest.mark.parametrize("stage", [TALKER, CODE2WAV])
@pytest.mark.parametrize("at", range(1, 12))
def test_a_text_that_is_read_out_survives_a_loss(stage: str, at: int) -> None:
    parts = find_parts(TEXT, IDS)
    assert parts is not None
    speech = SpeechPlan(prompt=TEXT, parts=parts, voice="ethan", ids=IDS, sample_rate=24_000)
    replicas = Replicas(ReadAloudFlow(speech, REPLY, frames=ChunkSchedule((2, 3))))
    replicas.thought = len(REPLY) + 1
    play(replicas, "fst", lost=(at, stage))


@pytest.mark.parametrize(("text_too", "outputs"), [(True, {"text", "audio"}), (False, {"audio"})])
def test_what_the_answer_consists_of(text_too: bool, outputs: set[str]) -> None:
    parts = find_parts(TEXT, IDS)
    assert parts is not None
    speech = SpeechPlan(prompt=TEXT, parts=parts, voice="ethan", ids=IDS, sample_rate=24_000)
    flow = SpeechFlow(speech, text=EACH, frames=ONCE, text_too=text_too)
    assert (flow.stages, flow.outputs) == ({THINKER, TALKER, CODE2WAV}, outputs)
