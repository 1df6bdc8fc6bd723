"""A tree is checked again whenever anything has changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vllm_omni_ext.patching.source import VllmSource
from vllm_omni_ext.patching.spec import Seam
from vllm_omni_ext.patching.verified_cache import VerifiedCache

SEAM = Seam(target="vllm.a:f", seen=frozenset({"1"}), use="called")
OTHER = Seam(target="vllm.b:g", seen=frozenset({"2"}), use="called")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "vllm"
    root.mkdir()
    for name in "ab":
        (root / f"{name}.py").write_text("def f(): ...\n")
    return root


def memo(tree: Path, *seams: Seam) -> VerifiedCache:
    return VerifiedCache(VllmSource(tree), seams, tree.parent / "cache")


def test_verified_files_are_not_checked_again(tree: Path) -> None:
    assert not memo(tree, SEAM).known
    memo(tree, SEAM).keep()
    assert memo(tree, SEAM).known


def test_a_changed_file_is_not_known(tree: Path) -> None:
    memo(tree, SEAM).keep()
    (tree / "a.py").write_text("def f(): pass\n")
    assert not memo(tree, SEAM).known


def test_a_file_of_the_same_size_and_another_time_is_not_known(tree: Path) -> None:
    memo(tree, SEAM).keep()
    os.utime(tree / "a.py", ns=(1, 1))
    assert not memo(tree, SEAM).known


def test_other_seams_and_other_fingerprints_are_not_known(tree: Path) -> None:
    memo(tree, SEAM).keep()
    assert not memo(tree, SEAM, OTHER).known
    assert not memo(tree, Seam(target=SEAM.target, seen=frozenset({"3"}), use="called")).known


def test_a_module_that_is_gone_is_not_known(tree: Path) -> None:
    memo(tree, SEAM).keep()
    (tree / "a.py").unlink()
    assert not memo(tree, SEAM).known


def test_unwritable_cache_verifies_every_time(tree: Path) -> None:
    (tree.parent / "cache").write_text("not a folder")
    memo(tree, SEAM).keep()
    assert not memo(tree, SEAM).known
