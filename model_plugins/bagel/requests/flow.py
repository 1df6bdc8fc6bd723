"""Flows of picture requests through the stages. Pure. A request for text alone has a `ForwardFlow`."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from vllm_omni_ext.modalities.base import IMAGE, TEXT
from vllm_omni_ext.modalities.chunks import ImageChunk, TextChunk
from vllm_omni_ext.model_plugins.bagel.requests.payloads import AR, DIT, Draw, Drawn, Preview
from vllm_omni_ext.model_plugins.bagel.requests.thought import ThoughtChunk
from vllm_omni_ext.plugins.flow import Action, Emit, Fail, Finished, Open, Produced, Progress, Submit
from vllm_omni_ext.wire.envelope import StageError, StageProgress


class DrawFlow:
    """Flow of a picture request that uses the stage `dit` alone; with `think`, `dit` generates the thought too.

    The thought is the text in which the model plans the picture.

    Args:
        draw: the message to `dit`.
        text: the answer has the modality "text", whose text is the thought.
        pixels: pixels per latent token along a side.
    """

    stages = frozenset((DIT,))

    def __init__(self, draw: Draw, *, pixels: int, text: bool = False) -> None:
        self.outputs = frozenset((TEXT, IMAGE) if text else (IMAGE,))
        self._draw = draw
        self._pixels = pixels
        self._previews = 0

    def begin(self) -> list[Action]:
        return [self._submit()]

    def handle(self, event: Produced) -> list[Action]:
        match event.payload:
            case StageError(reason=reason):
                return [Fail(reason)]
            case StageProgress(done=done, total=total):
                return [Progress(event.stage, done, total)]
            case Preview() as preview:
                return self._preview(preview)
            case Drawn() as drawn:
                return [*self._thought(drawn), Emit(self._image(drawn)), Finished()]
        return [] if event.finish is None else [Fail(f"stage '{event.stage}' has ended without a picture")]

    def replay(self, stage: str) -> list[Action]:
        return [self._submit()]

    def _submit(self) -> Submit:
        return Submit(stage=DIT, payload=self._draw)

    def _preview(self, preview: Preview) -> list[Action]:
        if preview.number < self._previews:
            return []  # the client received it before the stage was lost
        self._previews = preview.number + 1
        chunk = ImageChunk(
            pixels=_pixels(preview),
            index=preview.number,
            partial=True,
            last=False,
            seed=self._draw.parameters.seed,
        )
        return [Emit(chunk)]

    def _thought(self, drawn: Drawn) -> list[Action]:
        if drawn.thought is None:
            return []
        tokens = drawn.thought_tokens
        found: list[Action] = [Emit(ThoughtChunk(text=drawn.thought, tokens=tokens))]
        if TEXT in self.outputs:
            found.append(Emit(TextChunk(text=drawn.thought, tokens=tokens)))
        return found

    def _image(self, drawn: Drawn) -> ImageChunk:
        tokens = drawn.height * drawn.width // self._pixels**2
        latent = None if drawn.latent is None else np.frombuffer(drawn.latent, np.float32).reshape(tokens, -1)
        return ImageChunk(
            pixels=_pixels(drawn), latent=latent, seed=self._draw.parameters.seed, seconds=dict(drawn.seconds)
        )


class ThinkFlow(DrawFlow):
    """Flow of a picture whose thought `ar` generates before `dit` generates the picture.

    Args:
        draw: the message to `dit`, without the thought.
        prompt: token ids of the prompt of the thought, for `ar`.
        end: id that ends the thought.
        params: sampling parameters of `ar`.
        pixels: pixels per latent token along a side.
        text: the answer has the modality "text", whose text is the thought.
    """

    stages = frozenset((AR, DIT))

    def __init__(
        self, draw: Draw, *, prompt: list[int], end: int, params: Any, pixels: int, text: bool = False
    ) -> None:
        super().__init__(draw, pixels=pixels, text=text)
        self._prompt, self._end, self._params = prompt, end, params
        self._tokens: list[int] = []

    def begin(self) -> list[Action]:
        return [self._open()]

    def handle(self, event: Produced) -> list[Action]:
        """Collect the tokens of the thought from `ar`; at the thought's end, send the message to `dit`."""
        if event.stage != AR:
            return super().handle(event)
        if isinstance(event.payload, StageError):
            return [Fail(event.payload.reason)]
        self._tokens += event.tokens
        if event.finish is None:
            return []
        if event.finish in ("abort", "error"):
            return [Fail(f"stage '{AR}' has not finished the thought")]
        thought = [id_ for id_ in self._tokens if id_ != self._end]
        self._draw = msgspec.structs.replace(self._draw, thought=thought)
        return [self._submit()]

    def replay(self, stage: str) -> list[Action]:
        return [self._open() if stage == AR else self._submit()]

    def _open(self) -> Open:
        return Open(
            stage=AR,
            prompt=[*self._prompt, *self._tokens],
            done=len(self._tokens),
            stop=(self._end,),
            params=self._params,
        )


def _pixels(answer: Drawn | Preview) -> np.ndarray[Any, Any]:
    return np.frombuffer(answer.pixels, np.uint8).reshape(answer.height, answer.width, 3)
