"""Greedy text: one token of each running reply in one forward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_omni_ext.model_plugins.bagel.context import Context, GrowingContext
from vllm_omni_ext.model_plugins.bagel.model import Bagel


class RunningText:
    """A reply in the making.

    Attributes:
        ids: what was generated, the lone start first; the end is not among them.
        context: what it has seen, the ids up to the last computed one included.
        done: whether the end came, or the limit.
    """

    def __init__(self, model: Bagel, context: Context, max_tokens: int) -> None:
        """Begin a reply of at most `max_tokens` ids, the start included, to what `context` holds."""
        self.context = GrowingContext(context)
        self.ids: list[int] = [model.tokens.start]
        self.done = max_tokens <= 1
        self._max_tokens, self._end = max_tokens, model.tokens.end

    def add(self, id_: int) -> None:
        """The next id has been chosen."""
        if id_ == self._end:
            self.done = True
        else:
            self.ids.append(id_)
            self.done = len(self.ids) >= self._max_tokens


@torch.inference_mode()
def step_text(model: Bagel, running: Sequence[RunningText]) -> Tensor:
    """Compute the last id of each reply and choose the next one.

    Returns:
        Logits, `[replies, vocabulary]` float32, of which the largest was taken.
    """
    contexts = [reply.context for reply in running]
    layout = model.llm.text_layout(contexts, [1] * len(running))
    und = model.text_embeddings([reply.ids[-1] for reply in running])
    out = model.llm(und, None, layout, contexts, hidden="und", keep=True)
    for at, context in enumerate(contexts):
        context.append([(key[at : at + 1], value[at : at + 1]) for key, value in out.layers])
    logits = model.llm.head(out.hidden).float()
    for reply, id_ in zip(running, logits.argmax(-1).tolist(), strict=True):
        reply.add(id_)
    return logits


def write_text(model: Bagel, context: Context, max_tokens: int) -> str:
    """Generate one reply to what the context holds."""
    running = RunningText(model, context, max_tokens)
    while not running.done:
        step_text(model, [running])
    return model.tokens.reply(running.ids)
