"""The doctor passes when everything fits, and names each mistake with a remedy."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from dev import pages
from vllm_omni_ext import doctor, environment, patching, resampling
from vllm_omni_ext.compat import PATCHES
from vllm_omni_ext.doctor import main, packages, vllm_sections
from vllm_omni_ext.errors import IncompatibleVllm
from vllm_omni_ext.patching.seams import fingerprints, seams, series
from vllm_omni_ext.patching.source import VllmSource

VERSION = VllmSource.installed().version
LISTED = {target for package in packages() for group in seams(package).values() for target in group}
KNOWN = {t for package in packages() for group in fingerprints(package, VERSION).values() for t in group}
SEAMS = sorted(LISTED & KNOWN)
"""Symbols that the installed version has."""


@pytest.fixture(autouse=True)
def names(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a test that starts processes imports the names of all families."""
    if request.node.get_closest_marker("engine") is None:
        monkeypatch.setattr(doctor, "all_faults", dict)


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A copy of the files of the installed vLLM that have targets of patches and seams, in place of it."""
    installed = Path(str(VllmSource.installed().root))
    modules = {target.partition(":")[0] for target in (*(patch.target for patch in PATCHES), *SEAMS)}
    names = [installed.joinpath(*module.split(".")[1:]) for module in modules]
    files = [name / "__init__.py" if name.is_dir() else name.with_suffix(".py") for name in names]
    for file in [*files, installed / "_version.py"]:
        place = tmp_path / "vllm" / file.relative_to(installed)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, place)
    monkeypatch.setattr(VllmSource, "installed", lambda: VllmSource(tmp_path / "vllm"))
    return tmp_path / "vllm"


def replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def wrong() -> dict[str, dict[str, str]]:
    """Return section -> name of each line that is not ok -> its state."""
    return {
        section.title: {line.name: line.state for line in section.lines if not line.ok} for section in vllm_sections()
    }


@pytest.mark.engine
def test_this_environment_is_fine_and_is_checked_without_vllm_or_torch():
    """In a process of its own: another test may have applied the patches in this one."""
    code = (
        "import sys; from vllm_omni_ext.cli.main import main; status = main(['doctor', '--json']);"
        "print([m for m in ('vllm', 'torch', 'transformers') if m in sys.modules], file=sys.stderr); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (0, "[]")
    report = json.loads(done.stdout)
    assert report["ok"] is True
    assert {line["name"]: line["state"] for line in report["sections"]["patches"]} == {
        patch.name: "fits" for patch in PATCHES
    }
    assert {line["name"] for line in report["sections"]["model plugins"]} == {
        "bagel",
        "qwen2_5_omni",
        "qwen3_omni",
    }
    assert (
        report["sections"]["seams"][0]["state"] == f"{len(SEAMS)} of {len(SEAMS)} are those of vLLM {series(VERSION)}"
    )


def test_the_text_has_everything_about_every_patch(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    for patch in PATCHES:
        assert all(word in text for word in (patch.name, patch.target, patch.why, patch.upstream, patch.remove_when))


@pytest.mark.slow
def test_a_changed_vllm_fails(copy, capsys, monkeypatch):
    assert wrong() == {"vLLM": {}, "patches": {}, "seams": {}, "overrides at run time": {}}
    replace(copy / "entrypoints/llm.py", '"""LLM constructor."""', 'print("another body")')
    assert main([]) == 1
    out = capsys.readouterr().out
    assert "BAD llm_omni_keyword" in out and "vllm.entrypoints.llm:LLM.__init__ changed in vLLM" in out
    name = "vllm.v1.engine.utils:bind_engine_zmq_listeners"
    replace(
        copy / "v1/engine/utils.py", "def bind_engine_zmq_listeners(", "def bind_engine_zmq_listeners(extra=None, *,"
    )
    assert list(wrong()["seams"]) == ["all", name]
    monkeypatch.setenv("VLLM_OMNI_EXT_ALLOW_DRIFT", name)
    assert wrong()["seams"] == {}
    replace(copy / "v1/engine/utils.py", "def launch_core_engines(", "def launch_engines(")
    assert "has no vllm.v1.engine.utils:launch_core_engines" in str(wrong()["seams"])


@pytest.mark.slow
def test_another_version_fails_and_is_compared_with_the_nearest_one(copy, monkeypatch):
    (copy / "_version.py").write_text("__version__ = version = '9.0.1'\n")
    monkeypatch.setattr(patching.seams, "nearest", lambda version, package="": series(VERSION))
    replace(copy / "v1/engine/utils.py", "def launch_core_engines(", "def launch_engines(")
    version, *others = (section.lines for section in vllm_sections())
    assert "vLLM 9.0.1 is newer than the versions" in version[0].state
    assert "vLLM 9.0.1 has no vllm.v1.engine.utils:launch_core_engines" in version[0].state
    assert (version[1].name, version[1].state) == ("supported", "0.32.* or 0.33.*")
    assert list(wrong()["seams"]) == ["all", "vllm.v1.engine.utils:launch_core_engines"]
    assert others[1][0].state == f"{len(SEAMS) - 1} of {len(SEAMS)} are those of vLLM {series(VERSION)}"


def test_no_vllm_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(VllmSource, "installed", lambda: VllmSource(tmp_path / "nothing"))
    assert list(wrong()) == ["vLLM"]


def test_a_broken_wheel_is_one_line(tmp_path, capsys):
    wheel = tmp_path / "vllm-0.33.0-py3-none-any.whl"
    wheel.write_text("no wheel")
    with pytest.raises(IncompatibleVllm, match=rf"^--against {wheel}: cannot be read: File is not a zip file$"):
        main(["--against", str(wheel)])


@pytest.mark.slow
def test_another_vllm_is_compared_with_the_installed_one(copy, tmp_path, capsys):
    assert main(["--against", str(copy)]) == 0
    other = shutil.copytree(copy, tmp_path / "other")
    utils = other / "v1/engine/utils.py"
    replace(utils, "def bind_engine_zmq_listeners(", "def bind_engine_zmq_listeners(*, extra=None, ")
    replace(utils, "def launch_core_engines(", "def launch_engines(")
    replace(other / "v1/engine/core.py", "def has_work(self)", "def has_work(self, now=False)")
    (other / "_version.py").write_text("__version__ = version = '0.33.0'\n")
    capsys.readouterr()
    assert main(["--against", str(other), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    total = len(SEAMS) + len(PATCHES)
    assert report["sections"]["vLLM"][2]["state"] == f"fits: {total - 3}, additions only: 1, changed: 1, gone: 1"
    found = {state: [line["name"] for line in report["sections"][state]] for state in ("additions only", "gone")}
    assert found == {
        "additions only": ["vllm.v1.engine.core:EngineCoreProc.has_work"],
        "gone": ["vllm.v1.engine.utils:launch_core_engines"],
    }
    [changed] = report["sections"]["changed"]
    assert (changed["ok"], changed["state"]) == (False, "imitated: one pair of listeners a replica and API server")
    assert "+def bind_engine_zmq_listeners(*, extra=None, " in changed["diff"].splitlines()
    utils.write_text((copy / "v1/engine/utils.py").read_text())
    assert main(["--against", str(other)]) == 0  # an addition
    assert "+def has_work(self, now=False)" in capsys.readouterr().out


def test_docs_are_written_after_the_text_that_is_there(tmp_path):
    file = tmp_path / "patches.md"
    for head in ("# Head\n", ""):
        file.write_text(f"{head}{pages.GENERATED}old\n")
        pages.write(tmp_path)
        assert file.read_text() == head + pages.patches()


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


@pytest.mark.parametrize("missing", ["nvcc", "curand.h", "ninja", "", "flashinfer", "cuda", "jit"])
def test_flashinfers_sampler_needs_a_cuda_toolkit(packages, tmp_path, monkeypatch, missing):
    """vLLM's sampler would end thinker and talker in their warm-up."""
    packages("torch", "2.13.0", f"cuda: Optional[str] = {'None' if missing == 'cuda' else repr('13.0')}\n")
    for name in ("flashinfer", "flashinfer_jit_cache"):
        if missing == name or (name == "flashinfer_jit_cache" and missing != "jit"):
            continue
        packages(name, "0.7")
    monkeypatch.setattr(environment, "DEFAULT_CUDA_HOME", str(tmp_path / "none"))
    toolkit = tmp_path / "cuda"
    (toolkit / "include").mkdir(parents=True)
    for file in ("bin/nvcc", "include/curand.h", "ninja"):
        if missing != "jit" and not file.endswith(missing or "-"):
            (toolkit / file).parent.mkdir(exist_ok=True)
            (toolkit / file).touch(mode=0o755)
    found = [{"PATH": f"{toolkit}/bin:{toolkit}"}, {"PATH": str(toolkit), "CUDA_HOME": str(toolkit)}]
    expected = missing if missing in ("nvcc", "curand.h", "ninja") else ""
    assert [environment.missing_for_flashinfer(environ) for environ in found] == [expected] * 2


