"""Each name of a family is resolved; a wrong one is reported with its field."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_omni_ext import doctor
from vllm_omni_ext.plugins import names
from vllm_omni_ext.plugins.names import all_faults, faults
from vllm_omni_ext.plugins.spec import ModelFamily, PipelineSpec, StageSpec

HERE = "names_of_a_family"
SOURCE = """
class Runtime:
    fields = capabilities = validate = plan = decode = None

class Empty: ...

class Http:
    apis = ("names_of_a_family:facts",)

class Other:
    apis = ("names_of_a_family:fact",)

def facts(): ...
"""
STAGE = StageSpec(
    name="canvas",
    models={"Canvas": f"{HERE}:Runtime"},
    params=f"{HERE}:Empty",
    engine={"worker_cls": f"{HERE}.Runtime", "scheduler_cls": f"{HERE}.Empty", "hf_overrides": f"{HERE}:facts"},
)
FAMILY = ModelFamily(
    name="canvas",
    api_version=2,
    architectures=("Canvas",),
    pipelines=(PipelineSpec(name="canvas", stages=(STAGE,), frontend="canvas", modalities=("image",)),),
    runtime=f"{HERE}:Runtime",
    http=f"{HERE}:Http",
    facts=f"{HERE}:facts",
    tiny=f"{HERE}:facts",
    chat_template="names_with_files:chat.jinja",
    stage_configs="names_with_files",
)


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{HERE}.py").write_text(SOURCE)
    (tmp_path / "names_that_fail.py").write_text("raise SystemExit(3)")
    (tmp_path / "names_with_files").mkdir()
    (tmp_path / "names_with_files" / "__init__.py").write_text("")
    (tmp_path / "names_with_files" / "chat.jinja").write_text("{{ messages }}")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_family_whose_names_exist_has_no_fault() -> None:
    assert faults(FAMILY) == []


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "runtime": ({"runtime": "no_such_module:Runtime"}, "ModuleNotFoundError: No module named 'no_such_module'"),
    "http": ({"http": f"{HERE}:Htp"}, "'names_of_a_family:Htp' cannot be used: AttributeError"),
    "tiny": ({"tiny": HERE}, "it has not the form package.module:name"),
    "facts": ({"facts": "names_that_fail:facts"}, "SystemExit: 3"),
    "modalities": ({"modalities": (f"{HERE}:SMELL",)}, "AttributeError"),
    "chat_template": ({"chat_template": "names_with_files:chat.j2"}, "FileNotFoundError"),
    "stage_configs": ({"stage_configs": "names_with_file"}, "ModuleNotFoundError"),
    "http.apis": ({"http": f"{HERE}:Other"}, "'names_of_a_family:fact' cannot be used: AttributeError"),
}


@pytest.mark.parametrize("field", WRONG)
def test_a_wrong_name_of_a_family_is_reported_with_its_field(field: str) -> None:
    changes, why = WRONG[field]
    (found,) = faults(replace(FAMILY, **changes))
    assert found.startswith(f"{field}: ") and why in found


@pytest.mark.parametrize(
    ("field", "changes", "why"),
    [
        ("params", {"params": f"{HERE}:Params"}, "AttributeError"),
        ("models.Canvas", {"models": {"Canvas": f"{HERE}:Canvas"}}, "AttributeError"),
        ("models.Canvas", {"models": {"Canvas": f"{HERE}:facts"}}, "is not a class"),
        ("engine.worker_cls", {"engine": {"worker_cls": f"{HERE}.Worker"}}, "AttributeError"),
        ("cuda_defaults.scheduler_cls", {"cuda_defaults": {"scheduler_cls": "a.b.C"}}, "ModuleNotFoundError"),
        ("engine.hf_overrides", {"engine": {"hf_overrides": f"{HERE}:canvas"}}, "AttributeError"),
    ],
)
def test_a_wrong_name_of_a_stage_is_reported_with_its_path(field: str, changes: dict[str, Any], why: str) -> None:
    pipeline = replace(FAMILY.pipelines[0], stages=(replace(STAGE, **changes),))
    (found,) = faults(replace(FAMILY, pipelines=(pipeline,)))
    assert found.startswith(f"pipelines.canvas.canvas.{field}: ") and why in found


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"runtime": f"{HERE}:Empty"}, "has no fields, capabilities, validate, plan, decode"),
        ({"runtime": f"{HERE}:facts"}, "is not a class"),
        ({"tiny": "names_of_a_family:Http.apis"}, "AttributeError"),
    ],
)
def test_a_name_of_the_wrong_kind_is_reported(changes: dict[str, str], why: str) -> None:
    (found,) = faults(replace(FAMILY, **changes))
    assert why in found


def test_a_process_that_cannot_import_the_families_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    names._imported.cache_clear()
    done = SimpleNamespace(returncode=7, stdout="", stderr="a traceback\nthe last line\n")
    monkeypatch.setattr(subprocess, "run", lambda words, **keywords: done)
    with pytest.raises(RuntimeError, match="has ended: 7 the last line"):
        all_faults()
    (line,) = doctor.models().lines
    assert (line.name, line.ok) == ("names", False) and "the last line" in line.state
