"""Version first, then the target, then its code; each failure says what to do."""

from __future__ import annotations

import zipfile

import pytest

from vllm_omni_ext.errors import IncompatibleVllm
from vllm_omni_ext.patching.check import allowed_drift, check, in_range, inspect
from vllm_omni_ext.patching.source import VllmSource
from vllm_omni_ext.patching.spec import TargetDrifted, TargetMissing, VersionOutOfRange

NONE = frozenset()


def test_an_unchanged_target_fits(fake):
    assert inspect(fake.patch("start", "start"), fake.source).state == "fits"


def test_a_changed_target_is_named_with_what_to_do(fake):
    patch = fake.patch("start", "start")
    fake.rewrite("def start(name):\n    return name\n")
    with pytest.raises(TargetDrifted, match=r"start: .*engine:start changed.*ALLOW_DRIFT=start"):
        check([patch], fake.source, allowed=NONE)


def test_a_missing_target_is_named(fake):
    with pytest.raises(TargetMissing, match=r"has no .*engine:Engine.fly"):
        check([fake.patch("fly", "Engine.fly")], fake.source, allowed=NONE)
    with pytest.raises(TargetMissing):
        check([fake.patch("other", "start", target=f"{fake.folder.name}.nowhere:start")], fake.source, allowed=NONE)


def test_another_version_is_refused_before_anything_is_read(fake):
    patch = fake.patch("fly", "Engine.fly", vllm=">=0.33")
    with pytest.raises(VersionOutOfRange, match=r"tested with vLLM >=0.33, found 0.32.0"):
        check([patch], fake.source, allowed=NONE)


def test_all_that_do_not_fit_are_named_at_once(fake):
    patches = [fake.patch("fly", "Engine.fly"), fake.patch("step", "Engine.step", seen=frozenset({"f" * 12}))]
    with pytest.raises(IncompatibleVllm) as caught:
        check(patches, fake.source, allowed=NONE)
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == ["fly", "step"]


def test_drift_is_allowed_by_name_only(fake):
    patches = [fake.patch(name, name, seen=frozenset({"f" * 12})) for name in ("start", "stop")]
    with pytest.raises(TargetDrifted, match=r"^stop:"):
        check(patches, fake.source, allowed=frozenset({"start"}))
    check(patches, fake.source, allowed=frozenset({"start", "stop"}))


def test_a_missing_target_cannot_be_allowed(fake):
    with pytest.raises(TargetMissing):
        check([fake.patch("fly", "Engine.fly")], fake.source, allowed=frozenset({"fly"}))


@pytest.mark.parametrize(
    ("value", "names"), [("", set()), ("a", {"a"}), (" a , b,", {"a", "b"}), ("all", {"all"}), ("*", {"*"})]
)
def test_names_in_the_environment(value, names):
    assert allowed_drift({"VLLM_OMNI_EXT_ALLOW_DRIFT": value}) == names


@pytest.mark.parametrize(
    ("version", "tested"),
    [
        ("0.32.0", True),
        ("0.32.4", True),
        ("0.32.1rc2", True),
        ("0.32.1+cpu", True),
        ("0.31.9", False),
        ("0.33.0", False),
    ],
)
def test_range(version, tested):
    assert in_range(version) is tested


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
