"""Media fetched from URLs of clients: real HTTP servers on two loopback addresses, one of which may be allowed."""

from __future__ import annotations

import asyncio
import gzip
import io
import ipaddress
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
import pytest_asyncio
from aiohttp import web

from tests.support import media
from tests.support.scripted import ScriptedOmni
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.serving.fetching import (
    MOST_REDIRECTS,
    Budget,
    Fetcher,
    FetchRefused,
    Rules,
    destinations,
    for_everybody,
)
from vllm_omni_ext.serving.media import EARLIEST_FAILURE_S, FAILED, install

REFUSED, ALLOWED = "127.0.0.1", "127.0.0.2"
MIB = 1 << 20
KINDS = ("image_url", "audio_url", "video_url")


def files() -> dict[str, bytes]:
    """A readable file of each kind."""
    picture = io.BytesIO()
    media.image(48, 48, seed=1).save(picture, "PNG")
    urls = {
        "audio_url": media.audio_url(media.audio(0.5, seed=1)),
        "video_url": media.video_url(media.video(4, 64, 64, 1)),
    }
    decoded = {kind: media.base64.b64decode(url.partition(",")[2]) for kind, url in urls.items()}
    return {"image_url": picture.getvalue(), **decoded}


class Site:
    """A web server at both addresses, and how often each was asked."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.port = 0
        self.files = files()

    def url(self, path: str, host: str = ALLOWED) -> str:
        return f"http://{host}:{self.port}/{path}"

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Whatever the path says."""
        self.asked[request.transport.get_extra_info("sockname")[0]] += 1  # type: ignore[union-attr]
        name = request.match_info["name"]
        if name in self.files:
            return web.Response(body=self.files[name])
        if name == "to":
            return web.Response(
                status=int(request.query.get("status", 302)), headers={"Location": request.query["url"]}
            )
        if name == "loop":
            return web.Response(status=302, headers={"Location": "/loop"})
        if name == "nowhere":
            return web.Response(status=302)
        if name == "long":
            return await _pieces(request, 3 * MIB, declared=True)
        if name == "endless":
            return await _pieces(request, 1 << 40)
        if name == "slow":
            return await _pieces(request, 1 << 20, pause_s=0.05, size=1)
        if name == "bomb":
            packed = gzip.compress(bytes(64 * MIB))
            return web.Response(body=packed, headers={"Content-Encoding": "gzip"})
        return web.Response(text="nothing", status=int(name) if name.isdecimal() else 200)


