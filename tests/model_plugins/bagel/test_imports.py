"""The model's computation imports nothing else of this package, and no vLLM."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "model_plugins" / "bagel"
FAMILY, SPEC = FOLDER / "family.py", "vllm_omni_ext.plugins.spec"
"""The one module that declares what the core may use, and the one module of the core that it needs for that."""
OWN = "vllm_omni_ext.model_plugins.bagel."


def imported(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    names = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return names | {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}


def test_it_imports_nothing_of_the_core() -> None:
    found = {name for file in FOLDER.glob("*.py") for name in imported(file) - ({SPEC} if file == FAMILY else set())}
    allowed = {"torch", "numpy", "PIL", "safetensors", "tokenizers", *sys.stdlib_module_names}
    strange = {name for name in found if not (name + ".").startswith(OWN) and name.partition(".")[0] not in allowed}
    assert strange == set()


@pytest.mark.engine
def test_a_plan_is_made_without_heavy_modules() -> None:
    code = (
        f"import sys, {OWN}parameters\n"
        "print([name for name in ('torch', 'vllm', 'PIL', 'numpy') if name in sys.modules])\n"
        f"import {OWN}stages.facts\n"
        "print('vllm' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "False"]
