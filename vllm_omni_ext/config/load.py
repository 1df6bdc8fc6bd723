"""Reads a stage config: a YAML file, given by its path or by its name in the package of the model's plugin."""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from vllm_omni_ext.config.parse import Names, parse_config
from vllm_omni_ext.config.schema import OmniConfig
from vllm_omni_ext.errors import ConfigError

_SUFFIXES = (".yaml", ".yml")


_TAG = "tag:yaml.org,2002:"


class _StrictLoader(yaml.SafeLoader):
    """YAML loader that raises ConfigError for a duplicate key; PyYAML's own loader uses the last value.

    Numbers below `env` of a stage are read as text, because their spelling counts: 0022, 1:30, 1.10.
    """

    def get_single_node(self) -> yaml.Node | None:
        root: yaml.Node | None = super().get_single_node()
        for stage in _below(_below([root], "stages")):
            sides = _below(_below([stage], "prefill_decode"))
            for variable in _below(_below([stage, *sides], "env")):
                if variable.tag in (f"{_TAG}int", f"{_TAG}float"):
                    variable.tag = f"{_TAG}str"
        return root

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Check the keys of a mapping, before PyYAML adds those of merge keys (`<<`)."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == f"{_TAG}merge":
                continue
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, Hashable):
                raise ConfigError(f"line {line}: key '{key}' is not a plain value")
            if key in seen:
                raise ConfigError(f"line {line}: key '{key}' is written twice; keep one of the two")
            seen.add(key)
        return node


def _below(nodes: Sequence[yaml.Node | None], name: str | None = None) -> list[yaml.Node]:
    """Return the values with the key `name` (None: with any key) in those nodes that are mappings."""
    mappings = [node for node in nodes if isinstance(node, yaml.MappingNode)]
    return [value for node in mappings for key, value in node.value if name is None or key.value == name]


def stage_config_names(package: str) -> tuple[str, ...]:
    """Return the names of the stage configs in a model plugin's package: its YAML files, without `.yaml`.

    The result is empty if `package` is "".
    """
    files = resources.files(package).iterdir() if package else ()
    return tuple(sorted(f.name.removesuffix(".yaml") for f in files if f.name.endswith(".yaml")))


def pipeline_of(source: str | Path, package: str = "") -> str:
    """Return the value of the key `pipeline` in a stage config; "" if it has none.

    Called before `load_config`, because the pipeline determines the valid keys.

    Args:
        source: path of a YAML file, or a name from `stage_config_names(package)`.
        package: package with stage configs; "" if there is none.

    Raises:
        ConfigError: the file is not found or is not YAML.
    """
    data = _content(source, package)
    name = data.get("pipeline") if isinstance(data, dict) else None
    return name if isinstance(name, str) else ""


def load_config(source: str | Path, names: Names, package: str = "") -> OmniConfig:
    """Read a stage config.

    Args:
        source: path of a YAML file, or a name from `stage_config_names(package)`.
        names: valid names of stages, engine fields and parameters.
        package: package with stage configs; "" if there is none.

    Raises:
        ConfigError: the file is not found, is not YAML or has wrong content; the message starts with the source.
    """
    data = _content(source, package)
    try:
        return parse_config(data, names)
    except ConfigError as err:
        raise ConfigError(f"{source}: {err}") from err


def _content(source: str | Path, package: str) -> Any:
    text = _read(source, package)
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except ConfigError as err:
        raise ConfigError(f"{source}: {err}") from err
    except (yaml.YAMLError, ValueError, RecursionError) as err:  # ValueError: e.g. a date without such a day
        raise ConfigError(f"{source}: is not valid YAML: {' '.join(str(err).split())}") from err


def _read(source: str | Path, package: str) -> str:
    path = Path(os.path.expanduser(source))
    try:
        if path.suffix in _SUFFIXES or path.is_file():
            return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{source}: no such stage config file") from None
    except (OSError, ValueError) as err:  # ValueError: not UTF-8, or a path with NUL
        raise ConfigError(f"{source}: cannot be read: {err}") from err
    known = stage_config_names(package)
    if str(source) not in known:
        others = f" or one of {', '.join(known)}" if known else ""
        raise ConfigError(f"{source}: no such stage config; give the path of a .yaml file{others}")
    return resources.files(package).joinpath(f"{source}.yaml").read_text(encoding="utf-8")
