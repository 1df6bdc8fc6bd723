"""Counts of a body, with all ways to write JSON and to cut it into pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_ext.serving.body_scan import MOST_FIELDS, BodyLimits, BodyRefused, BodyScan

MANY = 10**9
DEFAULTS: dict[str, Any] = {
    "values": MANY,
    "ids": MANY,
    "depth": MANY,
    "in_field": {},
    "field_values": {},
    "field_bytes": {},
    "wide_text_bytes": MANY,
}


def refusal(body: bytes, piece: int = MANY, **limits: Any) -> BodyRefused | None:
    """Return the error of a scan of a body that comes in pieces of that many bytes."""
    scan = BodyScan(BodyLimits(**DEFAULTS | limits))
    try:
        for start in range(0, len(body), piece):
            scan.feed(body[start : start + piece])
    except BodyRefused as error:
        return error
    return None


def refused_field(body: bytes, piece: int = MANY, **limits: Any) -> tuple[str | None, str]:
    """Return the parameter and the text of the error."""
    refused = refusal(body, piece, **limits)
    return (None, "") if refused is None else (refused.parameter, str(refused))


def values(value: Any) -> int:
    """Count the values and keys of a parsed body."""
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(values, value.values()))
    return 1 + sum(map(values, value)) if isinstance(value, list) else 1


def depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth, inner), default=0)


TEXTS = st.one_of(
    st.text(max_size=8), st.sampled_from(['"', "\\", '\\"', '{"', "[,", "\\\\", "messages", '":[{}],"', ""])
)
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
    assert refusal(written, piece, depth=depth(body)) is None
    assert refusal(written, piece, depth=depth(body) - 1) is not None
    assert refusal(written, piece, values=values(body)) is None
    assert refusal(written, piece, values=(values(body) - 1) // 2) is not None


@pytest.mark.parametrize("piece", [1, 7, MANY])
@pytest.mark.parametrize(
    "key", ['"messages"', '"\\u006dessages"', '"mess\\u0061ges" \n', '"\\u006d\\u0065\\u0073\\u0073\\u0061\\u0067es"']
)
def test_escapes_in_the_name_of_a_field_are_read(key: str, piece: int) -> None:
    body = f'{{"a\\"": [{{}}, {{}}, {{}}], {key}: [{{}}, {{}}, [1, [2]]], "b": [{{}}, {{}}, {{}}]}}'.encode()
    assert json.loads(body)["messages"]
    assert refusal(body, piece, in_field={"messages": 3}) is None
    parameter, said = refused_field(body, piece, in_field={"messages": 2})
    assert parameter == "messages" and "more than 2 elements" in said


def test_too_many_fields_and_long_keys_are_refused() -> None:
    assert refusal(json.dumps({f"f{i}": i for i in range(MOST_FIELDS)}).encode()) is None
    assert refused_field(json.dumps({f"f{i}": i for i in range(MOST_FIELDS + 1)}).encode())[0] == "body"
    for before in ("{", '{"messages": [{"role": "user"}], ', '{"prompt": "x" , \n'):
        assert "key" in refused_field(f'{before}"{"k" * 300_000}": 1}}'.encode(), 100_000)[1]
        assert refusal(f'{before}"prompt": "{"k" * 300_000}"}}'.encode(), 100_000) is None


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"])
def test_other_encodings_than_utf_8_are_refused(encoding: str) -> None:
    body = '{"messages": "\u2222"}'.encode(encoding)
    assert json.loads(body) and "UTF-8" in refused_field(body)[1]


def test_token_ids_and_values_of_a_field_have_limits_of_their_own() -> None:
    tools = {f"k{i}": i for i in range(20)}
    fields = {"x": [1] * 100, "prompt": list(range(1000)), "messages": [[1, 2]] * 3, "tools": tools}
    body = json.dumps(fields).encode()
    assert refusal(body, 100, values=170, ids=1000, field_values={"tools": 41, "y": 1}) is None
    for limits, field in (
        ({"ids": 900}, "prompt"),
        ({"values": 90}, "x"),
        ({"in_field": {"messages[]": 2}}, "messages"),
        ({"field_values": {"tools": 19}}, "tools"),
    ):
        assert refused_field(body, 100, **limits)[0] == field


@pytest.mark.parametrize("text", ["\u4e16", "\U0001f389"])
@pytest.mark.parametrize("ascii", [False, True])
@pytest.mark.parametrize("after", [0, 300_000, 600_000])
def test_long_texts_beyond_ascii_have_a_limit(text: str, ascii: bool, after: int) -> None:
    fields = {"a": text * 999, "messages": "a" * after + text + "a" * (600_000 - after)}
    body = json.dumps(fields, ensure_ascii=ascii).encode()
    assert refusal(body, 50_000, wide_text_bytes=700_000) is None
    assert refused_field(body, 50_000, wide_text_bytes=500_000)[0] == "messages"
    assert refusal(json.dumps({"a": text, "x": "a" * 600_000}).encode(), 50_000, wide_text_bytes=200_000) is None


def test_fields_of_too_many_bytes_are_refused() -> None:
    body = json.dumps({"messages": "a" * 300_000, "x": "b" * 200_000, "y": ["c" * 1000] * 100, "z": 1}).encode()
    for piece in (1000, MANY):
        assert refusal(body, piece, field_bytes={"*": 201_000}) is None
        for limits, field in (({"*": 150_000}, "x"), ({"*": 300_000, "y": 99_000}, "y"), ({"messages": 9}, "messages")):
            parameter, said = refused_field(body, piece, field_bytes=limits)
            assert parameter == field and "bytes" in said


def test_content_parts_of_messages_are_counted() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": ""}}]
    fields = {"messages": [{"role": "user", "content": parts}] * 10, "tools": [[[[[]]]]]}
    body = json.dumps(fields).encode()
    for piece in (10, MANY):
        assert refusal(body, piece, in_field={"messages.*": 30, "messages": 10}) is None
        parameter, said = refused_field(body, piece, in_field={"messages.*": 29})
        assert parameter == "messages" and "parts" in said
