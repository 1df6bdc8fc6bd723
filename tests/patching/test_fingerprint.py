"""The fingerprint changes with the code, and with nothing else."""

from __future__ import annotations

import ast

import pytest

from vllm_omni_ext.patching.fingerprint import extract, fingerprint

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


@pytest.mark.parametrize("text", SAME.values(), ids=SAME.keys())
def test_layout_and_comments_do_not_count(text):
    assert of(text) == of(BASE)


@pytest.mark.parametrize("text", OTHER.values(), ids=OTHER.keys())
def test_code_counts(text):
    assert of(text) != of(BASE)


def test_a_method_hashes_as_the_same_function_outside_a_class():
    inside = "class C:\n" + "".join(f"    {line}\n" if line else "\n" for line in BASE.splitlines())
    assert of(inside, "C.f") == of(BASE)


def test_a_fingerprint_is_stable():
    """A literal, so that a change of the algorithm, or another Python version, is noticed."""
    assert of(BASE) == "0a3e3959c9fc"


@pytest.mark.parametrize("qualname", ["g", "f.g", "C", "C.f"])
def test_what_is_not_there_is_none(qualname):
    assert extract(ast.parse(BASE), BASE.splitlines(keepends=True), qualname) is None
