"""Model plugins as installed packages: modules with metadata, in a folder on the path."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vllm_omni_ext.plugins import registry

Install = Callable[..., None]

HEAD = "from vllm_omni_ext.plugins.spec import EdgeSpec, ModelFamily, PipelineSpec, StageSpec\n"
PAINTER = """
CANVAS = StageSpec(name="canvas", models={"PainterModel": "painter_models:Canvas"})
PIPELINE = PipelineSpec(name="painter", stages=(CANVAS,), frontend="canvas", modalities=("image",))
FAMILY = ModelFamily(
    name="painter", api_version=2, architectures=("Painter",), pipelines=(PIPELINE,), runtime="painter:Runtime"
)
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a distribution whose entry points name objects of one module, made of the given source.

    Both are gone after the test.
    """
    names: list[str] = []
    monkeypatch.syspath_prepend(str(tmp_path))

    def add(distribution: str, source: str = PAINTER, *, entry: str = "painter", version: str = "1.0") -> None:
        module = f"{distribution.replace('-', '_')}_module"
        names.append(module)
        (tmp_path / f"{module}.py").write_text(HEAD + source)
        info = tmp_path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[vllm_omni_ext.models]\n{entry} = {module}:FAMILY\n")
        registry.plugins.cache_clear()

    registry.plugins.cache_clear()
    yield add
    registry.plugins.cache_clear()
    for name in names:
        sys.modules.pop(name, None)
