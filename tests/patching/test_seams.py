"""All patches and seams fit the installed vLLM; another vLLM is refused, and compared with the nearest version."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from dev import pages
from vllm_omni_ext import compat, doctor
from vllm_omni_ext.errors import IncompatibleVllm
from vllm_omni_ext.patching import seams
from vllm_omni_ext.patching.seams import AT_START, BY_DOCTOR, CORE, check, nearest
from vllm_omni_ext.patching.source import INSTALL, VllmSource

ROOT = Path(__file__).parents[2]
PACKAGES = doctor.own_packages()
LISTED = [target for package in PACKAGES for group in seams.seams(package).values() for target in group]
CHECK = """
import sys
from vllm_omni_ext.compat import activate, require_seams
from vllm_omni_ext.plugins.registry import families

activate()
for family in families():
    require_seams(family)
print([name for name in sys.modules if name.split(".")[0] in ("vllm", "torch")])
"""


@pytest.fixture(scope="module")
def installed():
    return VllmSource.installed()


@pytest.mark.parametrize("package", PACKAGES)
def test_the_fingerprints_are_those_of_the_installed_vllm(package, installed):
    """If this fails: read the differences, adapt what depends on them, then `doctor --write-fingerprints`."""
    assert seams.fingerprints(package, installed.version) == doctor.measured(package, installed)


def test_every_symbol_is_listed_once_and_is_in_a_supported_vllm():
    targets = [*LISTED, *(patch.target for patch in compat.PATCHES)]
    assert [name for name, count in Counter(targets).items() if count > 1] == []
    known = {
        target
        for package in PACKAGES
        for version in seams.versions(package)
        for group in seams.fingerprints(package, version).values()
        for target in group
    }
    assert known == set(targets)


def test_every_patch_is_listed_has_a_reason_and_is_checked_at_start(installed):
    files = (ROOT / "patches").glob("*.py")
    modules = [vars(importlib.import_module(f"vllm_omni_ext.patches.{file.stem}")) for file in files]
    found = [patch for module in modules for patch in (module.get("PATCH"), *module.get("PATCHES", ())) if patch]
    assert {patch.name for patch in found} == {patch.name for patch in compat.PATCHES}
    for patch in compat.PATCHES:
        assert patch.when and patch.why and patch.remove_when and patch.upstream.startswith(("https://", "none: "))
    checked = seams.fingerprints(CORE, installed.version)[AT_START]
    assert {patch.target for patch in compat.PATCHES} <= checked.keys()


@pytest.mark.engine
def test_a_start_is_checked_without_importing_vllm():
    done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_page_is_up_to_date():
    assert (ROOT / "docs/patches.md").read_text().endswith(f"\n{pages.patches()}"), "run `make docs`"


def test_the_supported_versions_are_those_that_are_installed_with_the_package():
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    wanted = next(Requirement(each) for each in wanted if each.startswith("vllm"))
    known = [f"0.{minor}" for minor in range(20, 60) if wanted.specifier.contains(f"0.{minor}.1")]
    assert known == seams.versions()
    assert f"'{wanted}'".replace("<0.34,>=0.32", ">=0.32,<0.34") in INSTALL
    for package in PACKAGES:
        assert seams.versions(package) == seams.versions()


@pytest.mark.parametrize("version", ["0.32.0", "0.32.4", "0.33.1rc2", "0.33.0+cpu", "0.31.9", "0.34.0", "0.34.0rc1"])
def test_only_releases_of_a_tested_version_are_supported(version):
    assert seams.is_supported(version) is version.startswith(("0.32.", "0.33."))


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """A package with seams of its own, and fingerprints of several versions."""
    folder = tmp_path / "some_plugin"
    (folder / "fingerprints").mkdir(parents=True)
    (folder / "__init__.py").touch()
    for version in ("0.9", "0.32", "0.34"):
        (folder / f"fingerprints/{version}.json").write_text(json.dumps({AT_START: {}, BY_DOCTOR: {"of": version}}))
    listed = '[checked_by_doctor."vllm.v1.engine.core"]\n"EngineCore.sleep" = "called"\ng = "not there"\n'
    (folder / "seams.toml").write_text(listed)
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    sys.modules.pop("some_plugin", None)


@pytest.mark.parametrize(
    ("version", "expected"),
    [("0.34.2", "0.34"), ("0.35.0", "0.34"), ("0.33.0", "0.32"), ("0.32.0", "0.32"), ("0.10.1", "0.9"), ("0.1", "0.9")],
)
def test_an_unknown_version_is_compared_with_the_one_before_it(plugin, version, expected):
    assert nearest(version, plugin.name) == expected
    assert seams.fingerprints(plugin.name, version)[BY_DOCTOR] == {"of": expected}


def test_fingerprints_of_a_plugin_are_written_into_its_package(plugin, installed, capsys):
    assert doctor.main(["--write-fingerprints", plugin.name]) == 0
    file = plugin / f"fingerprints/{seams.series(installed.version)}.json"
    assert capsys.readouterr().out == f"{file}\n  not in vLLM {installed.version}: vllm.v1.engine.core:g\n"
    found = json.loads(file.read_text())
    assert found == doctor.measured(plugin.name, installed)
    assert list(found[BY_DOCTOR]) == ["vllm.v1.engine.core:EngineCore.sleep"]
    check(found[BY_DOCTOR], installed, allowed=frozenset())


def test_a_package_without_fingerprints_is_refused_with_the_remedy(plugin):
    for file in plugin.glob("fingerprints/*.json"):
        file.unlink()
    with pytest.raises(IncompatibleVllm, match=r"some_plugin has no fingerprints; run .* some_plugin`$"):
        nearest("0.32.0", plugin.name)


def doctored(tmp_path: Path, installed: VllmSource, old: str, new: str) -> VllmSource:
    """A vLLM tree with one function changed in one file."""
    file = tmp_path / "vllm/v1/core/sched/scheduler.py"
    file.parent.mkdir(parents=True)
    text = (installed.root / "v1/core/sched/scheduler.py").read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    (tmp_path / "vllm/_version.py").write_text((installed.root / "_version.py").read_text())
    return VllmSource.at(tmp_path)


def test_a_changed_seam_is_found_and_a_changed_comment_does_not_matter(tmp_path, installed):
    known = seams.fingerprints(CORE, installed.version)[BY_DOCTOR]
    expected = {target: seen for target, seen in known.items() if target.startswith("vllm.v1.core.sched.scheduler:")}
    name = "vllm.v1.core.sched.scheduler:Scheduler.has_requests"
    source = doctored(tmp_path / "a", installed, "def has_requests(self) -> bool:", "def has_requests(self) -> int:")
    with pytest.raises(IncompatibleVllm, match=rf"^{name} changed[^\n]*$"):
        check(expected, source, allowed=frozenset())
    check(expected, source, allowed=frozenset({name}))
    source = doctored(tmp_path / "b", installed, "# Override the interface default", "# Another comment")
    check(expected, source, allowed=frozenset())


def test_an_incomplete_tree_is_refused_at_start(tmp_path, installed, monkeypatch):
    source = doctored(tmp_path, installed, "class Scheduler", "class Scheduler")
    monkeypatch.setattr(VllmSource, "installed", lambda: source)
    with pytest.raises(IncompatibleVllm, match=r"has no vllm.entrypoints.llm:LLM.__init__"):
        compat.activate.__wrapped__()


class Newer(VllmSource):
    """The installed vLLM under the number of a later one."""

    @property
    def version(self):
        return "9.0.1"


def test_a_newer_vllm_starts_with_a_warning_if_nothing_differs(installed, caplog, monkeypatch):
    newer = Newer(installed.root)
    known = seams.series(installed.version)
    monkeypatch.setattr(seams, "nearest", lambda version, package="": known)
    assert compat.require_vllm(newer) == "9.0.1"
    assert "vLLM 9.0.1 is not tested: tested are 0.32.* or 0.33.*" in caplog.text


def test_a_newer_vllm_is_refused_with_all_that_differs(tmp_path, installed, monkeypatch):
    changed = doctored(tmp_path, installed, "class Scheduler", "class Scheduler")
    known = seams.series(installed.version)
    monkeypatch.setattr(seams, "nearest", lambda version, package="": known)
    with pytest.raises(IncompatibleVllm, match=r"vLLM 9.0.1 is newer than .*0\.32\.\* or 0\.33\.\*") as caught:
        compat.require_vllm(Newer(changed.root))
    assert "vLLM 9.0.1 has no vllm.v1.core.block_pool:BlockPool.touch" in str(caught.value)


def test_another_or_a_missing_vllm_is_refused_with_the_remedy(tmp_path, installed, monkeypatch):
    assert compat.require_vllm(installed) == installed.version
    (tmp_path / "_version.py").write_text("__version__ = version = '0.31.2'\n")
    with pytest.raises(IncompatibleVllm, match=r"vLLM 0.31.2 is installed, but .* 0\.32\.\* or 0\.33\.\*; pip install"):
        compat.require_vllm(VllmSource(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(IncompatibleVllm, match="vLLM is not installed; pip install"):
        compat.require_vllm()
