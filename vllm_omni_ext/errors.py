"""All errors that this package raises to callers.

OmniError
 |- ConfigError            the configuration is wrong; contains the key's path and advice
 |- RequestError           this request is wrong (HTTP 400); names the parameter
 |- PromptTooLong          a RequestError about the length of the prompt; a shorter one may succeed
 |- UnknownMember          a stage or replica name that does not exist
 |- StageUnavailable       a stage has no live replica (HTTP 503); try again later
 |- RequestFailed          the request was accepted and could not be finished (HTTP 500)
 |- CallFailed             some replicas failed in a call to several; has all answers
 |- IncompatibleVllm       the installed vLLM is not one of the tested versions
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class OmniError(Exception):
    """Base of all errors raised by this package."""


class ConfigError(OmniError):
    """The configuration is wrong; the message starts with the path of the offending key."""


class RequestError(OmniError):
    """A request that can never succeed as written.

    Args:
        message: the fault, and the allowed values.
        parameter: name of the request parameter, as the client wrote it.
    """

    def __init__(self, message: str, *, parameter: str) -> None:
        super().__init__(message)
        self.parameter = parameter


class PromptTooLong(RequestError):
    """A prompt that does not fit into a stage."""


class UnknownMember(OmniError):
    """A stage or replica that is not part of the plan."""


class StageUnavailable(OmniError):
    """No live replica of a stage is left."""


class RequestFailed(OmniError):
    """An accepted request that a stage could not finish."""


class CallFailed(OmniError):
    """Some replicas failed in a call to several.

    Args:
        replies: each replica's answer, by id; those that failed have `error` set.
    """

    def __init__(self, replies: Mapping[Any, Any]) -> None:
        super().__init__("; ".join(f"{name}: {reply.error}" for name, reply in replies.items() if reply.error))
        self.replies = replies


class IncompatibleVllm(OmniError):
    """The installed vLLM is outside the tested range, or its code differs from the tested code."""
