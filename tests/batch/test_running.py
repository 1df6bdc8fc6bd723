"""Lines on their way to a server: attempts, order, and forms."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from vllm_omni_ext.batch import running
from vllm_omni_ext.batch.lines import BadLine, Job, Line, Result, answer
from vllm_omni_ext.batch.running import NotFetched, Sender, ServerGone, form_fields, read_data_url, run

WAIT_S = 60.0
CHAT, HEAR, EDIT = "/v1/chat/completions", "/v1/audio/transcriptions", "/v1/images/edits"


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses take no time; this list has their lengths."""
    taken: list[float] = []
    sleep = asyncio.sleep

    async def pause(seconds: float) -> None:
        taken.append(seconds)
        await sleep(0)

    monkeypatch.setattr(running.asyncio, "sleep", pause)
    monkeypatch.setattr(running.random, "uniform", lambda low, high: high)
    return taken


async def fetch(url: str) -> bytes:
    if "missing" in url:
        raise NotFetched("the URL of a file could not be fetched")
    return f"bytes of {url}".encode()


def sender(answers: Callable[[httpx.Request], httpx.Response], **more: int) -> Sender:
    client = httpx.AsyncClient(transport=httpx.MockTransport(answers), base_url="http://server")
    return Sender(client, fetch, headers={"Authorization": "Bearer k"}, **more)


def job(name: str = "a", url: str = CHAT, **body: Any) -> Job:
    return Job(number=1, custom_id=name, url=url, body=body)


async def test_a_line_is_sent_until_the_server_is_available(pauses: list[float]) -> None:
    ids = set()

    def answers(request: httpx.Request) -> httpx.Response:
        ids.add(request.headers["x-request-id"])
        assert request.headers["authorization"] == "Bearer k"
        if len(pauses) == 0:
            raise httpx.ConnectError("refused")
        if len(pauses) == 1:
            raise httpx.ReadError("cut")
        status, kind = 503 if len(pauses) < 8 else 200, {"content-type": "application/json"}
        return httpx.Response(status, content=b'{"got": %s}' % request.content, headers=kind)

    result = await sender(answers)(job(text="\ud800ü"))
    assert result.answered and result.line["response"]["body"] == {"got": {"text": "\ud800ü"}}
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]
    assert ids == {result.line["response"]["request_id"]}


async def test_other_errors_are_answers(pauses: list[float]) -> None:
    for status in (300, 304, 400, 404, 413, 500):
        result = await sender(lambda request, status=status: httpx.Response(status, json={"error": {}}))(job())
        assert not result.answered and result.line["response"]["status_code"] == status
    assert pauses == []


async def test_a_server_that_is_gone_ends_the_run(pauses: list[float]) -> None:
    with pytest.raises(ServerGone, match="3 attempts; the last one: status 503: busy"):
        await sender(lambda request: httpx.Response(503, text="busy"), attempts=3)(job())
    assert len(pauses) == 2


@pytest.mark.parametrize(
    ("location", "advice"),
    [
        (f"https://server{CHAT}", "write --url https://server$"),
        (f"http://server/model{CHAT}", "write --url http://server/model$"),
        (f"/model{CHAT}", "write --url http://server/model$"),
        ("https://login/?next=x", "redirects to https://login/.next=x .status 308.; write the address of the server"),
    ],
)
async def test_a_redirect_ends_the_run_with_the_address_to_write(
    pauses: list[float], location: str, advice: str
) -> None:
    asked = []

    def answers(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        return httpx.Response(308, headers={"location": location}, html="moved")

    with pytest.raises(ServerGone, match=advice):
        await sender(answers, attempts=3)(job())
    assert pauses == [] and asked == [f"http://server{CHAT}"], "not followed: the key is for this server"


async def test_a_sound_is_sent_as_a_form() -> None:
    forms = []

    def answers(request: httpx.Request) -> httpx.Response:
        forms.append(request.content)
        assert request.headers["content-type"].startswith("multipart/form-data")
        return httpx.Response(200, text="words")

    send = sender(answers)
    body = {"model": "m", "file_url": "data:audio/wav;base64,UklGRg==", "timestamp_granularities": ["word"]}
    result = await send(job(url=HEAR, **body))
    assert result.line["response"]["body"]["text"] == "words"
    assert b'name="file"' in forms[0] and b"RIFF" in forms[0] and b'name="timestamp_granularities[]"' in forms[0]
    await send(job(url=HEAR, file_url="http://host/x.wav"))
    assert b"bytes of http://host/x.wav" in forms[1]
    urls = ["data:,x", "data:,y"]
    await send(job(url="/v1/images/edits", image_url=urls, mask_url="data:,z", n=2))
    assert forms[2].count(b'name="image[]"') == 2 and b' name="mask"' in forms[2]
    failed = await send(job(url=HEAR, file_url="http://missing/x.wav"))
    assert len(forms) == 3 and failed.line["response"]["status_code"] == 400


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("url", "body", "status", "param"),
    [
        (EDIT, {"image_url": "data:image/png;base64,é"}, 400, "image_url"),
        (EDIT, {"image_url": "data:,\ud83d"}, 400, "image_url"),
        (EDIT, {"image_url": "data:,x", "mask_url": "http://missing/x.png"}, 400, "mask_url"),
        (EDIT, {"image_url": "data:,x", "prompt": "\ud83d"}, 400, "prompt"),
        (EDIT, {"image_url": "data:,x", "stop": ["a", "\ud83d"]}, 400, "stop"),
        (EDIT, {"image_url": "data:,x", "\ud83d": 1}, 400, r"\ud83d"),
        (EDIT, {"image_url": "data:,x", "x": nested(2000)}, 400, "body"),
        (CHAT, {"x": nested(2000)}, 400, "body"),
        (EDIT, {"image_url": ["http://a", "http://b"], "mask_url": "data:,x"}, 413, "mask_url"),
        (EDIT, {"image_url": ["http://a", "http://b", "data:,x"]}, 413, "image_url"),
    ],
)
async def test_a_line_that_cannot_be_sent_gets_an_error_and_the_others_are_sent(
    url: str, body: dict[str, Any], status: int, param: str
) -> None:
    written: list[Result] = []
    send = sender(lambda request: httpx.Response(200), most=2 * len("bytes of http://a"))
    await run(iter([job("bad", url, **body), job("good")]), send, written.append, asyncio.Semaphore(1))
    bad, good = written
    assert good.answered and good.line["custom_id"] == "good"
    error = bad.line["response"]["body"]["error"]
    assert (bad.line["response"]["status_code"], error["param"]) == (status, param)
    assert error["message"].startswith(f"{param}: ") and error["code"] == status
    bad.encoded()


