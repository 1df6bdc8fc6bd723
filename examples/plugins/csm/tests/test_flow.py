"""Tests the flow on simulated stages: the sound is the same after the loss of any replica, and all state is freed."""

from collections.abc import Iterator

import numpy as np
import pytest
from csm.payloads import BACKBONE, CODEC, FRAME
from csm.runtime import CsmFlow, Utterance

from vllm_omni_ext.connectors.chunks import ChunkSchedule
from vllm_omni_ext.testing import Reply, Work, check_flow

FRAMES, END = 7, [0, 0]


def backbone(work: Work) -> Iterator[Reply | None]:
    prompt = work.take().payload
    assert prompt.text.count(FRAME) == len(prompt.audio)
    for number in range(len(prompt.frames), FRAMES):
        first = sum(prompt.text) + len(prompt.audio) + number
        yield Reply(tokens=(first,), payload=np.array([[first, number]]))
    yield Reply(tokens=(0,), finish="stop")


def codec(work: Work) -> Iterator[Reply | None]:
    part = work.take()
    if part.payload is not None:
        yield Reply(payload=np.array([[5, 6], [7, 8]]), finish="stop")
        return
    while True:
        yield Reply(payload=np.array(part.prompt, np.float32), finish="stop")
        while (part := work.take()) is None:
            yield None


@pytest.mark.parametrize("reference", [None, np.zeros(4, np.float32)], ids=["text", "reference"])
@pytest.mark.parametrize("frames", [(1, 2, 4), "all"])
def test_the_sound_is_the_same_after_any_loss(frames, reference) -> None:
    def flow() -> CsmFlow:
        utterance = Utterance(text=[1, 2], reference=reference, reference_text=() if reference is None else (3,))
        return CsmFlow(utterance, ChunkSchedule.of(frames), sample_rate=24000, end=END)

    answer = check_flow(flow, {BACKBONE: backbone, CODEC: codec}, frontend=BACKBONE)
    first = 3 if reference is None else 1 + 2 + 3 - 3 + 3  # text, and two frames and their end
    assert answer.outputs["audio"].tolist() == [code for number in range(FRAMES) for code in (first + number, number)]