def test_cuda_builds_next_to_a_torch_for_the_cpu_are_mistakes(packages):
    packages("torchaudio", "2.11.0+cu130")
    ok, state = states(environment.traps())["torchaudio"]
    assert not ok and state.endswith("pip uninstall torchaudio")
    packages("torch", "2.13.0", "cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n")
    assert environment.accelerator() == "cuda 13.0"
    assert states(environment.traps())["torchaudio"] == (True, "no conflict")


@pytest.mark.parametrize("installed", ["scipy", "av", None])
def test_sound_is_converted_with_a_package_that_works(monkeypatch, installed):
    monkeypatch.setattr(resampling, "find_spec", lambda name: object() if name in (installed, "soxr") else None)
    monkeypatch.setitem(resampling.METHODS, "soxr", ("soxr", Mock(side_effect=OSError("libsoxr.so.0"))))
    parser = SimpleNamespace(audio_resampler=SimpleNamespace(method="torchaudio"))
    processor = SimpleNamespace(data_parser=parser, info=SimpleNamespace(data_parser=parser))
    resampling.use_available(SimpleNamespace(mm_processor=processor))
    method = {"scipy": "scipy", "av": "pyav", None: None}[installed]
    assert (resampling.available(), parser.audio_resampler.method) == (method, method or "torchaudio")
    [line] = [line for line in environment.traps().lines if line.name == "sample rates of sound"]
    assert line.ok == (method is not None)


