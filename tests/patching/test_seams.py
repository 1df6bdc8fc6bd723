"""All patches and seams fit the installed vLLM; another vLLM is refused."""

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
CHECK = """
import sys
from vllm_omni_ext.compat import seams_of
from vllm_omni_ext.patching.seams import SEAMS, check_seams
from vllm_omni_ext.plugins.registry import families

for seams in (SEAMS, *map(seams_of, families())):
    check_seams(seams)
print([name for name in sys.modules if name.split(".")[0] in ("vllm", "torch")])
"""


@pytest.fixture(scope="module")
def installed():
    return VllmSource.installed()


def test_every_patch_and_seam_fits_the_installed_vllm(installed):
    findings = inspect_all([*patches.ALL, *ALL_SEAMS], installed, allowed=frozenset())
    assert {finding.item.name: finding.state for finding in findings if finding.state != "fits"} == {}


def test_every_patch_is_listed_with_a_reason_and_every_target_once():
    assert [name for name, count in Counter(seam.target for seam in ALL_SEAMS).items() if count > 1] == []
    files = {file.stem for file in (ROOT / "patches").glob("*.py")} - {"__init__"}
    assert files == {patch.name for patch in patches.ALL}
    assert len({patch.target for patch in patches.ALL}) == len(patches.ALL)
    for patch in patches.ALL:
        assert patch.why and patch.remove_when and patch.upstream.startswith(("https://", "none: "))


@pytest.mark.engine
def test_seams_are_checked_without_importing_vllm():
    done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


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


def test_a_changed_seam_is_found_and_a_changed_comment_does_not_matter(tmp_path, installed):
    seams = [seam for seam in SEAMS if seam.target.startswith("vllm.v1.core.sched.scheduler:")]
    name = "vllm.v1.core.sched.scheduler:Scheduler.has_requests"
    source = doctored(tmp_path / "a", installed, "def has_requests(self) -> bool:", "def has_requests(self) -> int:")
    with pytest.raises(IncompatibleVllm, match=rf"^{name}: {name} changed[^\n]*$"):
        check(seams, source, allowed=frozenset())
    check(seams, source, allowed=frozenset({name}))
    source = doctored(tmp_path / "b", installed, "# Override the interface default", "# Another comment")
    check(seams, source, allowed=frozenset())


def test_an_incomplete_tree_is_refused(tmp_path, installed):
    source = doctored(tmp_path, installed, "class Scheduler", "class Scheduler")
    with pytest.raises(IncompatibleVllm, match=r"has no vllm.entrypoints"):
        check_seams(SEAMS, source, allowed=frozenset())


def test_another_or_a_missing_vllm_is_refused_with_the_remedy(tmp_path, installed, monkeypatch):
    assert compat.require_vllm(installed) == installed.version
    for version in ("0.31.2", "0.33.0"):
        (tmp_path / "_version.py").write_text(f"__version__ = version = '{version}'\n")
        with pytest.raises(IncompatibleVllm, match=f"vLLM {version} is installed, but .* needs .*; pip install"):
            compat.require_vllm(VllmSource(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(IncompatibleVllm, match="vLLM is not installed; pip install"):
        compat.require_vllm()
