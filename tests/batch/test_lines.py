"""Lines of a batch's input and output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_ext.batch.lines import BadLine, Job, Result, answer, expired, read_done, read_lines, refused
from vllm_omni_ext.errors import ConfigError

CHAT, SPEECH, HEAR, EDIT = "/v1/chat/completions", "/v1/audio/speech", "/v1/audio/transcriptions", "/v1/images/edits"


def line(custom_id: Any = "a", url: Any = CHAT, body: Any = None, **more: Any) -> bytes:
    fields = {"custom_id": custom_id, "method": "POST", "url": url, "body": {} if body is None else body, **more}
    return json.dumps(fields).encode() + b"\n"


def read(*lines: bytes, endpoint: str | None = None) -> list[Any]:
    return list(read_lines(lines, endpoint=endpoint))


def test_a_line_becomes_a_request_and_empty_ones_are_skipped() -> None:
    found = read(line("a", body={"x": 1}), b" \n", line("b", SPEECH), b"")
    assert found == [
        Job(number=1, custom_id="a", url=CHAT, body={"x": 1}),
        Job(number=3, custom_id="b", url=SPEECH, body={}),
    ]


@pytest.mark.parametrize(
    ("data", "custom_id", "field"),
    [
        (b"{", None, None),
        (b'{"custom_id": "\xff"}', None, None),
        (b'{"custom_id": NaN}', None, None),
        (b"[" * 100_000, None, None),
        (b'["a"]', None, None),
        (line(7), None, "custom_id"),
        (line(""), None, "custom_id"),
        (line(method="GET"), "a", "method"),
        (line(url="/v1/unknown"), "a", "url"),
        (line(url="/sleep"), "a", "url"),
        (line(url=[CHAT]), "a", "url"),
        (line(url=SPEECH, body=[]), "a", "body"),
        (line(headers={}), "a", "headers"),
        (line(body={"stream": True}), "a", "stream"),
        (line(url=SPEECH, body={"stream_format": "sse"}), "a", "stream_format"),
        (line(url=HEAR), "a", "file_url"),
        (line(url=HEAR, body={"file_url": "file:///etc/passwd"}), "a", "file_url"),
        (line(url=HEAR, body={"file_url": "data:,x", "file": "x"}), "a", "file"),
        (line(url=EDIT, body={"image_url": []}), "a", "image_url"),
        (line(url=EDIT, body={"image_url": ["data:,x", 1]}), "a", "image_url"),
        (line(url=EDIT, body={"image_url": "data:,x", "mask_url": 1}), "a", "mask_url"),
        (line(url=EDIT, body={"image_url": ["data:,x"] * 17}), "a", "image_url"),
    ],
)
def test_a_wrong_line_is_named(data: bytes, custom_id: str | None, field: str | None) -> None:
    (found,) = read(data)
    assert isinstance(found, BadLine)
    assert (found.number, found.custom_id, found.parameter) == (1, custom_id, field)
    written = json.loads(refused(found).encoded())
    assert written["custom_id"] == custom_id and written["response"] is None
    assert written["error"]["param"] == field and written["error"]["line"] == 1
    assert field is None or written["error"]["message"].startswith(field)


def test_files_are_named_by_urls() -> None:
    bodies = [{"file_url": "data:audio/wav;base64,AA=="}, {"file_url": "HTTPS://host/a.wav"}]
    assert all(isinstance(found, Job) for body in bodies for found in read(line(url=HEAR, body=body)))
    pictures = {"image_url": ["data:,x", "http://host/b.png"] * 8, "mask_url": "data:,x"}
    assert isinstance(read(line(url=EDIT, body=pictures))[0], Job)


def test_a_custom_id_is_used_once_and_a_wrong_line_does_not_use_it() -> None:
    found = read(line("a", method="PUT"), line("a"), line("a"), line("b"))
    assert [type(each) for each in found] == [BadLine, Job, BadLine, Job]
    assert found[2].parameter == "custom_id"


def test_all_lines_of_a_batch_have_its_endpoint_and_its_priority() -> None:
    found = read(line("a"), line("b", SPEECH), line("c", body={"priority": -1}), endpoint=CHAT)
    assert [getattr(each, "parameter", None) for each in found] == [None, "url", "priority"]
    assert isinstance(read(line("c", body={"priority": -1}))[0], Job)


@pytest.mark.parametrize(
    ("kind", "data", "body"),
    [
        ("application/json", b'{"x": [1]}', {"x": [1]}),
        ("application/json; charset=utf-8", b'"x"', "x"),
        ("application/json", b"{", {"content_type": "application/json", "text": "{"}),
        ("audio/wav", b"RIFF\xff", {"content_type": "audio/wav", "data": "UklGRv8="}),
        ("text/vtt; charset=utf-8", "ü".encode(), {"content_type": "text/vtt; charset=utf-8", "text": "ü"}),
        ("", b"\x00", {"content_type": "", "data": "AA=="}),
    ],
)
def test_bodies_of_every_kind(kind: str, data: bytes, body: Any) -> None:
    result = answer("a", "r", 200, kind, data)
    assert result.answered
    written = json.loads(result.encoded())
    assert written["response"] == {"status_code": 200, "request_id": "r", "body": body}
    assert (written["custom_id"], written["error"]) == ("a", None)


def test_an_error_is_where_openai_and_where_vllm_has_it() -> None:
    error = {"error": {"message": "no", "type": "BadRequestError", "param": None, "code": 400}}
    result = answer("a", "r", 400, "application/json", json.dumps(error).encode())
    assert not result.answered
    assert result.line["error"] == result.line["response"]["body"] == error
    stream = answer("a", "r", 200, "text/event-stream", b"data: x\n\n")
    assert not stream.answered and stream.line["response"]["status_code"] == 400


def test_vllm_reads_the_output() -> None:
    """A line of output has the fields of vLLM's type, and an input line those of its input type."""
    from vllm.entrypoints.launchers.run_batch import BatchRequestInput, BatchRequestOutput

    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    BatchRequestInput.model_validate_json(line(body=body))
    results = [
        answer("a", "r", 400, "application/json", b'{"error": {}}'),
        expired(Job(number=1, custom_id="a", url=CHAT, body={})),
    ]
    for result in results:
        fields = json.loads(result.encoded())
        assert fields.keys() == BatchRequestOutput.model_fields.keys()
        (fields["response"] or {}).pop("body", None)
        BatchRequestOutput.model_validate(fields)


