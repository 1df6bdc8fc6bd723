"""The doctor is quiet when all fits, and fails with a name and a remedy when something does not."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_omni_ext import environment, patches
from vllm_omni_ext.compat import seams_of
from vllm_omni_ext.doctor import main, vllm_sections
from vllm_omni_ext.patching.seams import SEAMS as CORE
from vllm_omni_ext.patching.source import VllmSource
from vllm_omni_ext.patching.spec import split_target
from vllm_omni_ext.plugins.registry import families

SEAMS = (*CORE, *(seam for family in families() for seam in seams_of(family)))


@pytest.fixture
def copy(tmp_path):
    """The files of the installed vLLM that patches and seams are about, in a folder of their own."""
    installed = Path(str(VllmSource.installed().root))
    modules = {split_target(item.target)[0] for item in (*patches.ALL, *SEAMS)}
    names = [Path(*module.split(".")[1:]) for module in modules]
    files = [
        name.with_suffix(".py") if (installed / name).with_suffix(".py").is_file() else name / "__init__.py"
        for name in names
    ]
    for file in [*files, Path("_version.py")]:
        (tmp_path / "vllm" / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(installed / file, tmp_path / "vllm" / file)
    return tmp_path / "vllm"


def replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def lines(root: Path) -> dict[str, dict[str, str]]:
    """Section -> name of each line that is not ok -> its state."""
    return {
        section.title: {line.name: line.state for line in section.lines if not line.ok}
        for section in vllm_sections(root)
    }


@pytest.fixture(scope="module")
def run():
    """The doctor in a process of its own: in this one another test may have applied the patches."""
    code = (
        "import sys; from vllm_omni_ext.cli.main import main; status = main(['doctor', '--json']);"
        "print([m for m in ('vllm', 'torch', 'transformers') if m in sys.modules], file=sys.stderr); sys.exit(status)"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.mark.engine
def test_this_environment_is_fine(run):
    assert run.returncode == 0
    report = json.loads(run.stdout)
    assert report["ok"] is True
    assert {line["name"]: line["state"] for line in report["sections"]["patches"]} == {
        patch.name: "fits" for patch in patches.ALL
    }
    assert {line["name"] for line in report["sections"]["model plugins"]} == {"bagel", "qwen3_omni"}
    assert report["sections"]["seams"][0]["state"] == f"{len(SEAMS)} of {len(SEAMS)} are as tested"


@pytest.mark.engine
def test_it_imports_neither_vllm_nor_torch(run):
    assert run.stderr.splitlines()[-1] == "[]"


def test_the_text_names_every_patch_with_all_about_it(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    for patch in patches.ALL:
        assert all(word in text for word in (patch.name, patch.target, patch.why, patch.upstream, patch.remove_when))


def test_a_copy_of_vllm_fits(copy):
    assert lines(copy) == {"vLLM": {}, "patches": {}, "seams": {}, "overrides at run time": {}}


def test_a_drifted_patch_fails(copy, capsys):
    replace(copy / "entrypoints/llm.py", '"""LLM constructor."""', 'print("another body")')
    assert main(["--vllm-root", str(copy)]) == 1
    out = capsys.readouterr().out
    assert "BAD llm_omni_keyword" in out
    assert "vllm.entrypoints.llm:LLM.__init__ changed in vLLM" in out


def test_a_drifted_seam_fails_and_can_be_accepted_by_name(copy, monkeypatch):
    replace(
        copy / "v1/engine/utils.py", "def bind_engine_zmq_listeners(", "def bind_engine_zmq_listeners(extra=None, *,"
    )
    name = "vllm.v1.engine.utils:bind_engine_zmq_listeners"
    assert list(lines(copy)["seams"]) == ["all", name]
    monkeypatch.setenv("VLLM_OMNI_EXT_ALLOW_DRIFT", name)
    assert lines(copy)["seams"] == {}


def test_a_missing_seam_fails(copy):
    replace(copy / "v1/engine/utils.py", "def launch_core_engines(", "def launch_engines(")
    assert "has no vllm.v1.engine.utils:launch_core_engines" in str(lines(copy)["seams"])


def test_another_version_fails_everywhere(copy):
    (copy / "_version.py").write_text("__version__ = version = '0.33.0'\n")
    found = lines(copy)
    assert "vLLM 0.33.0 is installed" in found["vLLM"]["version"]
    assert set(found["patches"]) == {patch.name for patch in patches.ALL}
    assert len(found["seams"]) == len(SEAMS) + 1


def test_no_vllm_at_all_is_one_line(tmp_path):
    assert list(lines(tmp_path)) == ["vLLM"]


def test_docs_are_written_where_they_are_wanted(tmp_path, capsys):
    assert main(["--write-docs", str(tmp_path / "page.md")]) == 0
    assert (tmp_path / "page.md").read_text().startswith("# What this package changes")


def package(root: Path, name: str, version: str, torch_lines: str = "") -> None:
    (root / name).mkdir()
    (root / name / "__init__.py").touch()
    (root / name / "version.py").write_text(f"__version__ = '{version}'\n{torch_lines}")


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Put packages in front of the installed ones; nothing of them is imported."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)  # a module that is loaded is found before a file
    return lambda *args: package(tmp_path, *args)


def states(section) -> dict[str, tuple[bool, str]]:
    return {line.name: (line.ok, line.state) for line in section.lines}


def test_cuda_builds_beside_a_cpu_torch_are_found(packages):
    packages("torchaudio", "2.11.0+cu130")
    ok, state = states(environment.traps())["torchaudio"]
    assert not ok
    assert state.endswith("pip uninstall torchaudio")


def test_on_a_cuda_torch_they_are_no_trap(packages):
    packages("torch", "2.13.0", "cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n")
    packages("torchaudio", "2.11.0+cu130")
    assert environment.accelerator() == "cuda 13.0"
    assert states(environment.traps())["torchaudio"] == (True, "no conflict")


def test_a_real_vllm_omni_is_said_to_win(packages):
    packages("vllm_omni", "0.30.0")
    ok, state = states(environment.hooks({}))["vllm-omni"]
    assert ok
    assert "it wins" in state


@pytest.mark.parametrize(
    ("variable", "value", "ok"),
    [
        ("TORCH_DEVICE_BACKEND_AUTOLOAD", "0", False),
        ("VLLM_PLUGINS", "another", False),
        ("VLLM_PLUGINS", "another,omni_ext", True),
    ],
)
def test_variables_that_switch_us_off_are_found(variable, value, ok):
    assert (variable not in states(environment.hooks({variable: value}))) is ok


def test_an_entry_point_that_is_missing_is_found(monkeypatch):
    monkeypatch.setattr(environment, "ENTRY_POINTS", (("torch.backends", "nobody", "a test"),))
    assert not environment.hooks({}).ok


@pytest.mark.parametrize(("missing", "extra"), [("12", "[mooncake]"), ("13", "[mooncake-cuda12]")])
def test_mooncake_for_another_cuda_says_which_one_fits(missing, extra, tmp_path, monkeypatch):
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake/__init__.py").touch()
    (tmp_path / "mooncake/engine.py").write_text(f"raise ImportError('libcudart.so.{missing}: cannot open')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "mooncake"]:
        monkeypatch.delitem(sys.modules, name)
    ok, state = states(environment.connectors())["mooncake"]
    assert not ok and f"for CUDA {missing}" in state and extra in state
    sys.modules.pop("mooncake", None)


def test_mooncake_that_cannot_be_imported_says_why(tmp_path, monkeypatch):
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake/__init__.py").touch()
    (tmp_path / "mooncake/engine.py").write_text("raise ImportError('libibverbs.so.1: cannot open')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "mooncake"]:
        monkeypatch.delitem(sys.modules, name)
    ok, state = states(environment.connectors())["mooncake"]
    assert not ok
    assert "libibverbs.so.1" in state
    sys.modules.pop("mooncake", None)
