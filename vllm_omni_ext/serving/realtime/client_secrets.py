"""Client secrets: keys that expire, valid for sessions with fixed settings.

A secret contains the session settings and the expiry time, signed with a key that is derived from the API key. The
server does not store secrets, so every API server of a deployment can check them.
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
"""Largest number of characters of a secret. It is limited because browsers send the secret in a header."""

LARGEST_SETTINGS = 1 << 20
"""Largest number of bytes of a secret's decompressed settings."""


class WrongSecret(Exception):
    """A client secret is malformed, has an invalid signature, or has expired."""


class ClientSecrets:
    """Creates and checks client secrets.

    Args:
        keys: the API keys. If empty, the server accepts every client, and the signing key is not secret.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = [hmac.digest(key.encode(), PURPOSE, "sha256") for key in keys or ("",)]

    def make(self, settings: Mapping[str, Any], expires_at: int) -> str:
        """Return a new secret.

        Args:
            settings: fields of `session` in the client's request.
            expires_at: Unix time in seconds.

        Raises:
            ValueError: the settings are too long.
        """
        body = zlib.compress(json.dumps([expires_at, settings], separators=(",", ":")).encode(), 9)
        value = f"{PREFIX}{_text(body)}.{_text(_sign(self._keys[0], body))}"
        if len(value) > LONGEST:
            raise ValueError(f"the settings of a client secret may have about {LONGEST} characters, compressed")
        return value

    def read(self, value: str, now: float) -> dict[str, Any]:
        """Check a secret, and return its session settings.

        Args:
            now: Unix time in seconds.

        Raises:
            WrongSecret: the secret is not valid, or has expired.
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
    """Return (expiry time, settings) of a secret's body.

    The decompressed size is limited, because on a server without an API key every client can sign a body.
    """
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
