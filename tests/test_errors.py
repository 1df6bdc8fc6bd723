"""The errors of the package."""

from __future__ import annotations

import inspect

from vllm_omni_ext import errors

ALL = [value for _, value in inspect.getmembers(errors, inspect.isclass) if value.__module__ == errors.__name__]


def test_all_errors_have_one_base_and_are_in_the_tree_of_the_docstring() -> None:
    lines = (errors.__doc__ or "").splitlines()
    assert {cls.__name__ for cls in ALL} == {
        word for line in lines for word in line.split()[:2] if hasattr(errors, word)
    }
    assert all(issubclass(cls, errors.OmniError) for cls in ALL)
