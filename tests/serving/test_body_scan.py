"""What is counted in a body, however it is written and wherever it is cut into pieces."""

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
    """What a scan says to a body that comes in pieces of that many bytes."""
    scan = BodyScan(BodyLimits(**DEFAULTS | limits))
    try:
        for start in range(0, len(body), piece):
            scan.feed(body[start : start + piece])
    except BodyRefused as error:
        return error
    return None


def values(value: Any) -> int:
    """Values and keys in a parsed body."""
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
    assert refusal(body, 100, values=4010) is None


def test_texts_do_not_count() -> None:
    text = 'He said: "[{}, {}]" \\ ' * 1000
    body = json.dumps({"messages": [{"role": "user", "content": text}], "x": text}).encode()
    assert refusal(body, 1000, values=20, depth=3, in_field={"messages": 1}) is None


def test_fields_count() -> None:
    assert refusal(json.dumps({f"f{i}": i for i in range(MOST_FIELDS)}).encode()) is None
    refused = refusal(json.dumps({f"f{i}": i for i in range(MOST_FIELDS + 1)}).encode())
    assert refused is not None and refused.parameter == "body"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"])
def test_other_encodings_hide_nothing(encoding: str) -> None:
    body = '{"messages": "\u2222"}'.encode(encoding)
    refused = refusal(body)
    assert json.loads(body) and refused is not None and "UTF-8" in str(refused)


def test_token_ids_are_counted_apart() -> None:
    body = json.dumps({"x": [1] * 100, "prompt": list(range(1000)), "messages": [[1, 2]] * 3}).encode()
    assert refusal(body, 100, values=130, ids=1000) is None
    for limits, field in (
        ({"ids": 900}, "prompt"),
        ({"values": 90}, "x"),
        ({"in_field": {"messages[]": 2}}, "messages"),
    ):
        refused = refusal(body, 100, **limits)
        assert refused is not None and refused.parameter == field


@pytest.mark.parametrize("text", ["\u4e16", "\U0001f389"])
@pytest.mark.parametrize("ascii", [False, True])
@pytest.mark.parametrize("after", [0, 300_000, 600_000])
def test_long_texts_that_python_makes_longer(text: str, ascii: bool, after: int) -> None:
    body = json.dumps(
        {"a": text * 999, "messages": "a" * after + text + "a" * (600_000 - after)}, ensure_ascii=ascii
    ).encode()
    assert refusal(body, 50_000, wide_text_bytes=700_000) is None
    refused = refusal(body, 50_000, wide_text_bytes=500_000)
    assert refused is not None and refused.parameter == "messages"
    assert refusal(json.dumps({"a": text, "x": "a" * 600_000}).encode(), 50_000, wide_text_bytes=200_000) is None


def test_long_fields() -> None:
    body = json.dumps({"messages": "a" * 300_000, "x": "b" * 200_000, "y": ["c" * 1000] * 100, "z": 1}).encode()
    for piece in (1000, MANY):
        assert refusal(body, piece, field_bytes={"*": 201_000}) is None
        for limits, field in (({"*": 150_000}, "x"), ({"*": 300_000, "y": 99_000}, "y"), ({"messages": 9}, "messages")):
            refused = refusal(body, piece, field_bytes=limits)
            assert refused is not None and refused.parameter == field and "bytes" in str(refused)


def test_values_of_a_field() -> None:
    body = json.dumps({"messages": [1] * 100, "tools": {f"k{i}": i for i in range(20)}}).encode()
    assert refusal(body, field_values={"tools": 41, "x": 1}) is None
    refused = refusal(body, field_values={"tools": 19})
    assert refused is not None and refused.parameter == "tools"


@pytest.mark.parametrize("before", ["{", '{"messages": [{"role": "user"}], ', '{"prompt": "x" , \n'])
def test_long_keys(before: str) -> None:
    body = f'{before}"{"k" * 300_000}": 1}}'.encode()
    refused = refusal(body, 100_000)
    assert refused is not None and "key" in str(refused)
    assert refusal(f'{before}"prompt": "{"k" * 300_000}"}}'.encode(), 100_000) is None


def test_parts_of_elements() -> None:
    message = {
        "role": "user",
        "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": ""}}],
    }
    body = json.dumps({"messages": [message] * 10, "tools": [[[[[]]]]]}).encode()
    for piece in (10, MANY):
        assert refusal(body, piece, in_field={"messages.*": 30, "messages": 10}) is None
        refused = refusal(body, piece, in_field={"messages.*": 29})
        assert refused is not None and refused.parameter == "messages" and "parts" in str(refused)
