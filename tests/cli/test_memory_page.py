"""docs/memory.md holds the tables that the planner makes."""

from __future__ import annotations

import runpy
from functools import cache
from pathlib import Path

from benchmarks import memory_page
from vllm_omni_ext import doctor

PAGE = Path(__file__).parents[2] / "docs" / "memory.md"


@cache
def tables() -> str:
    """The tables, made once."""
    return memory_page.tables()


def test_the_page_is_in_step() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert f"{memory_page.BEGIN}{tables()}{memory_page.END}" in text, "run: make docs"


def test_the_tables_are_written_between_the_marks(tmp_path: Path) -> None:
    page = tmp_path / "memory.md"
    page.write_text(f"before\n{memory_page.BEGIN}old\n{memory_page.END}after\n", encoding="utf-8")
    memory_page.write(page)
    assert page.read_text() == f"before\n{memory_page.BEGIN}{tables()}{memory_page.END}after\n"


def test_the_table_has_every_machine() -> None:
    lines = tables().splitlines()
    for count in memory_page.COUNTS:
        rows = [line for line in lines if line.startswith(f"| {count} |")]
        assert len(rows) == len(memory_page.TABLES)
        assert all(row.count("|") == len(memory_page.CARDS) + 2 for row in rows)
    [one_card, *_] = [line for line in lines if line.startswith("| 1 |")]
    assert "| `--quantization fp8`: " in one_card
    titles = [line.partition(",")[0] for line in lines if "--stage-config" in line and not line.startswith("|")]
    assert titles == ["Qwen3-Omni-30B-A3B"] * 2 + ["BAGEL-7B-MoT"] * 2


def test_both_generated_pages_are_written(monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "memory.md").write_text(f"{memory_page.BEGIN}{memory_page.END}", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert doctor.main(["--write-docs"]) == 0
    runpy.run_path(str(PAGE.parents[1] / "benchmarks" / "memory_page.py"), run_name="__main__")
    assert tables() in (tmp_path / "docs" / "memory.md").read_text()
    assert (tmp_path / "docs" / "patches.md").is_file()
