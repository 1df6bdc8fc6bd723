"""Client secrets: keys for one kind of session that expire, and that every API server of a deployment can check.

A secret contains the settings of its sessions and its expiry, signed with a key that is derived from the API key. The
server keeps nothing of it.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

PREFIX = "ek_"
PURPOSE = b"vllm-omni-ext: client secrets of /v1/realtime"
LONGEST = 6000
"""Characters of a secret: browsers send it in a header."""

LARGEST_SETTINGS = 1 << 20
"""Bytes of the settings in a secret."""


class WrongSecret(Exception):
    """A client secret is malformed, has another signature, or has expired."""


class ClientSecrets:
    """Makes and reads secrets.

    Args:
        keys: the API keys; without any, secrets are signed with a key that is no secret, because the server is open.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = [hmac.digest(key.encode(), PURPOSE, "sha256") for key in keys or ("",)]

    def make(self, settings: Mapping[str, Any], expires_at: int) -> str:
        """Return a secret.

        Args:
            settings: fields of `session` as a client sends them.
            expires_at: Unix time.

        Raises:
            ValueError: the settings are too long.
        """
        body = zlib.compress(json.dumps([expires_at, settings], separators=(",", ":")).encode(), 9)
        value = f"{PREFIX}{_text(body)}.{_text(_sign(self._keys[0], body))}"
        if len(value) > LONGEST:
            raise ValueError(f"the settings of a client secret may have about {LONGEST} characters, compressed")
        return value

    def read(self, value: str, now: float) -> dict[str, Any]:
        """Return the settings of a secret.

        Args:
            now: Unix time.

        Raises:
            WrongSecret: it is not valid, or not any more.
        """
        data, _, signature = value.removeprefix(PREFIX).partition(".")
        try:
            body, given = _bytes(data), _bytes(signature)
        except (binascii.Error, ValueError) as error:
            raise WrongSecret("the client secret is malformed") from error
        matches = [hmac.compare_digest(given, _sign(key, body)) for key in self._keys]
        if not value.startswith(PREFIX) or not any(matches):
            raise WrongSecret("the client secret is not one of this server")
        expires_at, settings = _content(body)
        if now >= expires_at:
            raise WrongSecret("the client secret has expired")
        return settings


def _content(body: bytes) -> tuple[int, dict[str, Any]]:
    """Return expiry and settings; without an API key anybody can sign, so the size is limited here too."""
    try:
        reader = zlib.decompressobj()
        content = reader.decompress(body, LARGEST_SETTINGS)
        expires_at, settings = json.loads(content)
    except (zlib.error, ValueError, TypeError, RecursionError) as error:
        raise WrongSecret("the client secret is malformed") from error
    if type(expires_at) is not int or not isinstance(settings, dict):
        raise WrongSecret("the client secret is malformed")
    return expires_at, settings


def _sign(key: bytes, body: bytes) -> bytes:
    return hmac.digest(key, body, "sha256")


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode("ascii").rstrip("=")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