async def _pieces(
    request: web.Request, length: int, *, declared: bool = False, pause_s: float = 0.0, size: int = 65536
) -> web.StreamResponse:
    answer = web.StreamResponse()
    if declared:
        answer.content_length = length
    await answer.prepare(request)
    for _ in range(length // size):
        await answer.write(b"x" * size)
        await asyncio.sleep(pause_s)
    return answer


@pytest_asyncio.fixture
async def site() -> AsyncIterator[Site]:
    made = Site()
    app = web.Application()
    app.router.add_get("/{name:.*}", made.answer)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    for host in (REFUSED, ALLOWED):
        tcp = web.TCPSite(runner, host, made.port, shutdown_timeout=0)
        await tcp.start()
        made.port = runner.addresses[0][1]
    yield made
    await runner.cleanup()


@pytest.fixture
def fetch() -> Callable[..., Any]:
    return Fetcher(Rules.of(ALLOWED)).async_get_bytes


def names(monkeypatch: pytest.MonkeyPatch, *answers: list[str]) -> None:
    """Let every name resolve to the next of `answers`, the last one repeats."""
    real, left = socket.getaddrinfo, list(answers)

    def resolve(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(host, str) or not host.endswith(".test"):
            return real(host, port, *args, **kwargs)
        found = left.pop(0) if len(left) > 1 else left[0]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


async def test_a_file_is_fetched_and_redirects_are_followed(site: Site, fetch: Callable[..., Any]) -> None:
    assert await fetch(site.url("image_url")) == site.files["image_url"]
    for status in (301, 302, 303, 307, 308):
        assert await fetch(site.url(f"to?status={status}&url=/audio_url")) == site.files["audio_url"]
    assert site.asked[REFUSED] == 0


async def test_only_the_allowed_address_is_connected_to(site: Site, fetch: Callable[..., Any]) -> None:
    for url in (
        site.url("image_url", REFUSED),
        site.url("image_url", "localhost"),
        site.url("image_url", "127.1"),
        site.url("image_url", "2130706433"),
        site.url("image_url", "0x7f.0.0.1"),
        site.url("image_url", "0"),
        site.url("image_url", "[::ffff:127.0.0.1]"),
        site.url("to?url=" + site.url("image_url", REFUSED)),
        site.url(f"to?url=//{REFUSED}:{site.port}/image_url"),
        site.url("to?url=file:///etc/passwd"),
        site.url("to?url=gopher://127.0.0.2:1/x"),
        "ftp://127.0.0.2/x",
        "http:///x",
    ):
        with pytest.raises((OSError, ValueError, FetchRefused)):
            await fetch(url, timeout=5)
    assert site.asked[REFUSED] == 0


async def test_a_redirect_is_not_followed_when_vllm_says_so(site: Site, fetch: Callable[..., Any]) -> None:
    with pytest.raises(FetchRefused, match="redirects"):
        await fetch(site.url("to?url=/image_url"), allow_redirects=False)


async def test_a_name_that_resolves_to_something_else_the_second_time(
    site: Site, fetch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    names(monkeypatch, [ALLOWED], [REFUSED])
    assert await fetch(site.url("image_url", "rebind.test")) == site.files["image_url"]
    with pytest.raises(OSError):
        await fetch(site.url("image_url", "rebind.test"))
    names(monkeypatch, [REFUSED, ALLOWED])
    assert await fetch(site.url("image_url", "both.test")) == site.files["image_url"]
    assert (site.asked[ALLOWED], site.asked[REFUSED]) == (2, 0)


async def test_a_named_host_may_have_any_address(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    names(monkeypatch, [REFUSED])
    fetch = Fetcher(Rules.of("Media.Test")).async_get_bytes
    assert await fetch(site.url("image_url", "media.test")) == site.files["image_url"]
    for other in ("other.test", REFUSED, "x.media.test"):
        with pytest.raises(OSError):
            await fetch(site.url("image_url", other))
    assert await Fetcher(Rules.of("all")).async_get_bytes(site.url("image_url", "other.test"))


async def test_vllms_domains_hold_after_a_redirect_too(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    names(monkeypatch, [ALLOWED])
    fetch = Fetcher(Rules.of(ALLOWED, ["good.test"])).async_get_bytes
    assert await fetch(site.url("image_url", "good.test"))
    for url in (
        site.url("image_url", "bad.test"),
        site.url("to?url=" + site.url("image_url", "bad.test"), "good.test"),
    ):
        with pytest.raises(FetchRefused, match="allowed-media-domains"):
            await fetch(url)


@pytest.mark.parametrize("path", ["long", "endless"])
async def test_long_bodies(site: Site, fetch: Callable[..., Any], path: str) -> None:
    with pytest.raises(FetchRefused, match=r"more than"):
        await fetch(site.url(path), max_bytes=2 * MIB)
    assert len(await fetch(site.url("long"), max_bytes=4 * MIB)) == 3 * MIB


async def test_all_together_have_a_limit(site: Site, fetch: Callable[..., Any]) -> None:
    budget = Budget(5 * MIB)

    async def one() -> int:
        with budget.lease():
            return len(await fetch(site.url("long")))

    found = await asyncio.gather(*(one() for _ in range(3)), return_exceptions=True)
    refused = [each for each in found if isinstance(each, FetchRefused)]
    assert refused and "together" in str(refused[0])
    assert budget.held == 0
    assert await one() == 3 * MIB


async def test_vllms_limit_of_size_holds(
    site: Site, fetch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB", "1")
    with pytest.raises(FetchRefused, match=r"more than"):
        await fetch(site.url("endless"))


@pytest.mark.parametrize("path", ["slow", "to?url=/slow"])
async def test_the_time_counts_for_everything_together(site: Site, fetch: Callable[..., Any], path: str) -> None:
    with pytest.raises(TimeoutError):
        await fetch(site.url(path), timeout=0.3)


async def test_answers_that_are_no_file(site: Site, fetch: Callable[..., Any]) -> None:
    for path, why in (("bomb", "compressed"), ("404", "status 404"), ("503", "status 503")):
        with pytest.raises(FetchRefused, match=why):
            await fetch(site.url(path))
    for path in ("loop", "nowhere"):
        before = site.asked[ALLOWED]
        with pytest.raises(FetchRefused, match="redirects"):
            await fetch(site.url(path))
        assert site.asked[ALLOWED] - before == MOST_REDIRECTS + 1


PRIVATE = [
    "0.0.0.0",
    "10.1.2.3",
    "127.0.0.1",
    "127.255.255.255",
    "169.254.169.254",
    "172.16.0.1",
    "192.168.1.1",
    "100.64.0.1",
    "100.100.100.200",
    "192.0.0.192",
    "168.63.129.16",
    "198.18.0.1",
    "192.0.2.1",
    "224.0.0.1",
    "239.1.1.1",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "fe80::1",
    "fc00::1",
    "fd00:ec2::254",
    "fec0::1",
    "ff02::1",
    "2001:db8::1",
    "100::1",
    "::127.0.0.1",
    "::ffff:10.0.0.1",
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "64:ff9b::7f00:1",
    "64:ff9b::a00:1",
    "64:ff9b:1::1",
    "2002:7f00:1::",
    "2002:a9fe:a9fe::1",
    "2001:0:102:304::1",
    "5f00::1",
]
PUBLIC = [
    "1.1.1.1",
    "8.8.8.8",
    "93.184.216.34",
    "2606:4700:4700::1111",
    "::ffff:8.8.8.8",
    "64:ff9b::808:808",
    "2002:808:808::1",
]


@pytest.mark.parametrize("address", [*PRIVATE, *PUBLIC])
def test_addresses(address: str) -> None:
    reached = all(for_everybody(each) for each in destinations(ipaddress.ip_address(address)))
    assert reached == (address in PUBLIC)


def test_what_the_key_may_be() -> None:
    from vllm_omni_ext.config.parse import Names, parse_config

    for fine in ("all", "10.0.0.0/8", "::1", "media.internal, 10.1.2.3"):
        assert parse_config({"allow_private_media": fine}, Names(stages=())).allow_private_media == fine
    for wrong in ("", ",", "10.0.0", "10.0.0.0/33", "http://host", "a b", 7):
        with pytest.raises(ConfigError, match="allow_private_media: must be 'all', or a comma-separated list"):
            parse_config({"allow_private_media": wrong}, Names(stages=()))


# -- through the server ----------------------------------------------------------------------------------------------


def question(kind: str, url: str) -> dict[str, Any]:
    content = [{"type": kind, kind: {"url": url}}]
    return {"model": "tiny", "messages": [{"role": "user", "content": content}], "modalities": ["text"]}


def responses_question(url: str) -> dict[str, Any]:
    return {"model": "tiny", "input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]}


async def post(app: Any, path: str, body: dict[str, Any]) -> tuple[httpx.Response, float]:
    """The answer, and the seconds it took."""
    since = time.monotonic()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server") as client:
        return await client.post(path, json=body), time.monotonic() - since


@pytest.mark.parametrize("kind", KINDS)
async def test_chat_reads_what_it_fetches(site: Site, app: Any, engine: ScriptedOmni, kind: str) -> None:
    engine.script = ("seen",)
    with install(ALLOWED):
        answer, _ = await post(app, "/v1/chat/completions", question(kind, site.url(kind)))
    assert answer.status_code == 200, answer.text
    assert site.asked == {ALLOWED: 1}


@pytest.mark.parametrize("kind", KINDS)
async def test_nothing_can_be_told_from_a_failure(site: Site, app: Any, engine: ScriptedOmni, kind: str) -> None:
    with socket.socket() as closed:
        closed.bind((ALLOWED, 0))
        silent = closed.getsockname()[1]
        urls = [
            site.url(kind, REFUSED),
            f"http://{REFUSED}:{silent}/x",
            f"http://{ALLOWED}:{silent}/x",
            site.url("404"),
            site.url("text"),
            site.url("to?url=" + site.url(kind, REFUSED)),
            "http://no-such-host.invalid/x",
        ]
        with install(ALLOWED):
            found = await asyncio.gather(*(post(app, "/v1/chat/completions", question(kind, url)) for url in urls))
    said = {(answer.status_code, answer.text) for answer, _ in found}
    assert len(said) == 1, said
    error = found[0][0].json()["error"]
    assert (error["code"], error["param"]) == (400, "messages")
    assert error["message"] == f"messages: {kind} {FAILED}"
    assert all(took >= EARLIEST_FAILURE_S for _, took in found)
    assert site.asked[REFUSED] == 0


async def test_other_endpoints_fetch_by_the_same_rules(
    site: Site, app: Any, engine: ScriptedOmni, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_omni_ext.serving.media.EARLIEST_FAILURE_S", 0.0)
    chat = {
        key: value
        for key, value in question("image_url", site.url("image_url", REFUSED)).items()
        if key != "modalities"
    }
    with install(None):
        for path, body in (
            ("/v1/responses", responses_question(site.url("image_url", REFUSED))),
            ("/tokenize", chat),
        ):
            answer, _ = await post(app, path, body)
            assert (answer.status_code, answer.json()["error"]["message"]) == (400, f"image_url {FAILED}"), path
    assert not site.asked


def test_a_plain_vllm_keeps_its_own() -> None:
    from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector

    assert MEDIA_CONNECTOR_REGISTRY.name2class["http"] is MediaConnector
    with install(None):
        assert MEDIA_CONNECTOR_REGISTRY.name2class["http"] is not MediaConnector
    assert MEDIA_CONNECTOR_REGISTRY.name2class["http"] is MediaConnector
