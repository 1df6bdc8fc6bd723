"""Starts `vllm serve MODEL --omni` for each topology of an evaluation, and sends the items of a suite to a server."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_omni_ext.errors import ConfigError, OmniError
from vllm_omni_ext.evaluation.suite import Item, Suite

HOST = "127.0.0.1"
START_S = 3600.0
"""Time limit of a server's start in seconds: a large model on a slow disk. The server's own limits are shorter."""
STOP_S = 120.0
LOOK_EVERY_S = 0.5
TAIL = 2000
"""Number of characters of the log's end in an error."""


class ServerFailed(OmniError):
    """The server ended, or was not ready within START_S. The message contains the end of the server's log."""


@contextmanager
def served(model: str, name: str, flags: Sequence[str]) -> Iterator[str]:
    """Start `vllm serve MODEL --omni FLAGS`, yield its URL, and stop it when the `with` block ends.

    Args:
        name: name of the server in errors.

    Raises:
        ServerFailed: the server did not start.
    """
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    script = Path(sys.executable).with_name("vllm")
    command = [str(script)] if script.exists() else [sys.executable, "-m", "vllm_omni_ext"]
    words = [*command, "serve", model, "--omni", "--host", HOST, *flags, "--port", str(port)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            if (problem := _problem(process, f"http://{HOST}:{port}/health/ready")) is not None:
                log.seek(0)
                raise ServerFailed(f"{name}: {problem}:\n{log.read().decode(errors='replace')[-TAIL:]}")
            yield f"http://{HOST}:{port}/v1"
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # the server's children, too
                process.wait()


def _problem(process: subprocess.Popen[bytes], url: str) -> str | None:
    """Wait until the server is ready. Returns the reason if it has ended or the time limit is reached, else None."""
    deadline, reason = time.monotonic() + START_S, ""
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(url, timeout=10).close()
            return None
        except OSError as error:  # not listening yet, or 503
            reason = f": {error}"
        try:
            return f"the server ended with exit status {process.wait(LOOK_EVERY_S)}"
        except subprocess.TimeoutExpired:
            continue
    return f"not ready after {START_S:g} s{reason}"


@dataclass(frozen=True)
class Answer:
    """The answer to an item's request.

    Attributes:
        text: the text, or the transcript of the sound.
        sound: the sound as a WAV file; empty without sound.
        error: the reason if the server has not answered; None: it has.
    """

    text: str = ""
    sound: bytes = b""
    error: str | None = None


async def ask_all(
    url: str, key: str, model: str | None, suite: Suite, at_once: int, done: Callable[[], None]
) -> tuple[str, dict[str, Answer]]:
    """Send a request for every item of a suite; return (name of the model, answers by item id).

    Args:
        url: base URL, ends with `/v1`.
        model: None: the server's only model.
        at_once: number of simultaneous requests.
        done: called after each answer.

    Raises:
        ConfigError: the server does not respond, or it has several models and `model` is None.
    """
    import openai

    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
        if model is None:
            try:
                models = [each.id async for each in client.models.list()]
            except openai.APIError as err:
                raise ConfigError(f"{url}: does not answer: {err}") from None
            if len(models) != 1:
                raise ConfigError(f"{url}: has the models {', '.join(models)}; choose one with --model")
            (model,) = models
        name, turn = model, asyncio.Semaphore(at_once)

        async def one(item: Item) -> tuple[str, Answer]:
            async with turn:
                answer = await _ask(client, name, suite, item)
            done()
            return item.id, answer

        return name, dict(await asyncio.gather(*map(one, suite.items)))


async def _ask(client: Any, model: str, suite: Suite, item: Item) -> Answer:
    import openai

    # The client refuses unknown arguments, so all fields go into `extra_body`.
    fields = {"temperature": 0, **suite.options, **item.options}
    try:
        reply = await client.chat.completions.create(model=model, messages=suite.messages(item), extra_body=fields)
    except (openai.OpenAIError, OSError) as err:  # OSError: a file of the suite cannot be read
        return Answer(error=str(err))
    message = reply.choices[0].message
    if message.audio is None:
        return Answer(message.content or "")
    return Answer(message.audio.transcript or message.content or "", base64.b64decode(message.audio.data))
