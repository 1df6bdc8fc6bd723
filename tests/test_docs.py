"""Files and functions named on the pages about the code exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ("architecture", "qwen3-omni", "replicas", "connectors", "prefill-decode")
PAGE = "\n".join((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in PAGES)
FOLDERS = (ROOT, ROOT / "vllm_omni_ext", ROOT / "model_plugins" / "qwen3_omni")
PARTS = ("orchestrator", "engine", "runtime/launch", "runtime/supervise", "runtime/client")
"""Folders of files that are named without a folder."""

FILE_AND_NAME = re.compile(r"`([\w/]+\.py):([\w.]+)`")


def files_named(text: str) -> set[str]:
    """Everything in the text that looks like a file or a folder of this repository."""
    return set(re.findall(r"[\w.][\w./-]*\.(?:py|yaml|md)\b", text)) | set(re.findall(r"`([\w/]+/)`", text))


def find(name: str) -> list[Path]:
    """The files a name may stand for."""
    near = [*FOLDERS, *(ROOT / "vllm_omni_ext" / part for part in PARTS), ROOT / "docs"]
    return [folder / name for folder in (*near, ROOT / "tests" / "processes") if (folder / name).exists()]


def test_every_path_exists() -> None:
    assert sorted(name for name in files_named(PAGE) if not find(name)) == []


def test_every_function_exists() -> None:
    missing = [
        f"{file}:{name}"
        for file, name in FILE_AND_NAME.findall(PAGE)
        if not any(_defines(path, name.split(".")) for path in find(file))
    ]
    assert missing == []


def _defines(path: Path, names: list[str]) -> bool:
    text = path.read_text(encoding="utf-8")
    return all(re.search(rf"^\s*(async )?(def|class) {name}\b", text, re.MULTILINE) for name in names)
