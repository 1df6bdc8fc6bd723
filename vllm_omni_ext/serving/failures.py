"""Our errors as vLLM's, so that its HTTP layer answers with the right status and error JSON."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from vllm.exceptions import GenerationError, RetryableRequestError, VLLMError, VLLMValidationError

from vllm_omni_ext.errors import OmniError, RequestError, StageUnavailable

LONGEST_MESSAGE = 1000
"""Characters of an error message or of a parameter's name."""


class BadRequest(VLLMValidationError):
    """HTTP 400. Its text is the message alone, which names the field already."""

    def __str__(self) -> str:
        return str(self.args[0])


def as_vllm_error(error: OmniError) -> VLLMError:
    """RequestError -> 400 with `param`, StageUnavailable -> 503, everything else -> 500."""
    if isinstance(error, RequestError):
        return BadRequest(printable(str(error)), parameter=printable(error.parameter))
    if isinstance(error, StageUnavailable):
        return RetryableRequestError(str(error))
    return GenerationError(str(error))


def printable(text: str) -> str:
    """A text that may repeat what a client sent: of bounded length, and possible to encode."""
    short = text if len(text) <= LONGEST_MESSAGE else text[:LONGEST_MESSAGE] + "..."
    return short.encode("utf-8", "backslashreplace").decode("utf-8")


async def with_vllm_errors(source: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """The same items; what `source` raises becomes vLLM's error, also if vLLM has wrapped it. Closes `source`."""
    async with aclosing(source):
        try:
            async for item in source:
                yield item
        except OmniError as err:
            raise as_vllm_error(err) from err
        except VLLMError as err:
            if isinstance(err.__cause__, OmniError):
                raise as_vllm_error(err.__cause__) from err
            raise
