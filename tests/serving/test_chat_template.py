"""The chat template that the server uses: the user's, else the family's, else the checkpoint's."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from tests.serving import painter
from vllm_omni_ext.plugins.registry import family_chat_template
from vllm_omni_ext.plugins.spec import API_VERSION, ModelFamily
from vllm_omni_ext.serving.app import with_chat_template

TEMPLATE = "tests.serving:painter.py"
"""A text file in a package."""
OWN = Path(painter.__file__).read_text(encoding="utf-8")


def family(template: str) -> ModelFamily:
    fields = {"architectures": (), "pipelines": (), "runtime": "", "chat_template": template}
    return ModelFamily(name="any", api_version=API_VERSION, **fields)


@pytest.mark.parametrize(
    ("given", "declared", "used"),
    [(None, True, OWN), ("own", True, "own"), ("own", False, "own"), (None, False, None)],
)
def test_the_users_template_comes_before_the_familys(given: str | None, declared: bool, used: str | None) -> None:
    args = Namespace(chat_template=given, host="here")
    found = with_chat_template(args, family(TEMPLATE if declared else ""))
    assert (found.chat_template, found.host, args.chat_template) == (used, "here", given)


def test_a_missing_template_is_an_error() -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.jinja"):
        family_chat_template(family("tests.serving:none.jinja"))
