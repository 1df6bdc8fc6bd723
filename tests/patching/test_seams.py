"""The installed vLLM is the one all our patches and seams were written against."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from vllm_omni_ext import compat, doctor, patches
from vllm_omni_ext.errors import IncompatibleVllm
from vllm_omni_ext.patching.check import check, inspect_all
from vllm_omni_ext.patching.seams import SEAMS, check_seams
from vllm_omni_ext.patching.source import VllmSource
from vllm_omni_ext.plugins.registry import families

ROOT = Path(__file__).parents[2]
ALL_SEAMS = (*SEAMS, *(seam for family in families() for seam in compat.seams_of(family)))
BUDGET_S = 2.0
CHECK = """
import sys, time
from vllm_omni_ext.compat import seams_of
from vllm_omni_ext.patching.seams import SEAMS, check_seams
from vllm_omni_ext.plugins.registry import families

def once():
    started = time.process_time()
    for seams in (SEAMS, *map(seams_of, families())):
        check_seams(seams)
    return time.process_time() - started

times = [once()]
while times[-1] >= float(sys.argv[1]) and len(times) < 3:  # the machine was busy, maybe
    times.append(once())
print(times[-1], *[name for name in sys.modules if name.split(".")[0] in ("vllm", "torch")])
"""


@pytest.fixture(scope="module")
def installed():
    return VllmSource.installed()


def test_every_patch_and_seam_fits_the_installed_vllm(installed):
    findings = inspect_all([*patches.ALL, *ALL_SEAMS], installed, allowed=frozenset())
    assert {finding.item.name: finding.state for finding in findings if finding.state != "fits"} == {}


def test_targets_are_listed_once():
    assert [name for name, count in Counter(seam.target for seam in ALL_SEAMS).items() if count > 1] == []


@pytest.mark.engine
def test_seams_are_checked_quickly_and_without_importing_vllm():
    result = subprocess.run([sys.executable, "-c", CHECK, str(BUDGET_S)], capture_output=True, text=True, check=True)
    seconds, *imported = result.stdout.split()
    assert imported == []
    assert float(seconds) < BUDGET_S


def test_one_file_a_patch_and_all_of_them_listed():
    files = {file.stem for file in (ROOT / "patches").glob("*.py")} - {"__init__"}
    assert files == {patch.name for patch in patches.ALL}
    assert len({patch.target for patch in patches.ALL}) == len(patches.ALL)


@pytest.mark.parametrize("patch", patches.ALL, ids=lambda patch: patch.name)
def test_a_patch_says_why_and_until_when(patch):
    assert patch.why and patch.remove_when
    assert patch.upstream.startswith(("https://", "none: "))


def test_the_page_is_up_to_date():
    assert (ROOT / "docs/patches.md").read_text() == doctor.page(), "run `make docs`"


def doctored(tmp_path: Path, installed: VllmSource, old: str, new: str) -> VllmSource:
    """A vLLM tree with one function changed in one file."""
    file = tmp_path / "vllm/v1/core/sched/scheduler.py"
    file.parent.mkdir(parents=True)
    text = (installed.root / "v1/core/sched/scheduler.py").read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    (tmp_path / "vllm/_version.py").write_text((installed.root / "_version.py").read_text())
    return VllmSource.at(tmp_path)


def scheduler_seams():
    return [seam for seam in SEAMS if seam.target.startswith("vllm.v1.core.sched.scheduler:")]


def test_a_changed_seam_is_found(tmp_path, installed):
    source = doctored(tmp_path, installed, "def has_requests(self) -> bool:", "def has_requests(self) -> int:")
    with pytest.raises(IncompatibleVllm, match=r"Scheduler.has_requests changed") as caught:
        check(scheduler_seams(), source, allowed=frozenset())
    assert len(str(caught.value).splitlines()) == 1
    check(scheduler_seams(), source, allowed=frozenset({"vllm.v1.core.sched.scheduler:Scheduler.has_requests"}))


def test_a_changed_comment_is_not(tmp_path, installed):
    source = doctored(tmp_path, installed, "# Override the interface default", "# Another comment")
    check(scheduler_seams(), source, allowed=frozenset())


def test_an_incomplete_tree_is_refused(tmp_path, installed):
    source = doctored(tmp_path, installed, "class Scheduler", "class Scheduler")
    with pytest.raises(IncompatibleVllm, match=r"has no vllm.entrypoints"):
        check_seams(SEAMS, source, allowed=frozenset())


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0"])
def test_another_vllm_is_refused_in_one_sentence(tmp_path, version):
    (tmp_path / "_version.py").write_text(f"__version__ = version = '{version}'\n")
    with pytest.raises(IncompatibleVllm, match=f"vLLM {version} is installed, but .* needs .*; pip install") as caught:
        compat.require_vllm(VllmSource(tmp_path))
    assert "\n" not in str(caught.value)


def test_the_installed_vllm_is_accepted(installed):
    assert compat.require_vllm(installed) == installed.version


def test_a_missing_vllm_is_refused(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(IncompatibleVllm, match="vLLM is not installed; pip install"):
        compat.require_vllm()
