"""For all tests."""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support import examples, goldens, preloaded, processes, workers
from tests.support.capabilities import needs
from tests.support.preloaded import ForkServer

examples.register()
gc.disable()  # until all is imported

GOLDENS = pytest.StashKey[str | None]()
THREADS = pytest.StashKey[int]()
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a file of `benchmarks/` as a module; those that it imports are found there."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """pytest's fixture, with levels as in a new process: imports of some libraries set that of the root logger."""
    root, package = logging.getLogger(), logging.getLogger("vllm_omni_ext")
    level, propagate = root.level, package.propagate
    root.setLevel(logging.WARNING)
    package.propagate = True
    yield caplog
    package.propagate = propagate
    root.setLevel(level)


@pytest.fixture(scope="session", autouse=True)
def own_folders(request: pytest.FixtureRequest) -> Iterator[None]:
    """Files of a test outside of its own folder are separate from those of other test processes."""
    if hasattr(request.config, "workerinput"):
        with workers.own_folders():
            yield
    else:
        yield


@pytest.fixture(scope="session", autouse=True)
def preloaded_starts(own_folders: None) -> Iterator[None]:
    """Servers that tests start have vLLM's modules from the first moment, see `support.preloaded`."""
    with preloaded.starts():
        yield


@pytest.fixture(scope="session", autouse=True)
def certificates_once() -> Iterator[None]:
    """All HTTP clients of a test process share the authorities' certificates: to read them takes a core 16 ms."""
    with pytest.MonkeyPatch.context() as patch:
        for library in ("httpx", "httpx2"):  # the second one is that of `openai`
            make = importlib.import_module(library).create_ssl_context
            patch.setattr(f"{library}._transports.default.create_ssl_context", functools.cache(make))
        yield


@pytest.fixture(scope="session", autouse=True)
def contexts_do_not_wait() -> Iterator[None]:
    """Garbage collection ends no ZMQ context: one with an unsent message would block the test process for ever."""
    with pytest.MonkeyPatch.context() as patch:
        if (zmq := sys.modules.get("zmq")) is not None:
            patch.setattr(zmq.Context, "__del__", lambda context: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def short_configs() -> Iterator[None]:
    """Configs are not shown at length: transformers does that for each field that may be one of several configs."""
    with pytest.MonkeyPatch.context() as patch:
        if (transformers := sys.modules.get("transformers")) is not None:
            patch.setattr(transformers.PreTrainedConfig, "__repr__", object.__repr__)
        yield


@pytest.fixture(scope="module")
def new_processes(preloaded_starts: None) -> Iterator[None]:
    """Servers of this module start as users start them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ForkServer, "start", lambda server, words, log: None)
        yield


@pytest.fixture
def new_process(preloaded_starts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of this test start as users start them."""
    monkeypatch.setattr(ForkServer, "start", lambda server, words, log: None)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A tiny checkpoint; not to be changed."""
    from vllm_omni_ext.model_plugins.qwen3_omni.tiny.qwen3_omni import write_qwen3_omni

    folder = tmp_path_factory.mktemp("tiny")
    yield write_qwen3_omni(folder / "model", seed=0)
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def oracle(tiny: Path) -> Any:
    """Transformers on the tiny checkpoint: an `Oracle`."""
    from tests.support.oracle import Oracle

    return Oracle(tiny)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep tests together that use the same engines."""
    return workers.Groups(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start the longest tests first where several processes share the tests."""
    if hasattr(config, "workerinput"):
        workers.longest_first(items)


def pytest_collection_finish() -> None:
    """Collect garbage again, but never the objects of the imports: one search there takes a second.

    pytest attaches two handlers to every logger that does not propagate, three times a test. torch has 80 of these, for
    logs that are off by default.
    """
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.startswith("torch."):
            logger.propagate = True
    gc.freeze()
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    """Make a folder for results that all test processes of this run share, and watch the processes that tests start."""
    config.stash[GOLDENS] = goldens.begin()
    processes.watch()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the folder, and let extension modules have their objects back, or nanobind reports them as leaks."""
    goldens.end(config.stash.get(GOLDENS, None))
    if hasattr(config, "workerinput"):
        atexit.register(workers.leave)
    else:
        gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Apply the markers; without engines compute with one thread: two wait for each other if other programs run.

    Engines inherit the usual number of threads.
    """
    processes.begin(item)
    if (torch := sys.modules.get("torch")) is not None:
        usual = item.config.stash.setdefault(THREADS, torch.get_num_threads())
        torch.set_num_threads(usual if item.get_closest_marker("engine") else 1)
    for mark in item.iter_markers("needs"):
        needs(*mark.args)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Fail a test that starts a process without the marker `engine`."""
    processes.end()
