"""What is counted in a body, however it is written and wherever it is cut into pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_ext.serving.body_scan import MOST_FIELDS, BodyLimits, BodyRefused, BodyScan

MANY = 10**9


def refusal(body: bytes, piece: int = MANY, **limits: Any) -> BodyRefused | None:
    """What a scan says to a body that comes in pieces of that many bytes."""
    scan = BodyScan(BodyLimits(**{"values": MANY, "objects": MANY, "depth": MANY, "in_field": {}} | limits))
    try:
        for start in range(0, len(body), piece):
            scan.feed(body[start : start + piece])
    except BodyRefused as error:
        return error
    return None


def objects(value: Any) -> int:
    """Objects, arrays and keys in a parsed body."""
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(objects, value.values()))
    return 1 + sum(map(objects, value)) if isinstance(value, list) else 0


def depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth, inner), default=0)


TEXTS = st.one_of(st.text(max_size=8), st.sampled_from(['"', "\\", '\\"', '{"', "[,", "\\\\", "messages", '":[{}],"', ""]))
BODIES = st.dictionaries(
    TEXTS,
    st.recursive(
        st.one_of(TEXTS, st.integers(), st.none(), st.booleans()),
        lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=4)),
        max_leaves=12,
    ),
    max_size=5,
)


@given(BODIES, st.integers(1, 40), st.booleans(), st.sampled_from([None, 2]))
def test_counts_are_those_of_the_parsed_body(body: dict[str, Any], piece: int, ascii: bool, indent: int | None) -> None:
    written = json.dumps(body, ensure_ascii=ascii, indent=indent).encode()
    for name, right in (("objects", objects(body)), ("depth", depth(body))):
        assert refusal(written, piece, **{name: right}) is None
        assert refusal(written, piece, **{name: right - 1}) is not None


@pytest.mark.parametrize("piece", [1, 7, MANY])
@pytest.mark.parametrize(
    "key", ['"messages"', '"\\u006dessages"', '"mess\\u0061ges" \n', '"\\u006d\\u0065\\u0073\\u0073\\u0061\\u0067es"']
)
def test_a_field_is_known_under_every_way_to_write_its_name(key: str, piece: int) -> None:
    body = f'{{"a\\"": [{{}}, {{}}, {{}}], {key}: [{{}}, {{}}, [1, [2]]], "b": [{{}}, {{}}, {{}}]}}'.encode()
    assert json.loads(body)["messages"]
    assert refusal(body, piece, in_field={"messages": 3}) is None
    refused = refusal(body, piece, in_field={"messages": 2})
    assert refused is not None and refused.parameter == "messages" and "more than 2 elements" in str(refused)


@pytest.mark.parametrize("item", [b"{}", b"[]", b"1", b'"a"', b"null", b'{"a":1}', b"[[]]"])
def test_every_value_counts(item: bytes) -> None:
    body = b'{"a": 1, "x": [' + b",".join([item] * 1000) + b'], "b": 1}'
    refused = refusal(body, 100, values=900)
    assert refused is not None and refused.parameter == "x"
    assert refusal(body, 100, values=3010) is None


def test_texts_do_not_count() -> None:
    text = 'He said: "[{}, {}]" \\ ' * 1000
    body = json.dumps({"messages": [{"role": "user", "content": text}], "x": text}).encode()
    assert refusal(body, 1000, values=20, objects=20, depth=3, in_field={"messages": 1}) is None


def test_fields_count() -> None:
    assert refusal(json.dumps({f"f{i}": i for i in range(MOST_FIELDS)}).encode()) is None
    refused = refusal(json.dumps({f"f{i}": i for i in range(MOST_FIELDS + 1)}).encode())
    assert refused is not None and refused.parameter == "body"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"])
def test_other_encodings_hide_nothing(encoding: str) -> None:
    body = '{"messages": "\u2222"}'.encode(encoding)
    refused = refusal(body)
    assert json.loads(body) and refused is not None and "UTF-8" in str(refused)
