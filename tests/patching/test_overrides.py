"""Every attribute of another package that is replaced at run time is declared."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_omni_ext.doctor import own_packages
from vllm_omni_ext.patching.seams import overrides

ROOT = Path(__file__).parents[2]
OURS = ("vllm_omni_ext", "__future__")
OVERRIDES = [override for package in own_packages() for override in overrides(package)]
DECLARED = {ROOT / override["where"] for override in OVERRIDES}
ALLOWED = {"tempfile.tempdir", "sys.argv"}
"""Settings of the standard library, which are meant to be assigned."""


def foreign_names(tree: ast.Module) -> set[str]:
    """Return the names in a module that are modules or objects of other packages."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {(each.asname or each.name).split(".")[0] for each in node.names if not each.name.startswith(OURS)}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith(OURS):
            names |= {each.asname or each.name for each in node.names}
    return names


def root_of(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def replaced(path: Path) -> Iterator[str]:
    """Find assignments to attributes of objects of other packages."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    foreign = foreign_names(tree)
    for node in ast.walk(tree):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            for each in target.elts if isinstance(target, ast.Tuple) else (target,):
                text = ast.unparse(each)
                if isinstance(each, ast.Attribute) and root_of(each) in foreign and text not in ALLOWED:
                    yield text


@pytest.mark.slow
def test_assignments_to_foreign_attributes_are_declared() -> None:
    files = [path for folder in ("vllm_omni_ext", "model_plugins", "patches") for path in (ROOT / folder).rglob("*.py")]
    undeclared = {str(path.relative_to(ROOT)): found for path in files if (found := list(replaced(path)))}
    assert {path for path in undeclared if ROOT / path not in DECLARED} == set(), undeclared


def test_the_scan_finds_an_assignment(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("import torch\nfrom os import path\ntorch.a.b = 1\npath.join = 2\nself.x = 3\n")
    assert list(replaced(tmp_path / "module.py")) == ["torch.a.b", "path.join"]


@pytest.mark.parametrize("override", OVERRIDES, ids=lambda override: override["target"][:40])
def test_an_override_has_a_place_a_reason_and_an_end(override) -> None:
    assert (ROOT / override["where"]).is_file()
    assert override["scope"] and override["why"] and override["remove_when"]
    assert len(override) == 5
