"""Resolves all names that model families declare, e.g. "package.module:name", for `vllm-omni-ext doctor`.

To resolve a name is to import its module, which may import vLLM and torch. So `doctor` runs this module in another
process: `python -m vllm_omni_ext.plugins.names` prints a JSON object, family name -> list of fault texts.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib import resources
from typing import Any

from vllm_omni_ext.plugins.registry import families
from vllm_omni_ext.plugins.spec import ModelFamily, StageSpec, resolve

LIMIT_S = 300
"""Seconds after which the process is killed: modules of plugins may do anything when they are imported."""

RUNTIME = ("fields", "capabilities", "validate", "plan", "decode")
"""Attributes of every `plugins.runtime.ModelRuntime`."""


def all_faults() -> dict[str, list[str]]:
    """Run this module in another process; return the fault texts (`faults`) of each usable family by family name.

    Raises:
        RuntimeError: the process has failed; the message ends with the process's last line.
    """
    return _imported(tuple(family.name for family in families()), tuple(sys.path))


@cache
def _imported(_: tuple[str, ...], path: tuple[str, ...]) -> dict[str, list[str]]:
    words = [sys.executable, "-m", "vllm_omni_ext.plugins.names"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, env=environment)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"an import of a plugin's names has taken more than {LIMIT_S} s") from None
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [""]
        raise RuntimeError(f"the process that imports the plugins' names has ended: {done.returncode} {last[0]}")
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def faults(family: ModelFamily) -> list[str]:
    """Return a text for each name in a family's fields that cannot be imported or is of the wrong kind.

    Each text begins with the field that has the name. The list is empty if all names are right.
    """
    return [fault for path, name, kind in _names(family) if (fault := _fault(path, name, kind))]


def _names(family: ModelFamily) -> Iterator[tuple[str, str, str]]:
    """Yield (field, name, kind) of every name that a family declares; `kind` is the required kind, e.g. "class"."""
    for field in ("runtime", "http", "facts", "tiny"):
        yield field, getattr(family, field), field
    for name in family.modalities:
        yield "modalities", name, "attribute"
    yield "chat_template", family.chat_template, "file"
    yield "stage_configs", family.stage_configs, "package"
    for pipeline in family.pipelines:
        for stage in pipeline.stages:
            yield from _names_of(stage, f"pipelines.{pipeline.name}.{stage.name}")


def _names_of(stage: StageSpec, path: str) -> Iterator[tuple[str, str, str]]:
    yield f"{path}.params", stage.params, "attribute"
    for architecture, name in stage.models.items():
        yield f"{path}.models.{architecture}", name, "class"
    for group in ("engine", "engine_defaults", "cuda_defaults"):
        for key, value in getattr(stage, group).items():
            if not isinstance(value, str):
                continue
            if key.endswith("_cls") and "." in value:
                yield f"{path}.{group}.{key}", ":".join(value.rsplit(".", 1)), "attribute"
            elif key == "hf_overrides":
                yield f"{path}.{group}.{key}", value, "attribute"


def _fault(path: str, name: str, kind: str) -> str:
    if not name:
        return ""
    try:
        if kind == "package":
            importlib.import_module(name)
            return ""
        module, separator, attribute = name.partition(":")
        if not (module and separator and attribute):
            raise ValueError("it has not the form package.module:name")
        if kind == "file":
            resources.files(module).joinpath(attribute).read_text(encoding="utf-8")
            return ""
        return _wrong_kind(path, name, kind, resolve(name))
    except BaseException as error:  # a module may raise anything, SystemExit too
        return f"{path}: '{name}' cannot be used: {type(error).__name__}: {' '.join(str(error).split())}"


def _wrong_kind(path: str, name: str, kind: str, found: Any) -> str:
    """Return the fault text of an imported object that is not of the required kind; "" if it is of that kind."""
    if kind in ("class", "runtime", "http") and not isinstance(found, type):
        return f"{path}: '{name}' is not a class"
    if kind in ("facts", "tiny") and not callable(found):
        return f"{path}: '{name}' is not a function"
    if kind == "runtime" and (missing := [each for each in RUNTIME if not hasattr(found, each)]):
        return f"{path}: '{name}' has no {', '.join(missing)}"
    if kind == "http":
        wrong = (fault for each in found.apis if (fault := _fault(f"{path}.apis", each, "facts")))
        return next(wrong, "")
    return ""


if __name__ == "__main__":
    print(json.dumps({family.name: faults(family) for family in families()}))