def test_fields_of_a_form() -> None:
    given = {"a": None, "b": True, "c": 1.5, "d": ["x", 1], "e[]": ["y"], "f": {"g": 1}}
    assert form_fields(given) == {"b": "true", "c": "1.5", "d[]": ["x", "1"], "e[]": ["y"], "f": '{"g": 1}'}


def test_data_urls() -> None:
    assert read_data_url("data:audio/wav;base64,UklGRg==") == b"RIFF"
    assert read_data_url("data:,a%20b") == b"a b"
    for wrong in (
        "data:audio/wav;base64,!",
        "data:audio/wav;base64",
        "data:;base64,A",
        "data:;base64,é",
        "data:,\ud83d",
    ):
        with pytest.raises(NotFetched):
            read_data_url(wrong)


class Server:
    """Holds lines until they are released; `seen` are the lines that it has got."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.held: dict[str, asyncio.Future[None]] = {}
        self.came = asyncio.Event()

    async def __call__(self, line: Job) -> Result:
        self.seen.append(line.custom_id)
        self.held[line.custom_id] = future = asyncio.get_running_loop().create_future()
        self.came.set()
        await future
        return answer(line.custom_id, "r", 200, "application/json", b"{}")

    async def until(self, count: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while len(self.seen) < count:
                self.came.clear()
                await self.came.wait()


def lines(*names: str) -> Iterator[Line]:
    for number, name in enumerate(names, 1):
        bad = BadLine(number=number, custom_id=None, message="wrong")
        yield bad if name == "bad" else Job(number=number, custom_id=name, url=CHAT, body={})


async def test_so_many_lines_are_sent_at_a_time_and_results_are_written_as_they_come() -> None:
    server, written = Server(), []
    source = lines("a", "bad", "b", "c", "d")
    places = asyncio.Semaphore(2)
    task = asyncio.create_task(run(source, server, lambda result: written.append(result.line["custom_id"]), places))
    await server.until(2)
    assert server.seen == ["a", "b"] and written == [None]
    server.held["b"].set_result(None)
    await server.until(3)
    assert server.seen == ["a", "b", "c"] and written == [None, "b"]
    for name in ("a", "c"):
        server.held[name].set_result(None)
    await server.until(4)
    server.held["d"].set_result(None)
    await task
    assert sorted(written[1:]) == ["a", "b", "c", "d"]
    assert not places.locked()


async def test_two_batches_take_turns() -> None:
    server, places = Server(), asyncio.Semaphore(1)
    tasks = [
        asyncio.create_task(run(lines(*(f"{name}{number}" for number in range(3))), server, lambda _: None, places))
        for name in "ab"
    ]
    for count in range(1, 7):
        await server.until(count)
        server.held[server.seen[-1]].set_result(None)
    await asyncio.gather(*tasks)
    assert [name[0] for name in server.seen[1:5]] in (["b", "a", "b", "a"], ["a", "b", "a", "b"])


async def test_an_error_or_a_cancellation_frees_every_place() -> None:
    places = asyncio.Semaphore(2)

    async def gone(line: Job) -> Result:
        if line.custom_id == "b":
            raise ServerGone("gone")
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(ServerGone):
        await run(lines("a", "b", "c"), gone, lambda _: None, places)
    server = Server()
    task = asyncio.create_task(run(lines("a", "b", "c"), server, lambda _: None, places))
    await server.until(2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert places._value == 2
