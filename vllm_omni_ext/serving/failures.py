"""Our errors as vLLM's, so that its HTTP layer answers with the right status and error JSON."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from vllm.exceptions import GenerationError, RetryableRequestError, VLLMError, VLLMValidationError

from vllm_omni_ext.errors import OmniError, RequestError, StageUnavailable


class BadRequest(VLLMValidationError):
    """HTTP 400. Its text is the message alone, which names the field already."""

    def __str__(self) -> str:
        return str(self.args[0])


def as_vllm_error(error: OmniError) -> VLLMError:
    """RequestError -> 400 with `param`, StageUnavailable -> 503, everything else -> 500."""
    if isinstance(error, RequestError):
        return BadRequest(str(error), parameter=error.parameter)
    if isinstance(error, StageUnavailable):
        return RetryableRequestError(str(error))
    return GenerationError(str(error))


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
