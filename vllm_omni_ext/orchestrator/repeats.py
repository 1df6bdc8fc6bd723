"""Prompts that the text stage reads once more for what it exports, since what it had exported was lost."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import msgspec
from vllm.v1.engine import EngineCoreRequest


class Repeats:
    """Which engine request reads whose prompt again."""

    def __init__(self) -> None:
        self._owners: dict[str, str] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._owners)

    def request(self, request_id: str, text: EngineCoreRequest) -> EngineCoreRequest:
        """One that reads the prompt of `text`, and makes one token, which an engine cannot do without."""
        engine_id = f"{request_id}/again/{next(self._numbers)}"
        self._owners[engine_id] = request_id
        assert text.sampling_params is not None
        params = text.sampling_params.clone()
        params.max_tokens, params.min_tokens = 1, 0
        params.logprobs = params.prompt_logprobs = params.structured_outputs = None
        return msgspec.structs.replace(text, request_id=engine_id, sampling_params=params)

    def owner(self, engine_id: str) -> str:
        """Whose request it is: another's if it reads a prompt again, else its own."""
        return self._owners.get(engine_id, engine_id)

    def of(self, request_ids: Iterable[str]) -> list[str]:
        """Those of these requests."""
        owners = set(request_ids)
        return [engine_id for engine_id, owner in self._owners.items() if owner in owners]

    def finished(self, engine_id: str) -> None:
        """A prompt has been read, or no stage has it any more; unknown ids are ignored."""
        self._owners.pop(engine_id, None)
