"""One request at a time: its limit, and its failures by kind."""

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
    """What each request contains, in OpenAI's fields.

    Attributes:
        model: its name.
        prompts: texts, one a request, in turn; empty: sound alone.
        sounds: input sounds, one a request, in turn; what they are depends on the API.
        voice: name of the speaker; None: the server's default.
        max_tokens: most tokens of an answer; None: the server's default.
        extra: more fields of the body.
    """

    model: str
    prompts: tuple[str, ...] = ()
    sounds: tuple[Any, ...] = ()
    voice: str | None = None
    max_tokens: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def prompt(self, number: int) -> str | None:
        """Return the text of a request."""
        return self.prompts[number % len(self.prompts)] if self.prompts else None

    def sound(self, number: int) -> Any:
        """Return the input sound of the request with this number; None if its input is text."""
        return self.sounds[number % len(self.sounds)] if self.sounds else None


class Api(Protocol):
    """One of the measured APIs."""

    async def send(self, session: aiohttp.ClientSession, number: int, timeline: Timeline) -> None:
        """Send request `number` and record its whole answer; Failure, or an error of aiohttp, if there is none."""


def connections(key: str | None) -> aiohttp.ClientSession:
    """Return connections without a limit, which carry the key; close them at the end."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None), headers=headers
    )


async def measured(
    api: Api, session: aiohttp.ClientSession, clock: Clock, limit_s: float, number: int, due_at: float | None
) -> Answer:
    """Return the times of one request, whole or failed."""
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
    """Raise Failure unless the status is 200."""
    if reply.status != 200:
        raise Failure(f"status {reply.status}", (await reply.text(errors="replace"))[:DETAIL_CHARACTERS])


def base64_bytes(text: Any) -> int:
    """Return the number of bytes that a base64 text encodes; Failure if it is no such text."""
    if not isinstance(text, str) or len(text) % 4:
        raise Failure(MALFORMED, "a piece of sound is no base64 text")
    return len(text) // 4 * 3 - text[-2:].count("=")


def seconds(size: int) -> float:
    """Return the seconds of so many bytes of 16-bit samples at 24 kHz, one channel."""
    return size / SAMPLE_BYTES / RATE_HZ


async def only_model(session: aiohttp.ClientSession, url: str) -> str:
    """Return the name of a server's first model; servers list further names of the same one.

    Raises:
        ConfigError: the server does not answer, or lists none.
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
