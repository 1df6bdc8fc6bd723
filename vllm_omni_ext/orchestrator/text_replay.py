"""A text request that can be given to another replica: its prompt, and the tokens it has made so far."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import msgspec
from vllm.v1.engine import EngineCoreRequest


@dataclass
class TextReplay:
    """One text request as it was sent, and what came back."""

    request: EngineCoreRequest
    tokens: list[int] = field(default_factory=list)

    @property
    def possible(self) -> bool:
        """False for what has begun and depends on more than its tokens: a grammar's state, or the prompt's logprobs."""
        if not self.tokens:
            return True
        params = self.request.sampling_params
        return (
            params is not None
            and self.request.prompt_token_ids is not None
            and params.structured_outputs is None
            and params.prompt_logprobs is None
        )

    def another_time(self) -> TextReplay:
        """The same to somebody else: who finds it in its place knows that nobody has taken over since."""
        return replace(self)

    def again(self) -> EngineCoreRequest:
        """The request that goes on where this one was: the tokens made are part of its prompt."""
        request, made = self.request, len(self.tokens)
        if not made:
            return request
        assert request.sampling_params is not None and request.prompt_token_ids is not None
        params = request.sampling_params.clone()
        if params.max_tokens is not None:
            params.max_tokens -= made
        params.min_tokens = max(0, params.min_tokens - made)
        return msgspec.structs.replace(
            request, prompt_token_ids=[*request.prompt_token_ids, *self.tokens], sampling_params=params
        )
