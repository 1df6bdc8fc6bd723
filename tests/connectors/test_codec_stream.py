"""Parts of frames for a codec that needs later frames, and the sound of its answers."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_omni_ext.connectors.codec_stream import ChunkSchedule, CodecError, CodecStream, Piece
from vllm_omni_ext.plugins.flow import Produced, Submit

LOOK_AHEAD = 3
RATE = 10.0
HOP = 2


class Codec:
    """Answers a part with `HOP` samples for each frame whose next `LOOK_AHEAD` frames are known."""

    def __init__(self) -> None:
        self.frames = self.done = 0

    def answer(self, part: Submit, at: float) -> Produced:
        if part.part == 0:
            self.frames = self.done = 0
        self.frames += len(part.prompt)
        stop = self.frames if part.last else max(self.done, self.frames - LOOK_AHEAD)
        samples = np.repeat(np.arange(self.done, stop), HOP)
        self.done = stop
        return Produced("codec", payload=samples, finish="stop", part=part.part, at=at)


def spoken(
    sizes: tuple[int, ...], rate: float, *, lost_after: int = -1, streamed: bool = True
) -> tuple[list[Submit], list[Piece]]:
    """Return the parts and pieces of 12 frames, one each 0.05 s; after part `lost_after` the replica is lost."""
    stream = CodecStream("codec", ChunkSchedule(sizes, rate, streamed), 20, look_ahead=LOOK_AHEAD)
    codec, parts, pieces = Codec(), list[Submit](), list[Piece]()
    for number in range(12):
        at = number * 0.05
        part = stream.take(np.array([[number]]), last=number == 11, at=at)
        if part is None:
            continue
        if len(parts) == lost_after:
            part = stream.again()
        parts.append(part)
        piece = stream.receive(codec.answer(part, at))
        assert piece is not None, "each part has sound"
        pieces.append(piece)
    return parts, pieces


@pytest.mark.parametrize("lost_after", [-1, 0, 1])
@pytest.mark.parametrize("rate", [0.0, RATE])
@pytest.mark.parametrize("sizes", [(1,), (2, 1), (3, 5), (0,)], ids=str)
def test_every_part_has_sound_and_counts_the_frames_of_it(sizes: tuple[int, ...], rate: float, lost_after: int) -> None:
    parts, pieces = spoken(sizes, rate, lost_after=lost_after)
    assert len(parts[0].prompt) >= LOOK_AHEAD + 1
    assert np.concatenate([piece.samples for piece in pieces]).tolist() == np.repeat(np.arange(12), HOP).tolist()
    heard = 0
    for piece in pieces:
        heard += len(piece.samples)
        assert heard == piece.frames * HOP
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_a_part_is_due_when_the_sound_before_it_has_been_played() -> None:
    """The second part begins with the sound of frame 1: part 0 has the frames 0 to 3, and sound for frame 0."""
    parts, _ = spoken((1,), RATE)
    assert len(parts[0].prompt) == 4 and parts[0].due == pytest.approx(0.15)
    assert parts[1].due == pytest.approx(0.15 + 1 / RATE)


def test_parts_of_an_answer_that_is_not_streamed_are_due_later_and_in_order() -> None:
    """They have the last size, and are due after the time of a whole part. The codec stage takes parts by due time."""
    parts, _ = spoken((1, 5), RATE, streamed=False)
    assert [len(part.prompt) for part in parts] == [5, 5, 2]
    assert [part.due for part in parts] == pytest.approx([at + 0.5 for at in (0.2, 0.45, 0.55)])


@pytest.mark.parametrize(
    ("sizes", "rate", "streamed", "joined"),
    [
        ((1, 25), RATE, True, {"group": 8, "rate": RATE}),
        ((1, 25), 0.0, True, {"group": 1, "rate": 0.0}),
        ((1, 25), RATE, False, {"group": 8, "rate": 0.0}),
        ((1, 4), RATE, False, {"group": 4, "rate": 0.0}),
        ((0,), 0.0, False, {"group": 8, "rate": 0.0}),
    ],
)
def test_frames_are_joined_when_no_listener_waits_for_them(
    sizes: tuple[int, ...], rate: float, streamed: bool, joined: dict[str, float]
) -> None:
    assert CodecStream("codec", ChunkSchedule(sizes, rate, streamed), 20).joined == joined


def test_an_answer_without_samples_is_an_error() -> None:
    stream = CodecStream("codec", ChunkSchedule((4,)), 20, look_ahead=LOOK_AHEAD)
    part = stream.take(np.zeros((4, 1), np.int64), last=False, at=0.0)
    assert part is not None
    with pytest.raises(CodecError, match="there are no samples"):
        stream.receive(Produced("codec", payload=np.zeros(0), finish="stop", part=0))
