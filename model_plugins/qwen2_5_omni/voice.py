"""Divides a reply's codes into parts for token2wav, and joins the samples that token2wav returns. Pure: no I/O."""

from __future__ import annotations

from vllm_omni_ext.connectors.chunks import ChunkSchedule
from vllm_omni_ext.connectors.codec_stream import CodecStream, Piece
from vllm_omni_ext.model_plugins.qwen2_5_omni.messages import Utterance
from vllm_omni_ext.model_plugins.qwen_omni.pooling import POOLING_TASK
from vllm_omni_ext.plugins.flow import Produced, Submit
from vllm_omni_ext.wire.envelope import StageError

TOKEN2WAV = "token2wav"


class UtteranceStream(CodecStream):
    """A `CodecStream` for token2wav, which returns no samples for the first parts, because their sound is not final.

    Args:
        schedule: number of codes in each part.
        sample_rate: Hz.
        utterance: message with part 0.
        delay: number of codes that must follow a code before its sound is final.
    """

    def __init__(self, schedule: ChunkSchedule, sample_rate: int, utterance: Utterance, delay: int) -> None:
        super().__init__(TOKEN2WAV, schedule, sample_rate, pooling_task=POOLING_TASK)
        self._utterance = utterance
        self._delay_s = delay / schedule.rate if schedule.rate else 0.0

    def _submit(self, start: int, due: float | None) -> Submit:
        submit = super()._submit(start, None if self._playing_since is None else due)
        if submit.part == 0:
            submit.payload = self._utterance
        return submit

    def receive(self, event: Produced) -> Piece | None:
        """Handle an output of token2wav; return new sound, or None if the client has all samples of the output.

        Raises:
            CodecError: see `CodecStream`.
        """
        awaited = self._pending[0] if self._pending else None
        silent = event.payload is not None and not isinstance(event.payload, StageError) and not len(event.payload)
        if silent and awaited is not None and awaited.part == event.part and not awaited.last:
            self._pending.popleft()
            return None
        begun = self._playing_since
        piece = super().receive(event)
        if begun is None and self._playing_since is not None:
            # The listener has the sound of fewer codes than were sent: for the schedule, it began to play earlier.
            self._playing_since -= self._delay_s
        return piece
