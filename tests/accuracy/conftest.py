"""The trained checkpoint, the cases, and the answers of one replica of each stage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.server import Server
from tests.accuracy.answers import Answer
from tests.accuracy.broken import answers_of
from tests.accuracy.cases import Case, cases
from tests.support.cluster import LENGTH

CASES = 6


def pytest_addoption(parser: pytest.Parser) -> None:
    """More cases than in the usual run."""
    parser.addoption("--cases", type=int, default=CASES, help=f"requests of each kind (default: {CASES})")


@pytest.fixture(scope="session")
def asked(request: pytest.FixtureRequest) -> list[Case]:
    return cases(request.config.getoption("--cases", CASES))


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained checkpoint; not to be changed."""
    from vllm_omni_ext.model_plugins.qwen3_omni.tiny.qwen3_omni import write_qwen3_omni

    return write_qwen3_omni(tmp_path_factory.mktemp("trained") / "model", trained=True)


@pytest.fixture(scope="module")
def server(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One replica of each stage."""
    with Server(trained, tmp_path_factory.mktemp("usual") / "log", LENGTH) as started:
        yield started


@pytest.fixture(scope="module")
def usual(server: Server, asked: list[Case]) -> dict[str, Answer]:
    """The answers of one replica of each stage."""
    return answers_of(server, asked)
