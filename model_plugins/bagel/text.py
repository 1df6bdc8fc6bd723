"""Generates text: a forward pass computes one token of each running reply."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_omni_ext.model_plugins.bagel.context import Context, GrowingContext
from vllm_omni_ext.model_plugins.bagel.model import Bagel


class RunningText:
    """A text that is being generated: a reply, or a thought (the model's plan of a picture).

    Attributes:
        ids: the start id, or the argument `first` of the constructor, then the generated ids without the end id.
        context: keys and values of the prompt and of the ids computed so far.
        done: whether the end id was generated or the limit was reached.
    """

    def __init__(self, model: Bagel, context: Context, max_tokens: int, first: int | None = None) -> None:
        """Begin a text after a prompt.

        Args:
            context: context of the prompt.
            max_tokens: most ids of the text, its first id included.
            first: first id of the text; None: the start id.
        """
        self.context = GrowingContext(context)
        self.ids: list[int] = [model.tokens.start if first is None else first]
        self.done = max_tokens <= 1
        self._max_tokens, self._end = max_tokens, model.tokens.end

    def add(self, id_: int) -> None:
        """Add a sampled id; the end id ends the text."""
        if id_ == self._end:
            self.done = True
        else:
            self.ids.append(id_)
            self.done = len(self.ids) >= self._max_tokens


@torch.inference_mode()
def next_logits(model: Bagel, running: Sequence[RunningText]) -> Tensor:
    """Compute the last id of each text in one forward pass, and add its keys and values to the text's context.

    After an exception, all texts are unchanged.

    Returns:
        Logits of the next ids, `[texts, vocabulary]` float32.
    """
    contexts = [reply.context for reply in running]
    layout = model.llm.text_layout(contexts, [1] * len(running))
    und = model.text_embeddings([reply.ids[-1] for reply in running])
    out = model.llm(und, None, layout, contexts, hidden="und", keep=True)
    logits = model.llm.head(out.hidden).float()
    for at, context in enumerate(contexts):
        context.append([(key[at : at + 1], value[at : at + 1]) for key, value in out.layers])
    return logits
