"""The tree of errors."""

from __future__ import annotations

import inspect

import pytest

from vllm_omni_ext import errors

ALL = [value for _, value in inspect.getmembers(errors, inspect.isclass) if value.__module__ == errors.__name__]


def test_the_tree_in_the_docstring_is_complete() -> None:
    assert {cls.__name__ for cls in ALL} == {
        word for line in (errors.__doc__ or "").splitlines() for word in line.split()[:2] if hasattr(errors, word)
    }


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_one_base_for_all(cls: type[Exception]) -> None:
    assert issubclass(cls, errors.OmniError)
    assert cls.__doc__


def test_a_request_error_names_its_parameter() -> None:
    error = errors.RequestError("voice: unknown", parameter="voice")
    assert (str(error), error.parameter) == ("voice: unknown", "voice")
    with pytest.raises(TypeError):
        errors.RequestError("no parameter")  # type: ignore[call-arg]
