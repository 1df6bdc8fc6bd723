"""Find and read a stage config: a YAML file, or the name of one that comes with the package."""

from __future__ import annotations

from collections.abc import Hashable
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from vllm_omni_ext.config.parse import Names, parse_config
from vllm_omni_ext.config.schema import OmniConfig
from vllm_omni_ext.errors import ConfigError

_PACKAGE = "vllm_omni_ext.stage_configs"
_SUFFIXES = (".yaml", ".yml")


class _StrictLoader(yaml.SafeLoader):
    """YAML, but a key written twice is an error instead of a silent last one wins."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, Hashable):
                raise ConfigError(f"line {line}: key '{key}' is not a plain value")
            if key in seen:
                raise ConfigError(f"line {line}: key '{key}' is written twice; keep one of the two")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def packaged_names() -> tuple[str, ...]:
    """Names of the stage configs that come with the package."""
    files = resources.files(_PACKAGE).iterdir()
    return tuple(sorted(f.name.removesuffix(".yaml") for f in files if f.name.endswith(".yaml")))


def load_config(source: str | Path, names: Names) -> OmniConfig:
    """Read a stage config.

    Args:
        source: path of a YAML file, or a name from `packaged_names()`.
        names: what the file may refer to.

    Raises:
        ConfigError: not found, not YAML, or wrong content; the message starts with the source.
    """
    text = _read(source)
    try:
        return parse_config(yaml.load(text, Loader=_StrictLoader), names)
    except ConfigError as err:
        raise ConfigError(f"{source}: {err}") from err
    except yaml.YAMLError as err:
        raise ConfigError(f"{source}: is not valid YAML: {' '.join(str(err).split())}") from err


def _read(source: str | Path) -> str:
    path = Path(source).expanduser()
    try:
        if path.suffix in _SUFFIXES or path.is_file():
            return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{source}: no such stage config file") from None
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"{source}: cannot be read: {err}") from err
    if str(source) not in packaged_names():
        known = ", ".join(packaged_names())
        raise ConfigError(f"{source}: no such stage config; give the path of a .yaml file or one of {known}")
    return resources.files(_PACKAGE).joinpath(f"{source}.yaml").read_text(encoding="utf-8")
