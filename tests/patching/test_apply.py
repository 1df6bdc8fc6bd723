"""All patches are applied or none, once, and never on top of another package's change."""

from __future__ import annotations

import pytest

from vllm_omni_ext.errors import IncompatibleVllm
from vllm_omni_ext.patching.patch import apply_all, apply_on_import


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
    apply_all(patches)
    apply_all(patches)
    module = fake.load()
    assert (module.start("x"), module.stop(), module.Engine().step(), module.Engine.kind()) == (
        "start x!", "stop!", 2, "Engine!",
    )  # fmt: skip


def test_none_is_applied_if_one_target_is_missing(fake):
    with pytest.raises(KeyError, match="fly"):
        apply_all([fake.patch("start", "start", louder), fake.patch("fly", "Engine.fly")])
    assert fake.load().start("x") == "start x"


def test_none_is_applied_if_one_cannot_be_wrapped(fake):
    def broken(original):
        raise RuntimeError("no")

    start = fake.patch("start", "start", louder)
    with pytest.raises(RuntimeError):
        apply_all([start, fake.patch("stop", "stop", broken)])
    assert fake.load().start("x") == "start x"
    apply_all([start, fake.patch("stop", "stop", louder)])
    assert (fake.load().start("x"), fake.load().stop()) == ("start x!", "stop!")


@pytest.mark.parametrize("ours_first", [False, True])
def test_a_target_that_another_package_has_replaced_is_a_conflict(fake, ours_first):
    patch = fake.patch("start", "start", louder)
    if ours_first:
        apply_all([patch])
    fake.load().start = louder(fake.load().start)
    with pytest.raises(IncompatibleVllm, match=r"start: .* was already replaced by tests"):
        apply_all([patch])


def test_an_import_time_patch_is_applied_once(fake):
    patch = fake.patch("start", "start", louder)
    apply_on_import(patch, fake.load())
    apply_on_import(patch, fake.load())
    assert fake.load().start("x") == "start x!"


@pytest.mark.parametrize("qualname", ["fly", "Engine.fly", "Plane.fly"])
def test_an_import_time_patch_without_its_target_does_nothing(fake, qualname):
    apply_on_import(fake.patch("fly", qualname, louder), fake.load())
    assert fake.load().start("x") == "start x"
