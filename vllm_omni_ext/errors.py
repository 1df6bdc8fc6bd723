"""All errors that this package raises to callers.

OmniError
 |- ConfigError            the configuration is wrong; the message contains the key's path and advice
 |- RequestError           the request is wrong (HTTP 400); `parameter` is the wrong parameter
 |- PromptTooLong          a RequestError: the prompt is too long for a stage
 |- UnknownMember          the deployment has no stage or replica of this name
 |- StageUnavailable       a stage has no live replica (HTTP 503); a later request may succeed
 |- RequestFailed          a stage could not finish an accepted request (HTTP 500)
 |- CallFailed             a utility call (e.g. `collective_rpc`) failed in some replicas; contains the answers of all
 |- IncompatibleVllm       the installed vLLM is not one of the tested versions
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class OmniError(Exception):
    """Base class of all errors that this package raises."""


class ConfigError(OmniError):
    """The configuration is wrong; the message starts with the path of the wrong key."""


class RequestError(OmniError):
    """The request is wrong, and fails again if it is repeated unchanged.

    Args:
        message: the fault, and the allowed values.
        parameter: name of the wrong request parameter, as the client wrote it.
    """

    def __init__(self, message: str, *, parameter: str) -> None:
        super().__init__(message)
        self.parameter = parameter


class PromptTooLong(RequestError):
    """The prompt is longer than the longest sequence of a stage."""


class UnknownMember(OmniError):
    """The deployment has no stage or replica of this name."""


class StageUnavailable(OmniError):
    """A stage has no live replica, or the server is shutting down."""


class RequestFailed(OmniError):
    """A stage could not finish an accepted request."""


class CallFailed(OmniError):
    """A utility call (e.g. `collective_rpc`) to several replicas failed in some of them.

    Args:
        replies: a `runtime.client.calls.Reply` of each replica, by its id; `error` is set where the call failed.
    """

    def __init__(self, replies: Mapping[Any, Any]) -> None:
        super().__init__("; ".join(f"{name}: {reply.error}" for name, reply in replies.items() if reply.error))
        self.replies = replies


class IncompatibleVllm(OmniError):
    """The installed vLLM is outside the tested range, or its code differs from the tested code."""
