"""docs/architecture.md names every module, and everything it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
SOURCES = ("vllm_omni_ext", "model_plugins", "patches", "stage_configs")
FOLDERS = (ROOT, ROOT / "vllm_omni_ext", ROOT / "model_plugins" / "qwen3_omni")
PARTS = ("orchestrator", "engine", "runtime")
"""Where a file may be that is named without its folder."""

FILE_AND_NAME = re.compile(r"`([\w/]+\.py):([\w.]+)`")


def files_named(text: str) -> set[str]:
    """Everything in the text that looks like a file or a folder of this repository."""
    return set(re.findall(r"[\w.][\w./-]*\.(?:py|yaml|md)\b", text)) | set(re.findall(r"`([\w/]+/)`", text))


def find(name: str) -> list[Path]:
    """The files a name may stand for."""
    near = [*FOLDERS, *(ROOT / "vllm_omni_ext" / part for part in PARTS), ROOT / "docs"]
    return [folder / name for folder in near if (folder / name).exists()]


@pytest.mark.parametrize("source", SOURCES)
def test_every_module_is_in_the_table(source: str) -> None:
    named = set(re.findall(r"^\| `([\w/]+\.py)` \|", PAGE, re.MULTILINE))
    files = {str(file.relative_to(ROOT)) for file in (ROOT / source).rglob("*.py")}
    assert sorted(files - named) == []
    assert sorted(name for name in named if name.startswith(f"{source}/") and name not in files) == []


def test_every_path_exists() -> None:
    assert sorted(name for name in files_named(PAGE) if not find(name)) == []


def test_every_function_exists() -> None:
    missing = [
        f"{file}:{name}"
        for file, name in FILE_AND_NAME.findall(PAGE)
        if not any(_defines(path, name.split(".")) for path in find(file))
    ]
    assert missing == []


def test_no_line_of_text_is_too_long() -> None:
    assert [line for line in PAGE.splitlines() if len(line) > 120 and not line.startswith("|")] == []


def _defines(path: Path, names: list[str]) -> bool:
    text = path.read_text(encoding="utf-8")
    return all(re.search(rf"^\s*(async )?(def|class) {name}\b", text, re.MULTILINE) for name in names)
