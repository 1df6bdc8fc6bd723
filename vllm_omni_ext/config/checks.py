"""What a configuration value may be: one small object a rule, used by the schema and by the error text."""

from __future__ import annotations

import difflib
import ipaddress
import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from vllm_omni_ext.errors import ConfigError


@dataclass(frozen=True)
class Check:
    """A rule for one value.

    Attributes:
        expected: completes "must be ...", e.g. "an integer >= 1".
        accepts: whether a value satisfies the rule.
        convert: turns an accepted value into its stored form.
    """

    expected: str
    accepts: Callable[[Any], bool]
    convert: Callable[[Any], Any] = lambda value: value

    def __call__(self, path: str, value: Any) -> Any:
        """Return the stored form of `value`; ConfigError names `path` and the rule."""
        if not self.accepts(value):
            raise ConfigError(f"{path}: must be {self.expected}, got {value!r}")
        return self.convert(value)

    def or_word(self, word: str) -> Check:
        """The same rule, with one word allowed."""
        return Check(
            f"{self.expected}, or {word}",
            lambda value: value == word or self.accepts(value),
            lambda value: value if value == word else self.convert(value),
        )

    def or_none(self) -> Check:
        """The same rule, with null allowed."""
        return Check(
            f"{self.expected}, or null",
            lambda value: value is None or self.accepts(value),
            lambda value: None if value is None else self.convert(value),
        )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


def _has_text_keys(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


def integer(*, at_least: int, at_most: int | None = None) -> Check:
    """An integer within bounds; booleans are not integers."""
    bounds = f">= {at_least}" if at_most is None else f"from {at_least} to {at_most}"
    return Check(
        f"an integer {bounds}",
        lambda value: _is_int(value) and at_least <= value and (at_most is None or value <= at_most),
    )


def seconds(*, at_least: float | None = None) -> Check:
    """A duration, longer than nothing; stored as a float."""
    if at_least is None:
        return Check("a number of seconds > 0", lambda value: _is_number(value) and value > 0, float)
    return Check(f"a number of seconds >= {at_least:g}", lambda value: _is_number(value) and value >= at_least, float)


def one_of(*names: str) -> Check:
    """One of a few words."""
    return Check(f"one of {', '.join(names)}", lambda value: isinstance(value, str) and value in names)


LB_POLICIES = ("least-queue-length", "random", "round-robin")
"""Names of the load balancing policies, the default first; `pool.policies.POLICIES` implements them."""

KV_CONNECTORS = ("mooncake", "nixl")
"""Names of what moves a KV cache between replicas, the default first; `disaggregation.parameters` knows them."""

SHORTEST_HEARTBEAT_TIMEOUT_S = 1.0
"""Less than this the control plane does not work with; as in `coordinator.timing`."""

AUTO = "auto"
LARGEST_PORT = 65535

LB_POLICY = one_of(*LB_POLICIES)
PORT = integer(at_least=1, at_most=LARGEST_PORT)


def _is_chunk_sizes(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(_is_int(size) and size >= 1 for size in value)
    return isinstance(value, str) and value == ALL_AT_ONCE


ALL_AT_ONCE = "all"
ADAPTIVE = "adaptive"
CHUNK_SIZES = Check(
    "a list of sizes >= 1 such as [4, 25], or 'all'",
    _is_chunk_sizes,
    lambda value: value if isinstance(value, str) else tuple(value),
)
EVERYTHING = "all"
"""In place of a list of hosts and networks: nothing is refused."""

_HOST = re.compile(r"(?=.*[a-z])[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?", re.IGNORECASE)


def as_network(word: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    """An address, or a network such as 10.0.0.0/8; None for what is neither."""
    try:
        return ipaddress.ip_network(word.strip("[]"), strict=False)
    except ValueError:
        return None


def _is_host_or_network(word: str) -> bool:
    return as_network(word) is not None or _HOST.fullmatch(word) is not None


HOSTS = Check(
    "'all', or a comma-separated list of hosts and networks such as 'media.internal,10.1.0.0/16'",
    lambda value: isinstance(value, str) and all(_is_host_or_network(word.strip()) for word in value.split(",")),
)
BOOLEAN = Check("true or false", lambda value: isinstance(value, bool))
TEXT = Check("a non-empty string", lambda value: isinstance(value, str) and value != "")
MAPPING = Check("a mapping with string keys", _has_text_keys, dict)
DEVICES = Check(
    "a comma-separated list of device numbers such as '0,1'",
    lambda value: (
        (_is_int(value) and value >= 0)
        or (isinstance(value, str) and all(part.strip().isdecimal() for part in value.split(",")))
    ),
    lambda value: ",".join(part.strip() for part in str(value).split(",")),
)
CHUNKS = Check(
    "a mapping of hand-overs to lists of sizes >= 1 or 'all', and adaptive to true or false",
    lambda value: (
        _has_text_keys(value)
        and all((BOOLEAN if key == ADAPTIVE else CHUNK_SIZES).accepts(each) for key, each in value.items())
    ),
    lambda value: {key: each if key == ADAPTIVE else CHUNK_SIZES.convert(each) for key, each in value.items()},
)
CONNECTORS = Check(
    "a mapping of hand-overs to mappings such as {name: tcp}",
    lambda value: _has_text_keys(value) and all(_has_text_keys(each) for each in value.values()),
    dict,
)
COUNTS = Check(
    "a mapping of fields to integers >= 1",
    lambda value: _has_text_keys(value) and all(_is_int(most) and most >= 1 for most in value.values()),
    dict,
)
ENVIRONMENT = Check(
    "a mapping of variable names to strings or numbers",
    lambda value: _has_text_keys(value) and all(isinstance(v, str) or _is_number(v) for v in value.values()),
    lambda value: {name: str(v) for name, v in value.items()},
)


def unknown_key(path: str, key: str, known: Collection[str]) -> ConfigError:
    """The error for a key nobody knows, with the closest known one (or all of them) as advice."""
    close = difflib.get_close_matches(key.replace("-", "_"), sorted(known), n=1)
    where = f"{path}.{key}" if path else key
    if close:
        return ConfigError(f"{where}: unknown key; did you mean '{close[0]}'?")
    if len(known) > 30:
        return ConfigError(f"{where}: unknown key")
    return ConfigError(f"{where}: unknown key; use one of {', '.join(sorted(known))}")
