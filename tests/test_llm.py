"""Calls of `OmniLLM` on an engine without processes: prompts that fail, calls that are interrupted, and the end."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams

from vllm_omni_ext import llm as module
from vllm_omni_ext.errors import ConfigError, RequestError, StageUnavailable
from vllm_omni_ext.llm import OmniLLM
from vllm_omni_ext.modalities.chunks import TextChunk
from vllm_omni_ext.plugins.runtime import RequestOptions

WAIT_S = 30.0


class Engine:
    """Answers a prompt with a text; the prompt "hang" gets no answer.

    Attributes:
        running: numbers of the requests in progress.
        begun: released once for each prompt "hang" in progress.
        ends: whether `shutdown` ends the requests in progress.
        adapters: the `lora_request` of every request.
    """

    def __init__(self) -> None:
        self.running: set[str] = set()
        self.begun = threading.Semaphore(0)
        self.ends = True
        self.adapters: list[Any] = []
        self.vllm_config: Any = SimpleNamespace(lora_config=None)
        self.model_config = self.renderer = self.input_processor = None
        self._ended = asyncio.Event()

    async def generate(
        self, prompt: Any, params: Any, number: str, *, lora_request: Any, **_: Any
    ) -> AsyncIterator[Any]:
        self.running.add(number)
        self.adapters.append(lora_request)
        try:
            if prompt["prompt"] == "hang":
                self.begun.release()
                await self._ended.wait()
                await asyncio.sleep(0)
                raise StageUnavailable("the server is shutting down")
            yield TextChunk(text="Hi", tokens=1, last=True)
        finally:
            self.running.discard(number)

    def shutdown(self, timeout: float | None = None) -> None:
        if self.ends:
            self._ended.set()


@pytest.fixture
def llm() -> Iterator[Any]:
    made: Any = OmniLLM.__new__(OmniLLM)
    made._loop, made._lock, made._calls = asyncio.new_event_loop(), threading.Lock(), set()
    made._thread = threading.Thread(target=module._run_loop, args=(made._loop,), daemon=True)
    made._thread.start()
    made._omni, made._numbers, made._modalities = Engine(), itertools.count(), {}
    made._replica_supervisor, made._deployment = None, SimpleNamespace(close=lambda: None)
    yield made
    made.close()


def prompt(text: str) -> Callable[[], Any]:
    return lambda: {"type": "token", "prompt": text}


def answer(llm: Any, *renders: Callable[[], Any], use_tqdm: Any = False, lora_request: Any = None) -> Any:
    """Call the common part of `generate` and `chat`."""
    keywords = SimpleNamespace(params={}, over=lambda params: params)
    stock = {"lora_request": lora_request, "priority": None}
    options = RequestOptions(modalities=("text",))
    return llm._answer(renders, SamplingParams(), keywords, options, stock, use_tqdm, False)


class Bar:
    """A progress bar."""

    def __init__(self, **_: Any) -> None:
        self.count, self.closed = 0, False
        bars.append(self)

    def update(self) -> None:
        self.count += 1

    def close(self) -> None:
        self.closed = True


bars: list[Bar] = []


def failing(error: BaseException) -> Callable[[], Any]:
    def render() -> Any:
        raise error

    return render


@pytest.mark.parametrize(
    ("error", "message"),
    [(KeyError("role"), "KeyError: 'role'"), (AttributeError("x"), "AttributeError: x"), (ValueError("long"), "long")],
)
def test_a_prompt_that_cannot_be_rendered_fails_alone(llm: Any, error: Exception, message: str) -> None:
    first, bad, last = answer(llm, prompt("a"), failing(error), prompt("b"), use_tqdm=Bar)
    assert (first.error, last.error, last.outputs[0].text) == (None, None, "Hi")
    assert isinstance(bad.error, RequestError) and bad.error.parameter == "prompt" and str(bad.error) == message
    assert bad.error.__cause__ is error and bad.outputs[0].finish_reason == "error"
    assert (bars[-1].count, bars[-1].closed) == (3, True)


def test_a_prompt_with_media_gets_the_default_adapter_of_its_modality(llm: Any) -> None:
    llm._omni.vllm_config.lora_config = SimpleNamespace(default_mm_loras={"image": "/image", "audio": "/audio"})
    sound = {"type": "multimodal", "prompt": "a", "mm_placeholders": {"audio": []}}
    given = LoRARequest("mine", 7, "/mine")
    answer(llm, lambda: sound, prompt("a"))
    answer(llm, lambda: sound, lora_request=given)
    assert llm._omni.adapters == [LoRARequest("audio", 1, "/audio"), None, given]


def stopped(llm: Any) -> bool:
    """Wait until the engine runs no request; returns whether it happened."""
    end = time.monotonic() + WAIT_S
    while llm._omni.running and time.monotonic() < end:
        time.sleep(0.01)
    return not llm._omni.running


def test_the_requests_of_an_interrupted_call_are_aborted(llm: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        answer(llm, prompt("hang"), prompt("hang"), failing(KeyboardInterrupt()), use_tqdm=Bar)
    assert stopped(llm) and (bars[-1].count, bars[-1].closed) == (0, True)


def test_the_requests_of_a_call_that_is_interrupted_while_it_waits_are_aborted(llm: Any) -> None:
    class Interrupting(Bar):
        def update(self) -> None:
            super().update()
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            answer(llm, prompt("hang"), prompt("a"), use_tqdm=Interrupting)
    finally:
        signal.signal(signal.SIGINT, before)
    assert stopped(llm) and bars[-1].closed


@pytest.mark.parametrize("ends", [True, False])
def test_close_ends_a_call_of_another_thread(llm: Any, ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []

    def call() -> None:
        try:
            found.extend(answer(llm, prompt("hang"), prompt("hang")))
        except StageUnavailable as error:
            found.append(error)

    llm._omni.ends = ends
    monkeypatch.setattr(module, "CLOSE_S", WAIT_S if ends else 0.2)
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    for _ in range(2):  # both requests
        assert llm._omni.begun.acquire(timeout=WAIT_S)
    llm.close()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    if ends:
        assert [str(each.error) for each in found] == ["the server is shutting down"] * 2
    else:
        assert [str(each) for each in found] == ["the LLM is closed"]
    with pytest.raises(StageUnavailable, match="the LLM is closed"):
        answer(llm, prompt("a"))


@pytest.mark.parametrize("forked", [False, True])
def test_the_end_of_a_fork_of_the_program_ends_no_replica(
    llm: Any, forked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks: list[Callable[[], Any]] = []
    monkeypatch.setattr(module.atexit, "register", hooks.append)
    events: list[str] = []
    llm._deployment.close = lambda: events.append("closed")
    llm._replica_supervisor = SimpleNamespace(abandon=lambda: events.append("abandoned"))
    llm._end_with_program()
    llm._replica_supervisor = None
    if forked:
        monkeypatch.setattr(os, "getpid", lambda: -1)
    hooks[0]()
    assert events == ([] if forked else ["abandoned", "closed"])


def test_engine_arguments_of_vllm_are_no_settings() -> None:
    with pytest.raises(ConfigError, match=r"^from_engine_args: .* write LLM\('some/model', omni=True, \.\.\.\) "):
        OmniLLM.from_engine_args(SimpleNamespace(model="some/model"))


def test_a_chat_template_that_is_not_there_is_refused_before_any_start(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = SimpleNamespace(family="qwen3_omni")
    monkeypatch.setattr("vllm_omni_ext.cli.settings.from_kwargs", lambda model, **keywords: plan)
    with pytest.raises(ConfigError, match=r"^chat_template: The supplied chat template \(/missing\) "):
        OmniLLM("some/model", chat_template="/missing")
