"""How the head ends its API servers, and what they say while they start."""

from __future__ import annotations

import logging
import multiprocessing
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.pace import pace
from vllm_omni_ext.cli.args import parse_serve
from vllm_omni_ext.serving import server
from vllm_omni_ext.serving.server import _is_wrong, end_gently, quiet

FORK = multiprocessing.get_context("fork")
LIFE_S = 30.0
"""A process that nobody ends goes by itself, should the tests be cut short."""

Start = Callable[[float], Any]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a process that ends so many seconds after it was asked to."""
    started: list[Any] = []

    def run(seconds: float) -> Any:
        running = FORK.Event()
        started.append(FORK.Process(target=ends_after, args=(seconds, running), daemon=True))
        started[-1].start()
        assert running.wait(10)
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.join()


def ends_after(seconds: float, running: Any) -> None:
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    running.set()
    if asked.wait(LIFE_S):
        time.sleep(seconds)


def took(processes: list[Any], limit_s: float) -> float:
    before = time.monotonic()
    end_gently(processes, limit_s)
    return time.monotonic() - before


@pytest.mark.engine
def test_shutdown_waits_for_all_processes_at_once(start: Start) -> None:
    processes = [start(0.1), start(0.5), start(0.5)]
    assert 0.5 <= took(processes, 20) < 0.95 * pace(), "one after the other would take longer"
    for process in processes:
        process.join(1)
        assert process.exitcode == 0


@pytest.mark.engine
def test_shutdown_limit_is_one_for_all_processes_and_kills_none(start: Start) -> None:
    slow, quick = start(LIFE_S), start(0.0)
    assert 0.4 <= took([slow, quick], 0.4) < 2 * pace()
    assert slow.is_alive() and not quick.is_alive()


@pytest.mark.engine
def test_those_that_have_ended_are_not_waited_for(start: Start) -> None:
    process = start(0.0)
    process.kill()
    process.join()
    assert took([process], 20) < pace() and took([], 20) < pace()


@pytest.mark.engine
def test_a_signal_ends_the_wait(start: Start) -> None:
    """As the head's own handler does it, on the second Ctrl-C."""

    class Again(Exception):
        pass

    def again(*_: Any) -> None:
        raise Again

    process = start(LIFE_S)  # first: a signal in the middle of a fork would leave locks of this process taken
    before = signal.signal(signal.SIGALRM, again)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Again):
            took([process], 20)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_hushed_startup_logs_warnings_only(caplog: pytest.LogCaptureFixture) -> None:
    logger, parent = logging.getLogger("vllm.somewhere"), logging.getLogger("vllm")
    http = logging.getLogger("uvicorn.error")
    caplog.set_level(logging.INFO, "vllm")
    with quiet():
        logger.info("twice")
        logger.warning("wrong")
        caplog.set_level(logging.INFO, "uvicorn.error")  # as the HTTP server does when it is made
        http.info("started")
    logger.info("later")
    http.info("shutting down")
    http.warning("invalid request")
    http.removeFilter(_is_wrong)
    assert parent.level == logging.INFO
    assert {record.message for record in caplog.records} == {"wrong", "later", "invalid request"}


def test_a_port_that_is_taken_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        args = parse_serve(["m", "--omni", "--host", "127.0.0.1", "--port", str(port)])
        plan: Any = None
        assert server.serve(plan, args) == server.FAILED
    said = f"error: the server cannot listen at --host 127.0.0.1 --port {port}: Address already in use\n"
    assert capsys.readouterr().err == said
