"""docs/configuration.md and the schema say the same."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from vllm_omni_ext.config.schema import OmniConfig, PrefillDecode, Schema, StageConfig, keys
from vllm_omni_ext.topology.layers import SHARED_FIELDS

DOCUMENT = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")


def rows(schema: Schema) -> list[str]:
    default_of = {f.name: getattr(schema(), f.name) for f in fields(schema)}
    return [
        f"| `{name}` | `{text(default_of[name])}` | {key.unit} | {key.text} |" for name, key in keys(schema).items()
    ]


def text(default: object) -> str:
    if isinstance(default, dict):
        return f"{{{', '.join(f'{name}: {each}' for name, each in default.items())}}}"
    return {"None": "null", "True": "true", "False": "false"}.get(str(default), str(default))


@pytest.mark.parametrize("schema", [OmniConfig, StageConfig, PrefillDecode])
def test_tables_are_the_schema(schema: Schema) -> None:
    assert "\n".join(rows(schema)) + "\n" in DOCUMENT


def test_tables_hold_nothing_else() -> None:
    documented = [line for line in DOCUMENT.splitlines() if line.startswith("| `") and line.count("|") == 5]
    assert documented == rows(OmniConfig) + rows(StageConfig) + rows(PrefillDecode)


def test_shared_flags_are_listed() -> None:
    assert ", ".join(f"`{name}`" for name in sorted(SHARED_FIELDS)) in DOCUMENT
