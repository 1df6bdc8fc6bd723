"""Checks of version, target and code, whose errors name the remedy; a checked tree is checked again after a change."""

from __future__ import annotations

import ast
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_omni_ext.errors import IncompatibleVllm
from vllm_omni_ext.patching.check import allowed_drift, check, in_range, inspect
from vllm_omni_ext.patching.fingerprint import extract, fingerprint
from vllm_omni_ext.patching.source import VllmSource
from vllm_omni_ext.patching.spec import Seam, TargetDrifted, TargetMissing, VersionOutOfRange
from vllm_omni_ext.patching.verified_cache import VerifiedCache

NONE = frozenset()


def test_a_changed_target_is_named_with_the_remedy(fake):
    patch = fake.patch("start", "start")
    assert inspect(patch, fake.source).state == "fits"
    fake.rewrite("def start(name):\n    return name\n")
    with pytest.raises(TargetDrifted, match=r"start: .*engine:start changed.*ALLOW_DRIFT=start"):
        check([patch], fake.source, allowed=NONE)


def test_a_missing_target_is_named_and_cannot_be_allowed(fake):
    with pytest.raises(TargetMissing, match=r"has no .*engine:Engine.fly"):
        check([fake.patch("fly", "Engine.fly")], fake.source, allowed=frozenset({"fly"}))
    with pytest.raises(TargetMissing):
        check([fake.patch("other", "start", target=f"{fake.folder.name}.nowhere:start")], fake.source, allowed=NONE)


def test_another_version_is_refused_before_anything_is_read(fake):
    patch = fake.patch("fly", "Engine.fly", vllm=">=0.33")
    with pytest.raises(VersionOutOfRange, match=r"tested with vLLM >=0.33, found 0.32.0"):
        check([patch], fake.source, allowed=NONE)


def test_one_error_names_all_patches_that_do_not_fit(fake):
    patches = [fake.patch("fly", "Engine.fly"), fake.patch("step", "Engine.step", seen=frozenset({"f" * 12}))]
    with pytest.raises(IncompatibleVllm) as caught:
        check(patches, fake.source, allowed=NONE)
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == ["fly", "step"]


def test_drift_is_allowed_by_name_only(fake):
    patches = [fake.patch(name, name, seen=frozenset({"f" * 12})) for name in ("start", "stop")]
    with pytest.raises(TargetDrifted, match=r"^stop:"):
        check(patches, fake.source, allowed=frozenset({"start"}))
    check(patches, fake.source, allowed=frozenset({"start", "stop"}))


@pytest.mark.parametrize(("value", "names"), [("", set()), (" a , b,", {"a", "b"}), ("*", {"*"})])
def test_names_of_allowed_drift_in_the_environment(value, names):
    assert allowed_drift({"VLLM_OMNI_EXT_ALLOW_DRIFT": value}) == names


@pytest.mark.parametrize("version", ["0.32.0", "0.32.4", "0.32.1rc2", "0.32.1+cpu", "0.31.9", "0.33.0"])
def test_only_releases_of_the_tested_version_are_in_range(version):
    assert in_range(version) is version.startswith("0.32.")


def test_a_wheel_is_read_without_installing_it(tmp_path):
    wheel = tmp_path / "vllm-0.32.5-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/_version.py", "__version__ = version = '0.32.5'\n")
        archive.writestr("vllm/sub/__init__.py", "def f():\n    return 1\n")
    source = VllmSource.at(wheel)
    assert source.version == "0.32.5"
    assert source.definition("vllm.sub", "f") == "def f():\n    return 1\n"
    assert source.definition("vllm.sub.nowhere", "f") is None


def test_a_tree_without_a_version_is_refused(tmp_path):
    with pytest.raises(IncompatibleVllm, match="does not name"):
        _ = VllmSource.at(tmp_path).version


BASE = """
def f(a, b=1):
    '''Docstring.'''
    x = a + b  # why
    return f"{x!r:>{b}} and {'y'}"
"""
SAME = {
    "no docstring": BASE.replace("    '''Docstring.'''\n", ""),
    "no comment": BASE.replace("  # why", ""),
    "blank lines": BASE.replace("    x =", "\n\n    x ="),
    "deeper indentation": BASE.replace("    ", "        "),
    "spaces": BASE.replace("a + b", "a  +  b"),
}
OTHER = {
    "default": BASE.replace("b=1", "b=2"),
    "operator": BASE.replace("a + b", "a - b"),
    "inside an f-string": BASE.replace("and", "or"),
    "name": BASE.replace("def f(a", "def f(c"),
    "decorator": BASE.replace("def f", "@staticmethod\ndef f"),
    "string that is used": BASE.replace("'''Docstring.'''", "y = '''Docstring.'''"),
}


def of(text: str, qualname: str = "f") -> str:
    code = extract(ast.parse(text), text.splitlines(keepends=True), qualname)
    assert code is not None
    return fingerprint(code)


@pytest.mark.parametrize("name", [*SAME, *OTHER])
def test_only_changes_of_the_code_change_the_fingerprint(name):
    assert (of((SAME | OTHER)[name]) == of(BASE)) is (name in SAME)


def test_a_method_hashes_as_the_same_function_outside_a_class():
    inside = "class C:\n" + "".join(f"    {line}\n" if line else "\n" for line in BASE.splitlines())
    assert of(inside, "C.f") == of(BASE)


def test_a_fingerprint_is_stable():
    """A literal finds a change of the algorithm and a Python version that parses otherwise."""
    assert of(BASE) == "0a3e3959c9fc"


@pytest.mark.parametrize("qualname", ["g", "f.g", "C", "C.f"])
def test_a_missing_definition_is_none(qualname):
    assert extract(ast.parse(BASE), BASE.splitlines(keepends=True), qualname) is None


SEAM = Seam(target="vllm.a:f", seen=frozenset({"1"}), use="called")
OTHER_SEAM = Seam(target="vllm.b:g", seen=frozenset({"2"}), use="called")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "vllm"
    root.mkdir()
    for name in "ab":
        (root / f"{name}.py").write_text("def f(): ...\n")
    return root


def memo(tree: Path, *seams: Seam) -> VerifiedCache:
    return VerifiedCache(VllmSource(tree), seams, tree.parent / "cache")


def test_an_unchanged_tree_is_not_checked_again(tree: Path) -> None:
    assert not memo(tree, SEAM).known
    memo(tree, SEAM).keep()
    assert memo(tree, SEAM).known
    assert not memo(tree, SEAM, OTHER_SEAM).known
    assert not memo(tree, Seam(target=SEAM.target, seen=frozenset({"3"}), use="called")).known


@pytest.mark.parametrize(
    "change",
    [
        lambda file: file.write_text("def f(): pass\n"),
        lambda file: os.utime(file, ns=(1, 1)),  # of the same size
        Path.unlink,
    ],
    ids=["text", "time", "deleted"],
)
def test_a_changed_file_is_checked_again(tree: Path, change: Callable[[Path], object]) -> None:
    memo(tree, SEAM).keep()
    change(tree / "a.py")
    assert not memo(tree, SEAM).known


def test_a_cache_that_cannot_be_written_is_no_error(tree: Path) -> None:
    (tree.parent / "cache").write_text("not a folder")
    memo(tree, SEAM).keep()
    assert not memo(tree, SEAM).known