def test_the_real_vllm_omni_has_precedence(packages):
    packages("vllm_omni", "0.30.0")
    ok, state = states(environment.hooks({}))["vllm-omni"]
    assert ok and "it wins" in state


@pytest.mark.parametrize(
    ("variable", "value", "ok"),
    [
        ("TORCH_DEVICE_BACKEND_AUTOLOAD", "0", False),
        ("VLLM_PLUGINS", "another", False),
        ("VLLM_PLUGINS", "another,omni_ext", True),
    ],
)
def test_variables_that_disable_this_package_are_mistakes(variable, value, ok):
    assert (variable not in states(environment.hooks({variable: value}))) is ok


def test_a_missing_entry_point_is_a_mistake(monkeypatch):
    monkeypatch.setattr(environment, "ENTRY_POINTS", (("torch.backends", "nobody", "a test"),))
    assert not environment.hooks({}).ok


@pytest.mark.parametrize(
    ("missing", "advice"),
    [
        ("libcudart.so.12", r"for CUDA 12.*\[mooncake\]"),
        ("libcudart.so.13", r"for CUDA 13.*\[mooncake-cuda12\]"),
        ("libibverbs.so.1", r"libibverbs\.so\.1"),
    ],
)
def test_a_mooncake_that_cannot_be_imported_is_a_mistake(missing, advice, tmp_path, monkeypatch):
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake/__init__.py").touch()
    (tmp_path / "mooncake/engine.py").write_text(f"raise ImportError('{missing}: cannot open')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "mooncake"]:
        monkeypatch.delitem(sys.modules, name)
    ok, state = states(environment.connectors())["mooncake"]
    assert not ok and re.search(advice, state)
    sys.modules.pop("mooncake", None)
