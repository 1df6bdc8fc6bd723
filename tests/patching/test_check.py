"""Changed and missing symbols are named with the remedy; a definition is found, and hashed by its code alone."""

from __future__ import annotations

import zipfile

import pytest

from vllm_omni_ext.errors import IncompatibleVllm
from vllm_omni_ext.patching.seams import allowed_drift, check
from vllm_omni_ext.patching.source import VllmSource, extract, fingerprint

NONE = frozenset()


def test_a_changed_symbol_is_named_with_the_remedy(fake):
    expected = fake.fingerprints("start", "stop")
    check(expected, fake.source, allowed=NONE)
    fake.rewrite(fake.text.replace('return f"start', 'return f"begin'))
    with pytest.raises(IncompatibleVllm, match=r"^\S+engine:start changed in vLLM 0.32.0 .*_DRIFT=\S+engine:start"):
        check(expected, fake.source, allowed=NONE)


def test_a_missing_symbol_is_named_and_cannot_be_allowed(fake):
    expected = fake.fingerprints("Engine.fly")
    with pytest.raises(IncompatibleVllm, match=r"has no .*engine:Engine.fly$"):
        check(expected, fake.source, allowed=frozenset(expected))
    with pytest.raises(IncompatibleVllm, match=r"has no .*nowhere:start$"):
        check({f"{fake.folder.name}.nowhere:start": "0" * 12}, fake.source, allowed=NONE)


def test_one_error_names_all_symbols_that_do_not_fit(fake):
    expected = fake.fingerprints("Engine.fly", "start") | {fake.target("Engine.step"): "f" * 12}
    with pytest.raises(IncompatibleVllm) as caught:
        check(expected, fake.source, allowed=NONE)
    missing, changed = str(caught.value).splitlines()
    assert missing.endswith("Engine.fly") and changed.startswith(fake.target("Engine.step"))


def test_a_change_is_allowed_by_name_only(fake):
    expected = {fake.target(name): "f" * 12 for name in ("start", "stop")}
    with pytest.raises(IncompatibleVllm, match=rf"^{fake.target('stop')} changed[^\n]*$"):
        check(expected, fake.source, allowed=frozenset({fake.target("start")}))
    check(expected, fake.source, allowed=frozenset(expected))


@pytest.mark.parametrize(("value", "names"), [("", set()), (" a , b,", {"a", "b"}), ("*", {"*"})])
def test_names_of_allowed_changes_in_the_environment(value, names):
    assert allowed_drift({"VLLM_OMNI_EXT_ALLOW_DRIFT": value}) == names


def test_a_wheel_is_read_without_installing_it(tmp_path):
    wheel = tmp_path / "vllm-0.32.5-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/_version.py", "__version__ = version = '0.32.5'\n")
        archive.writestr("vllm/sub/__init__.py", "def f():\n    return 1\n")
    source = VllmSource.at(wheel)
    assert source.version == "0.32.5"
    assert source.definition("vllm.sub:f") == "def f():\n    return 1\n"
    assert source.definition("vllm.sub.nowhere:f") is None


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
    code = extract(text, qualname)
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


PLACES = """
@first
@second(
    1,
)
# a comment
class A:
    x = 1

    @property
    def f(self):
        def f():
            return 0

        return f

    async def g(self,
          b=2):
        return '''
text
'''
    # another comment

    y = 1


def f(): return 2
z = 3
"""


@pytest.mark.parametrize(
    ("qualname", "first", "last"),
    [("A", "@first", "    y = 1"), ("A.f", "@property", "    return f"), ("A.g", "    async def g(self,", "'''"),
     ("f", "def f(): return 2", "def f(): return 2")],
)  # fmt: skip
def test_a_definition_has_its_decorators_and_ends_with_its_last_line(qualname, first, last):
    lines = extract(PLACES, qualname).rstrip().splitlines()
    assert (lines[0], lines[-1]) == (first, last)


@pytest.mark.parametrize("qualname", ["g", "y", "A.x", "A.h", "A.f.g", "B", "B.f"])
def test_a_missing_definition_is_none(qualname):
    assert extract(PLACES, qualname) is None
