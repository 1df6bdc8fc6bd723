"""Client secrets: made by one API server, read by all of the deployment until they expire."""

from __future__ import annotations

import base64
import zlib

import pytest

from vllm_omni_ext.serving.realtime.client_secrets import LARGEST_SETTINGS, ClientSecrets, WrongSecret

SETTINGS = {"type": "realtime", "instructions": "Be brief."}
KEYS = ["one", "two"]


def test_every_server_with_the_keys_reads_a_secret_until_it_expires() -> None:
    value = ClientSecrets(KEYS).make(SETTINGS, 100)
    assert value.startswith("ek_") and not set(value) & set("=/+ ,")
    for keys in (KEYS, KEYS[::-1], KEYS[:1]):
        assert ClientSecrets(keys).read(value, 99.9) == SETTINGS
    with pytest.raises(WrongSecret, match="expired"):
        ClientSecrets(KEYS).read(value, 100)


@pytest.mark.parametrize("keys", [["three"], ["two"], []])
def test_a_secret_of_other_keys_is_refused(keys: list[str]) -> None:
    value = ClientSecrets(KEYS).make(SETTINGS, 100)
    with pytest.raises(WrongSecret, match="not one of this server"):
        ClientSecrets(keys).read(value, 0)


def test_a_changed_secret_is_refused() -> None:
    value = ClientSecrets(KEYS).make(SETTINGS, 100)
    for at in range(len(value)):
        changed = value[:at] + ("A" if value[at] != "A" else "B") + value[at + 1 :]
        try:
            assert ClientSecrets(KEYS).read(changed, 0) == SETTINGS, "only bits that base64 does not use may differ"
        except WrongSecret:
            continue


@pytest.mark.parametrize("value", ["", "ek_", "ek_.", "ek_AAAA", "ek_AAAA.AAAA", "ek_\u00e9.x", "ek_A.A", "one"])
def test_a_value_that_is_no_secret_is_refused(value: str) -> None:
    for keys in (KEYS, []):
        with pytest.raises(WrongSecret):
            ClientSecrets(keys).read(value, 0)


def test_a_secret_of_an_open_server_cannot_fill_its_memory() -> None:
    secrets = ClientSecrets([])
    body = zlib.compress(b"[" + b" " * 50 * LARGEST_SETTINGS + b"]", 9)
    with pytest.raises(ValueError, match="characters"):
        secrets.make({"x": base64.b64encode(bytes(range(256)) * 40).decode()[::-1] + str(list(range(9000)))}, 100)
    from vllm_omni_ext.serving.realtime import client_secrets as module

    value = f"ek_{module._text(body)}.{module._text(module._sign(secrets._keys[0], body))}"
    with pytest.raises(WrongSecret, match="malformed"):
        secrets.read(value, 0)
