"""Joins the outputs of several steps of a request into one message to the API server.

Every output of an engine costs the API server the same work, whether it has 1 token or 8. A consumer with unused
tokens, e.g. a listener with buffered sound, needs no output for each step. `plugins.flow.Open.group` states the largest
number of tokens in an output, and `rate` how fast the consumer uses them. An output is held only while half of the
tokens that were sent and are not used yet last longer than the held ones, so the consumer never waits for a held token
if the stage makes tokens at least at `rate`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from vllm.v1.engine import EngineCoreOutput

from vllm_omni_ext.wire.envelope import unpack


@dataclass(slots=True)
class OutputGroup:
    """Outputs of one request that are held.

    Attributes:
        most: largest number of tokens in a message to the API server.
        rate: tokens per second that the consumer uses from its first token on; 0: each message has `most` tokens.
        sent: number of tokens sent.
        began: time of the first message, in seconds of a monotonic clock; None before it.
        held: the first held output, to which the tokens of the later ones are added; None: none is held.
        tensors: tensors of the held outputs, to be joined along dimension 0; empty if the outputs have none.
    """

    most: int
    rate: float
    sent: int = 0
    began: float | None = None
    held: EngineCoreOutput | None = None
    tensors: list[torch.Tensor] = field(default_factory=list)

    def size(self, now: float) -> int:
        """Return the number of held tokens at which a message is sent.

        It is 1 for the first message, and `most` if `rate` is 0. Otherwise it is half of the tokens that were sent and
        that the consumer has not used at time `now`, from 1 to `most`.

        Args:
            now: seconds of the same clock as `began`.
        """
        if self.began is None:
            return 1
        if not self.rate:
            return self.most
        unused = self.sent - (now - self.began) * self.rate
        return max(1, min(self.most, int(unused / 2)))

    def add(self, output: EngineCoreOutput, now: float, sent: list[EngineCoreOutput]) -> None:
        """Hold the output of a step, or append it to `sent` with the held ones before it.

        An output with more than tokens and a tensor of the model, e.g. with a finish reason or a message of
        `wire.envelope`, is not joined: the held outputs are sent before it.

        Args:
            output: the output of one step.
            now: seconds of the same clock as `began`.
            sent: outputs that the API server gets now, in their order.
        """
        if not _joins(output):
            self.take(sent)
            sent.append(output)
            return
        tensor, held = output.pooling_output, self.held
        if held is not None and (tensor is None) == bool(self.tensors):
            self.take(sent)
            held = None
        if held is None:
            held = self.held = output
        else:
            held.new_token_ids = held.new_token_ids + output.new_token_ids
        if tensor is not None:
            self.tensors.append(tensor)
        if len(held.new_token_ids) >= self.size(now):
            self.take(sent)
            if self.began is None:
                self.began = now

    def take(self, sent: list[EngineCoreOutput]) -> None:
        """Append the held outputs to `sent` as one output, which is no longer held; do nothing if none is held."""
        if (held := self.held) is None:
            return
        if len(self.tensors) > 1:
            held.pooling_output = torch.cat(self.tensors)
        self.sent += len(held.new_token_ids)
        self.held = None
        self.tensors.clear()
        sent.append(held)


def _joins(output: EngineCoreOutput) -> bool:
    """Return whether an output has new tokens, perhaps a tensor of the model, and nothing else of its own.

    Fields that vLLM sets only with a finish reason, or only in a request's first output, are not checked.
    """
    return (
        output.finish_reason is None
        and output.prefill_stats is None
        and output.events is None
        and output.new_logprobs is None
        and output.routed_experts is None
        and output.new_sampling_mask is None
        and not output.num_nans_in_logits
        and bool(output.new_token_ids)
        and (output.pooling_output is None or unpack(output.pooling_output) is None)
    )
