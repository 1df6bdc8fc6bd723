"""Sends a single request within a time limit, and converts its errors to kinds of failure."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp

from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.loadtest.answers import BROKEN, CONNECT, MALFORMED, TIMEOUT, Answer, Clock, Failure, Timeline

RATE_HZ = 24_000
SAMPLE_BYTES = 2
DETAIL_CHARACTERS = 500


@dataclass(frozen=True, kw_only=True)
class Request:
    """Contents of the requests of a load test.

    Attributes:
        model: name of the model.
        prompts: texts; each request has one of them, in turn. Empty: the requests have only sound.
        sounds: input sounds; each request has one of them, in turn. Their type depends on the API.
        voice: name of the speaker; None: the server's default.
        max_tokens: limit of the tokens of an answer; None: the server's default.
        extra: additional fields of the body.
    """

    model: str
    prompts: tuple[str, ...] = ()
    sounds: tuple[Any, ...] = ()
    voice: str | None = None
    max_tokens: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def prompt(self, number: int) -> str | None:
        """Return the text of the request with this number; None if its input is only sound."""
        return self.prompts[number % len(self.prompts)] if self.prompts else None

    def sound(self, number: int) -> Any:
        """Return the input sound of the request with this number; None if its input is text."""
        return self.sounds[number % len(self.sounds)] if self.sounds else None


class Api(Protocol):
    """Client of one of the measured APIs; implemented by `Chat`, `Speech` and `Realtime`."""

    async def send(self, session: aiohttp.ClientSession, number: int, timeline: Timeline) -> None:
        """Send the request with this number, and record the times of its answer in `timeline`.

        Raises:
            Failure, aiohttp.ClientError, OSError: the answer is missing, incomplete or malformed.
        """


def connections(key: str | None) -> aiohttp.ClientSession:
    """Return an HTTP client without a limit of connections, which sends the API key. The caller must close it."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None), headers=headers
    )


async def measured(
    api: Api, session: aiohttp.ClientSession, clock: Clock, limit_s: float, number: int, due_at: float | None
) -> Answer:
    """Send one request, scheduled for `due_at` (None: now), and return the times of its answer or failure."""
    timeline, failure = Timeline(clock, due_at), None
    try:
        async with asyncio.timeout(limit_s):
            await api.send(session, number, timeline)
    except Failure as err:
        failure = err
    except aiohttp.ClientConnectorError as err:
        failure = Failure(CONNECT, str(err))
    except aiohttp.WSServerHandshakeError as err:
        failure = Failure(f"status {err.status}", err.message)
    except TimeoutError:
        failure = Failure(TIMEOUT, f"no whole answer after {limit_s:g} s")
    except (aiohttp.ClientError, OSError) as err:
        failure = Failure(BROKEN, f"{type(err).__name__}: {err}")
    return timeline.end(failure)


async def refuse_status(reply: aiohttp.ClientResponse) -> None:
    """Raise Failure if the HTTP status is not 200."""
    if reply.status != 200:
        raise Failure(f"status {reply.status}", (await reply.text(errors="replace"))[:DETAIL_CHARACTERS])


def base64_bytes(text: Any) -> int:
    """Return the number of bytes that a base64 text encodes. Raises Failure: not a base64 text."""
    if not isinstance(text, str) or len(text) % 4:
        raise Failure(MALFORMED, "a piece of sound is no base64 text")
    return len(text) // 4 * 3 - text[-2:].count("=")


def seconds(size: int) -> float:
    """Return the duration, in seconds, of `size` bytes of mono 16-bit samples at 24 kHz."""
    return size / SAMPLE_BYTES / RATE_HZ


async def only_model(session: aiohttp.ClientSession, url: str) -> str:
    """Return the name of the first model that a server lists; the others are further names of the same model.

    Raises:
        ConfigError: the server does not respond, or lists no model.
    """
    try:
        async with session.get(f"{url}/models", timeout=aiohttp.ClientTimeout(total=30)) as reply:
            await refuse_status(reply)
            names = [str(each["id"]) for each in (await reply.json())["data"]]
    except (Failure, aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError) as err:
        raise ConfigError(f"{url}/models: {err or type(err).__name__}; or name the model with --model") from None
    if not names:
        raise ConfigError(f"{url}/models: lists no model; choose one with --model")
    return names[0]
