"""Types of configuration values that pydantic checks, and the errors for wrong values and unknown keys."""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, StrictBool, StrictInt, TypeAdapter, WrapValidator
from pydantic_core import PydanticCustomError

from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.ports import port_range

LbPolicy = Literal["least-queue-length", "random", "round-robin"]
LB_POLICIES = get_args(LbPolicy)
"""Names of the load balancing policies, the default first; `pool.stage_pool.POLICIES` implements them."""

KvConnector = Literal["mooncake", "nixl"]
KV_CONNECTORS = get_args(KvConnector)
"""Names of the connectors that transfer KV caches, the default first; `disaggregation.parameters` implements them."""

SHORTEST_HEARTBEAT_TIMEOUT_S = 1.0
"""Smallest heartbeat timeout in seconds; the coordinator does not work with a shorter one."""

AUTO = "auto"
ALL_AT_ONCE = "all"
ADAPTIVE = "adaptive"
EVERYTHING = "all"
"""Value of `allow_private_media` that allows all hosts and networks, instead of a list of them."""

ONE_HOST = "the name or address of one host, without a port"

UNKNOWN_KEY = ("unexpected_keyword_argument", "extra_forbidden")
"""Pydantic's error types for a key that is not a field of a dataclass or a `TypedDict`."""

_HOST = re.compile(r"(?=.*[a-z])[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?", re.IGNORECASE)


def modality_names(text: str, allowed: Collection[str], owner: str) -> tuple[str, ...]:
    """Return the modalities in a value of `default_modalities`, without duplicates.

    Args:
        text: comma-separated names.
        allowed: modalities that the model can produce.
        owner: the model or pipeline, for the error message.

    Raises:
        ConfigError: a modality is not in `allowed`.
    """
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in allowed:
            raise ConfigError(f"default_modalities: {owner} has no '{name}'; use {', '.join(allowed)}")
    return names


def _expected(text: str) -> WrapValidator:
    """Return a pydantic validator that replaces every error of the annotated type with "must be `text`"."""

    def validate(value: Any, check: Any) -> Any:
        try:
            return check(value)
        except ValueError:
            raise PydanticCustomError("expected", "must be {text}", {"text": text}) from None

    return WrapValidator(validate)


