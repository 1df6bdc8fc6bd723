"""All patches are applied or none, once, and never on top of another package's change."""

from __future__ import annotations

import pytest

from vllm_omni_ext.errors import IncompatibleVllm
from vllm_omni_ext.patching.apply import apply_all
from vllm_omni_ext.patching.patch_target import apply_on_import, is_applied
from vllm_omni_ext.patching.spec import PatchConflict

NONE = frozenset()


def louder(original):
    def replacement(*args):
        return f"{original(*args)}!"

    return replacement


def test_patches_are_applied_once_to_functions_methods_and_class_methods(fake):
    patches = [
        fake.patch("start", "start", louder),
        fake.patch("stop", "stop", louder),  # decorated
        fake.patch("step", "Engine.step", lambda original: lambda self: original(self) + 1),
        fake.patch("kind", "Engine.kind", lambda original: classmethod(lambda cls: original.__func__(cls) + "!")),
    ]
    assert apply_all(patches, fake.source, allowed=NONE) == ["start", "stop", "step", "kind"]
    assert apply_all(patches, fake.source, allowed=NONE) == []
    module = fake.load()
    assert (module.start("x"), module.stop(), module.Engine().step(), module.Engine.kind()) == (
        "start x!", "stop!", 2, "Engine!",
    )  # fmt: skip


def test_none_is_applied_if_one_does_not_fit(fake):
    patches = [fake.patch("start", "start", louder), fake.patch("fly", "Engine.fly")]
    with pytest.raises(IncompatibleVllm):
        apply_all(patches, fake.source, allowed=NONE)
    assert fake.load().start("x") == "start x"
    assert not is_applied(patches[0], fake.load())


def test_none_is_applied_if_one_cannot_be_wrapped(fake):
    def broken(original):
        raise RuntimeError("no")

    patches = [fake.patch("start", "start", louder), fake.patch("stop", "stop", broken)]
    with pytest.raises(RuntimeError):
        apply_all(patches, fake.source, allowed=NONE)
    assert fake.load().start("x") == "start x"
    patches[1] = fake.patch("stop", "stop", louder)
    assert apply_all(patches, fake.source, allowed=NONE) == ["start", "stop"]


@pytest.mark.parametrize("ours_first", [False, True])
def test_a_target_that_another_package_has_replaced_is_a_conflict(fake, ours_first):
    patch = fake.patch("start", "start", louder)
    if ours_first:
        apply_all([patch], fake.source, allowed=NONE)
    fake.load().start = louder(fake.load().start)
    with pytest.raises(PatchConflict, match=r"start: .* was already replaced by tests"):
        apply_all([patch], fake.source, allowed=NONE)


def test_two_patches_of_one_target_are_a_conflict(fake):
    with pytest.raises(PatchConflict, match=r"two: .* already changed by one"):
        apply_all([fake.patch("one", "start"), fake.patch("two", "start")], fake.source, allowed=NONE)


def test_import_time_patches_are_checked_but_not_applied_here(fake):
    patch = fake.patch("start", "start", louder, when="import")
    assert apply_all([patch], fake.source, allowed=NONE) == []
    assert not is_applied(patch, fake.load())
    apply_on_import(patch, fake.load())
    apply_on_import(patch, fake.load())
    assert fake.load().start("x") == "start x!"


@pytest.mark.parametrize("qualname", ["fly", "Engine.fly", "Plane.fly"])
def test_an_import_time_patch_without_its_target_does_nothing(fake, qualname):
    apply_on_import(fake.patch("fly", qualname, louder, when="import"), fake.load())
    assert fake.load().start("x") == "start x"
