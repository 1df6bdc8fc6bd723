"""Which chat template the server uses: the user's, else the family's, else the checkpoint's."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

import pytest

from vllm_omni_ext.plugins.registry import family_chat_template
from vllm_omni_ext.plugins.spec import API_VERSION, ModelFamily
from vllm_omni_ext.serving.app import with_chat_template

OWN = "{{ 'own' }}"


def family(template: str = "") -> ModelFamily:
    return ModelFamily(
        name="any", api_version=API_VERSION, architectures=(), pipelines=(), runtime="", chat_template=template
    )


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package with a template of the name `chat.jinja`."""
    folder = tmp_path / "template_package"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "chat.jinja").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, folder.name, raising=False)
    return folder.name


@pytest.mark.parametrize(
    ("said", "declared", "used"),
    [
        (None, True, OWN),
        ("{{ 'said' }}", True, "{{ 'said' }}"),
        ("{{ 'said' }}", False, "{{ 'said' }}"),
        (None, False, None),
    ],
)
def test_whose_template(said: str | None, declared: bool, used: str | None, package: str) -> None:
    args = Namespace(chat_template=said, host="here")
    found = with_chat_template(args, family(f"{package}:chat.jinja" if declared else ""))
    assert (found.chat_template, found.host) == (used, "here")
    assert args.chat_template == said


def test_a_file_that_is_not_there(package: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.jinja"):
        family_chat_template(family(f"{package}:none.jinja"))