def as_network(word: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    """Return the network of an address, or of a text such as 10.0.0.0/8; None for any other text."""
    try:
        return ipaddress.ip_network(word.strip("[]"), strict=False)
    except ValueError:
        return None


def _check_hosts(text: str) -> str:
    if not all(as_network(word) or _HOST.fullmatch(word) for word in map(str.strip, text.split(","))):
        raise ValueError(text)
    return text


def is_host(text: str) -> bool:
    """Return whether a text is the name or the address of one host, without a port; also True for `*`."""
    try:
        return text == "*" or bool(_HOST.fullmatch(text) or ipaddress.ip_address(text.strip("[]")))
    except ValueError:
        return False


def _check_host(text: str) -> str:
    if not is_host(text):
        raise ValueError(text)
    return text


def _check_ports(text: str) -> str:
    port_range(text)
    return text.strip()


def _check_variables(variables: Mapping[str, str]) -> Mapping[str, str]:
    for name, value in variables.items():
        if not name or "=" in name or "\0" in name + value:
            text = "must have names that are not empty, without '=', and no NUL"
            raise PydanticCustomError("variable", "{text}, wrong is {name}", {"text": text, "name": repr(name)})
    return variables


def _refuse_key(value: Any) -> Any:
    raise PydanticCustomError(UNKNOWN_KEY[0], "unknown key")


Boolean = Annotated[StrictBool, _expected("true or false")]
Count = Annotated[StrictInt, Field(ge=0), _expected("an integer >= 0")]
Positive = Annotated[StrictInt, Field(ge=1), _expected("an integer >= 1")]
PositiveOrAuto = Annotated[Positive | Literal["auto"], _expected("an integer >= 1, or auto")]
Port = Annotated[StrictInt, Field(ge=1, le=65535), _expected("an integer from 1 to 65535")]
_Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Seconds = Annotated[_Number, Field(gt=0), _expected("a number of seconds > 0")]
SecondsOrAuto = Annotated[Seconds | Literal["auto"], _expected("a number of seconds > 0, auto or null")]
HeartbeatSeconds = Annotated[
    _Number,
    Field(ge=SHORTEST_HEARTBEAT_TIMEOUT_S),
    _expected(f"a number of seconds >= {SHORTEST_HEARTBEAT_TIMEOUT_S:g}"),
]
Text = Annotated[str, Field(strict=True, min_length=1), _expected("a non-empty string")]
Hosts = Annotated[
    str,
    Field(strict=True),
    AfterValidator(_check_hosts),
    _expected("'all', or a comma-separated list of hosts and networks such as 'media.internal,10.1.0.0/16'"),
]
Host = Annotated[str, Field(strict=True), AfterValidator(_check_host), _expected(ONE_HOST)]
PortRange = Annotated[
    str,
    Field(strict=True),
    AfterValidator(_check_ports),
    _expected("a range of ports such as '20000-20099'"),
]
Names = Annotated[
    str,
    Field(strict=True, pattern=r"^\s*\w+\s*(,\s*\w+\s*)*$"),
    AfterValidator(lambda text: "".join(text.split())),
    _expected("a comma-separated list of names such as 'text,audio'"),
]
Devices = Annotated[
    str,
    Field(coerce_numbers_to_str=True, pattern=r"^\s*\d+\s*(,\s*\d+\s*)*$"),
    AfterValidator(lambda text: "".join(text.split())),
    _expected("a comma-separated list of device numbers such as '0,1'"),
]
Settings = Annotated[Mapping[str, Any], _expected("a mapping with string keys")]
Environment = Annotated[
    Mapping[str, Annotated[str, Field(coerce_numbers_to_str=True)]],
    _expected("a mapping of variable names to strings or numbers"),
    AfterValidator(_check_variables),
]
Connectors = Annotated[Mapping[str, Settings], _expected("a mapping of hand-overs to mappings such as {name: tcp}")]
ChunkSizes = Literal["all"] | Annotated[tuple[Positive, ...], Field(min_length=1)]

NoKey = BeforeValidator(_refuse_key)
"""Validator of a dataclass field that a configuration file must not contain: every value is an "unknown key" error."""

NullIsEmpty = BeforeValidator(lambda value: {} if value is None else value)
"""Validator that reads a key without a value, such as `stages:`, as an empty mapping."""


_CHUNK_RULES: Mapping[bool, tuple[TypeAdapter[Any], str]] = {
    True: (TypeAdapter(Boolean), "true or false"),
    False: (TypeAdapter(ChunkSizes), "a list of sizes >= 1 such as [4, 25], or 'all'"),
}
"""Type of a value below the key `chunks`, and the words after "must be" in the error for a wrong value.

True: for the key `adaptive`. False: for keys that name an edge, i.e. a connection between two stages.
"""


def chunk_value(key: str, value: Any) -> Any:
    """Check one value below the configuration key `chunks`, and return it: a boolean, "all", or a tuple of sizes.

    Args:
        key: name of an edge, i.e. of a connection between two stages, or `adaptive`.

    Raises:
        ValueError: the type is wrong; the message is to be written after the name of the key.
    """
    adapter, expected = _CHUNK_RULES[key == ADAPTIVE]
    try:
        return adapter.validate_python(value)
    except ValueError:
        raise ValueError(f"must be {expected}, got {value!r:.100}") from None


Chunks = Annotated[
    Mapping[str, Any],
    AfterValidator(lambda given: {key: chunk_value(key, value) for key, value in given.items()}),
    _expected("a mapping of hand-overs to lists of sizes >= 1 or 'all', and adaptive to true or false"),
]


def unknown_key(path: str, key: str, known: Collection[str]) -> ConfigError:
    """Return the error for an unknown key. Its text has the closest known key, or all keys if there are at most 30.

    Args:
        path: path of the mapping that contains the key; "" for the top level.
        known: all keys that the mapping may have.
    """
    close = difflib.get_close_matches(key.replace("-", "_"), sorted(known), n=1)
    where = f"{path}.{key}" if path else key
    if close:
        return ConfigError(f"{where}: unknown key; did you mean '{close[0]}'?")
    if len(known) > 30:
        return ConfigError(f"{where}: unknown key")
    return ConfigError(f"{where}: unknown key; use one of {', '.join(sorted(known))}")