RESULTS = [
    answer("a", "r", 200, "application/json", b"{}"),
    refused(BadLine(number=2, custom_id="a", message="m")),
    answer("ü", "r", 500, "text/plain", b"x"),
    refused(BadLine(number=5, custom_id=None, message="m")),
]


@given(st.integers(0, sum(len(each.encoded()) for each in RESULTS)))
def test_an_output_that_ends_anywhere_is_continued(tmp_path_factory: pytest.TempPathFactory, size: int) -> None:
    path = tmp_path_factory.getbasetemp() / "cut.jsonl"
    data = b"".join(each.encoded() for each in RESULTS)
    path.write_bytes(data[:size])
    whole = data[:size].count(b"\n")
    done = read_done(path)
    assert (done.count, done.size) == (whole, data[:size].rfind(b"\n") + 1)
    job = {name: Job(number=9, custom_id=name, url=CHAT, body={}) for name in ("a", "ü", "z")}
    assert [done.has(job[name]) for name in job] == [whole > 0, whole > 2, False]
    bad = [BadLine(number=number, custom_id="a", message="") for number in (1, 2, 5)]
    assert [done.has(each) for each in bad] == [False, whole > 1, whole > 3]


def test_another_file_is_not_appended_to(tmp_path: Path) -> None:
    other = tmp_path / "notes.jsonl"
    for text in (b"dear diary\n", b'{"custom_id": "a"}\n', b"7\n", line()):
        other.write_bytes(RESULTS[0].encoded() + text)
        with pytest.raises(ConfigError, match="line 2 is not the output of a batch"):
            read_done(other)
    assert read_done(tmp_path / "none").count == 0
    assert isinstance(RESULTS[0], Result)
