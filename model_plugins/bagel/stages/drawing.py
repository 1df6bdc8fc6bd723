"""State of one picture request in the stage `dit`, from the message `Draw` to the message `Drawn`.

A turn is a prefill, or the decoding of a preview or of the finished picture with the autoencoder. In each engine step,
the stage computes at most one turn of one request. The other work, denoise steps and tokens of thoughts, is computed
for all requests together.
"""

from __future__ import annotations

import time

import msgspec
import torch

from vllm_omni_ext.engine.plain_stage import Answer
from vllm_omni_ext.model_plugins.bagel.denoise import Evaluation, FinishedImage, RunningImage, begin, decode, seeded
from vllm_omni_ext.model_plugins.bagel.model import Bagel
from vllm_omni_ext.model_plugins.bagel.prefill import Prefill
from vllm_omni_ext.model_plugins.bagel.prompts import ImagePlan, Prompts
from vllm_omni_ext.model_plugins.bagel.requests.payloads import DitAnswer, Draw, Drawn, Preview
from vllm_omni_ext.model_plugins.bagel.stages.segments import check, plan
from vllm_omni_ext.model_plugins.bagel.text import RunningText
from vllm_omni_ext.wire.envelope import StageProgress


class Drawing:
    """A picture request in the stage `dit`.

    Attributes:
        image: the running image; None before the prefill has ended.
        text: the thought while the model generates it, else None.
    """

    def __init__(self, model: Bagel, draw: Draw, waited: float) -> None:
        """Check a request, and begin without any computation.

        Args:
            model: the model.
            draw: the request's message.
            waited: seconds that the request waited in the scheduler's queue.

        Raises:
            ValueError: the request is invalid.
        """
        self._parameters = check(draw, model.sizes)
        self._model, self._draw = model, draw
        self._seconds = {"queue": waited}
        self._since = time.perf_counter()
        self._prefill: Prefill | None = None
        self._plan: ImagePlan | None = None
        self._thought: str | None = None
        self._thought_tokens = 0
        self._preview_steps = preview_steps(self._parameters.evaluations, draw.previews)
        self._preview: torch.Tensor | None = None
        self.image: RunningImage | None = None
        self.text: RunningText | None = None

    @property
    def needs_turn(self) -> bool:
        """Whether the request's next work is a turn: a prefill, or a decoding with the autoencoder."""
        if self.image is None:
            return self.text is None or self.text.done
        return self.image.done or self._preview is not None

    @property
    def denoises(self) -> bool:
        """Whether the request's next work is a denoise step."""
        return self.image is not None and not self.needs_turn

    @property
    def writes(self) -> bool:
        """Whether the request's next work is a token of its thought."""
        return self.text is not None and not self.text.done

    def turn(self) -> Answer | None:
        """Compute the request's next turn.

        Returns:
            None if the turn was a prefill, else an answer with a preview (`Preview`) or the finished picture (`Drawn`).
        """
        if self.image is None:
            self._begin()
            return None
        if self._preview is not None:
            return self._show(self._preview)
        return self._finish()

    def _begin(self) -> None:
        """Start the next text or image of the request.

        A request with a thought calls this twice: first the prompt is prefilled and the thought started, then the
        thought is added to the prompt and the image started. A request without one calls it once, for the image.
        """
        model, thinks = self._model, self._parameters.think
        prompts = Prompts(model.tokens, model.sizes)
        if self._plan is None or self._prefill is None:
            self._spent("queue")
            self._plan = plan(self._draw, prompts, think=thinks)
            self._prefill = Prefill(model, seeded(self._parameters))
        if thinks:
            if self._draw.thought is None and self.text is None:
                context = self._prefill.context(self._plan.cond)
                self.text = RunningText(model, context, self._parameters.max_think_token_n)
                self._spent("prefill")
                return
            if self.text is not None:
                self._spent("think")
            ids = [model.tokens.start, *(self._draw.thought or ())] if self.text is None else self.text.ids
            self._thought, self._thought_tokens = model.tokens.reply(ids), len(ids) - 1
            self._plan = self._plan.with_thought(prompts.text(self._thought))
        self.image = begin(
            model, self._plan, self._parameters, generator=self._prefill.generator, prefill=self._prefill
        )
        self.text = self._prefill = None
        self._spent("prefill")

    def denoised(self, evaluation: Evaluation) -> Answer:
        """Update the state after a denoise step of `image`; return an answer with the request's progress."""
        assert self.image is not None
        done, total = self.image.index, self._parameters.evaluations
        if done in self._preview_steps:
            self._preview = evaluation.preview()
        if self.image.done:
            self._spent("steps")
        return Answer(StageProgress(done, total))

    def wrote(self, logits: torch.Tensor) -> None:
        """Append the most likely next token to the thought.

        Args:
            logits: `[vocabulary]` float32.
        """
        assert self.text is not None
        self.text.add(int(logits.argmax()))

    def _show(self, latent: torch.Tensor) -> Answer:
        assert self.image is not None
        shown, self._preview = decode(self._model, latent, self.image.rows), None
        height, width = self.image.size
        done, total = self.image.index, self._parameters.evaluations
        number = self._preview_steps.index(done)
        return _answer(Preview(number=number, height=height, width=width, pixels=_bytes(shown), done=done, total=total))

    def _finish(self) -> Answer:
        assert self.image is not None
        finished = decode(self._model, self.image.latent, self.image.rows)
        height, width = self.image.size
        pixels = _bytes(finished)
        latent = finished.latent.cpu().numpy().tobytes() if self._draw.latent else None
        self._spent("vae")
        return _answer(
            Drawn(
                height=height,
                width=width,
                pixels=pixels,
                latent=latent,
                thought=self._thought,
                thought_tokens=self._thought_tokens,
                seconds=self._seconds,
            ),
            last=True,
        )

    def _spent(self, name: str) -> None:
        """Add the time since the last call to the entry `name` of the answer's `seconds`."""
        now = time.perf_counter()
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since
        self._since = now


def preview_steps(evaluations: int, previews: int) -> list[int]:
    """Return the numbers of completed denoise steps after which a preview is sent, evenly distributed.

    There is at most one preview after each step, and none after the last one.

    Args:
        evaluations: number of denoise steps.
        previews: requested number of previews.
    """
    number = min(previews, evaluations - 1)
    return [evaluations * at // (number + 1) for at in range(1, number + 1)]


def _bytes(finished: FinishedImage) -> bytes:
    return finished.image.contiguous().cpu().numpy().tobytes()


def _answer(message: DitAnswer, *, last: bool = False) -> Answer:
    return Answer(torch.frombuffer(bytearray(msgspec.msgpack.encode(message)), dtype=torch.uint8), last=last)
