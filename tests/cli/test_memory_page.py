"""docs/memory.md holds the tables that the planner makes."""

from __future__ import annotations

import runpy
from functools import cache
from pathlib import Path

import pytest

from benchmarks import memory_page
from dev import pages

PAGE = Path(__file__).parents[2] / "docs" / "memory.md"


@cache
def tables() -> str:
    """The tables, made once."""
    return memory_page.tables()


@pytest.mark.slow
def test_the_page_has_the_tables_of_the_planner() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert f"{memory_page.BEGIN}{tables()}{memory_page.END}" in text, "run: make docs"


@pytest.mark.slow
def test_both_generated_pages_are_written(monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "memory.md"
    page.write_text(f"before\n{memory_page.BEGIN}old\n{memory_page.END}after\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    pages.write(Path("docs"))
    runpy.run_path(str(PAGE.parents[1] / "benchmarks" / "memory_page.py"), run_name="__main__")
    assert page.read_text() == f"before\n{memory_page.BEGIN}{tables()}{memory_page.END}after\n"
    assert (tmp_path / "docs" / "patches.md").is_file()
