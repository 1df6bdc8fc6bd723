"""Media from URLs of clients, fetched from real HTTP servers on two loopback addresses, one of which is allowed."""

from __future__ import annotations

import asyncio
import base64
import gzip
import ipaddress
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx
import pytest
import pytest_asyncio
from aiohttp import web

from tests.serving.conftest import asking
from tests.support import media
from tests.support.scripted import ScriptedOmni
from vllm_omni_ext.config.parse import Names, parse_config
from vllm_omni_ext.errors import ConfigError, RequestError
from vllm_omni_ext.serving.limits.fetching import (
    MOST_REDIRECTS,
    Fetcher,
    FetchRefused,
    Rules,
    destinations,
    for_everybody,
)
from vllm_omni_ext.serving.limits.media import EARLIEST_FAILURE_S, FAILED, Budget, install

REFUSED, ALLOWED = "127.0.0.1", "127.0.0.2"
MIB = 1 << 20
KINDS = ("image_url", "audio_url", "video_url")


def files() -> dict[str, bytes]:
    """Return a readable file of each kind."""
    urls = {
        "image_url": media.image_url(media.image(48, 48, seed=1)),
        "audio_url": media.audio_url(media.audio(0.5, seed=1)),
        "video_url": media.video_url(media.video(4, 64, 64, 1)),
    }
    return {kind: base64.b64decode(url.partition(",")[2]) for kind, url in urls.items()}


class Site:
    """A web server at both addresses; `asked` counts the requests to each."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.port = 0
        self.files = files()

    def url(self, path: str, host: str = ALLOWED) -> str:
        return f"http://{host}:{self.port}/{path}"

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked[request.transport.get_extra_info("sockname")[0]] += 1  # type: ignore[union-attr]
        match name := request.match_info["name"]:
            case "to":
                status = int(request.query.get("status", 302))
                return web.Response(status=status, headers={"Location": request.query["url"]})
            case "loop":
                return web.Response(status=302, headers={"Location": "/loop"})
            case "nowhere":
                return web.Response(status=302)
            case "long":
                return await _pieces(request, 3 * MIB, declared=True)
            case "endless":
                return await _pieces(request, 1 << 40)
            case "slow":
                return await _pieces(request, 1 << 20, pause_s=0.05, size=1)
            case "bomb":
                return web.Response(body=gzip.compress(bytes(MIB)), headers={"Content-Encoding": "gzip"})
        if name in self.files:
            return web.Response(body=self.files[name])
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
    return fetcher(ALLOWED)


def fetcher(allowed: str, domains: Sequence[str] = (), take: Callable[[int], None] = lambda _: None) -> Any:
    return Fetcher(Rules.of(allowed, domains), take).async_get_bytes


def names(monkeypatch: pytest.MonkeyPatch, *answers: list[str]) -> None:
    """Resolve each name to the next of `answers`; the last one repeats."""
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
    with pytest.raises(FetchRefused, match="redirects"):
        await fetch(site.url("to?url=/image_url"), allow_redirects=False)
    assert site.asked[REFUSED] == 0


async def test_only_the_allowed_address_is_connected_to(site: Site, fetch: Callable[..., Any]) -> None:
    hosts = REFUSED, "localhost", "127.1", "2130706433", "0x7f.0.0.1", "0", "[::ffff:127.0.0.1]"
    there = site.url("image_url", REFUSED)
    targets = there, there.removeprefix("http:"), "file:///etc/passwd", "gopher://127.0.0.2:1/x"
    redirects = [site.url(f"to?url={target}") for target in targets]
    for url in (*(site.url("image_url", host) for host in hosts), *redirects, "ftp://127.0.0.2/x", "http:///x"):
        with pytest.raises((OSError, ValueError, FetchRefused)):
            await fetch(url, timeout=5)
    assert site.asked[REFUSED] == 0


async def test_the_address_of_each_connection_is_checked(
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
    fetch = fetcher("Media.Test")
    assert await fetch(site.url("image_url", "media.test")) == site.files["image_url"]
    for other in ("other.test", REFUSED, "x.media.test"):
        with pytest.raises(OSError):
            await fetch(site.url("image_url", other))
    assert await fetcher("all")(site.url("image_url", "other.test"))


async def test_allowed_media_domains_also_hold_after_a_redirect(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    names(monkeypatch, [ALLOWED])
    fetch = fetcher(ALLOWED, ["good.test"])
    assert await fetch(site.url("image_url", "good.test"))
    for url in (
        site.url("image_url", "bad.test"),
        site.url("to?url=" + site.url("image_url", "bad.test"), "good.test"),
    ):
        with pytest.raises(FetchRefused, match="allowed-media-domains"):
            await fetch(url)


async def test_bodies_of_a_request_are_charged_to_its_budget(site: Site, fetch: Callable[..., Any]) -> None:
    class RequestBudget:
        left = 4 * MIB

        def charge(self, size: int) -> None:
            self.left -= size
            if self.left < 0:
                raise ValueError("all bodies of the request are too long")

    budget = RequestBudget()
    assert len(await fetch(site.url("long"), request_budget=budget)) == 3 * MIB == 4 * MIB - budget.left
    with pytest.raises(ValueError, match="all bodies"):
        await fetch(site.url("long"), request_budget=budget)


@pytest.mark.parametrize("path", ["long", "endless"])
async def test_a_body_beyond_the_limit_is_refused(
    site: Site, fetch: Callable[..., Any], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FetchRefused, match=r"more than"):
        await fetch(site.url(path), max_bytes=2 * MIB)
    assert len(await fetch(site.url("long"), max_bytes=4 * MIB)) == 3 * MIB
    monkeypatch.setenv("VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB", "1")
    with pytest.raises(FetchRefused, match=r"more than"):
        await fetch(site.url(path))


@pytest.mark.parametrize(
    ("path", "reason", "requests"),
    [
        ("bomb", "compressed", 1),
        ("404", "status 404", 1),
        ("503", "status 503", 1),
        ("loop", "redirects", MOST_REDIRECTS + 1),
        ("nowhere", "redirects", MOST_REDIRECTS + 1),
    ],
)
async def test_an_answer_without_a_file_is_refused(
    site: Site, fetch: Callable[..., Any], path: str, reason: str, requests: int
) -> None:
    with pytest.raises(FetchRefused, match=reason):
        await fetch(site.url(path))
    assert site.asked[ALLOWED] == requests


async def test_all_fetches_together_have_a_limit_of_bytes(site: Site) -> None:
    budget = Budget(5 * MIB, "too many bytes together", parameter="url")

    async def one() -> int:
        with budget.lease() as take:
            return len(await fetcher(ALLOWED, take=take)(site.url("long")))

    found = await asyncio.gather(*(one() for _ in range(3)), return_exceptions=True)
    refused = [each for each in found if isinstance(each, RequestError)]
    assert refused and "together" in str(refused[0])
    assert budget.held == 0
    assert await one() == 3 * MIB


@pytest.mark.parametrize("path", ["slow", "to?url=/slow"])
async def test_the_time_limit_includes_redirects_and_the_body(site: Site, fetch: Callable[..., Any], path: str) -> None:
    with pytest.raises(TimeoutError):
        await fetch(site.url(path), timeout=0.3)


PRIVATE = """
0.0.0.0 10.1.2.3 127.0.0.1 127.255.255.255 169.254.169.254 172.16.0.1 192.168.1.1 100.64.0.1 100.100.100.200 192.0.0.192
168.63.129.16 198.18.0.1 192.0.2.1 224.0.0.1 239.1.1.1 240.0.0.1 255.255.255.255 :: ::1 fe80::1 fc00::1 fd00:ec2::254
fec0::1 ff02::1 2001:db8::1 100::1 ::127.0.0.1 ::ffff:10.0.0.1 ::ffff:127.0.0.1 ::ffff:169.254.169.254 64:ff9b::7f00:1
64:ff9b::a00:1 64:ff9b:1::1 2002:7f00:1:: 2002:a9fe:a9fe::1 2001:0:102:304::1 5f00::1
"""
PUBLIC = """
1.1.1.1 8.8.8.8 93.184.216.34 2606:4700:4700::1111 ::ffff:8.8.8.8 64:ff9b::808:808 2002:808:808::1
"""


@pytest.mark.parametrize("address", (PRIVATE + PUBLIC).split())
def test_only_public_addresses_are_reached(address: str) -> None:
    reached = all(for_everybody(each) for each in destinations(ipaddress.ip_address(address)))
    assert reached == (address in PUBLIC.split())


@pytest.mark.parametrize("value", ["", ",", "10.0.0", "10.0.0.0/33", "http://host", "a b", 7])
def test_a_wrong_list_of_allowed_private_media_is_refused(value: Any) -> None:
    for fine in ("all", "10.0.0.0/8", "::1", "media.internal, 10.1.2.3"):
        assert parse_config({"allow_private_media": fine}, Names(stages=())).allow_private_media == fine
    with pytest.raises(ConfigError, match="allow_private_media: must be 'all', or a comma-separated list"):
        parse_config({"allow_private_media": value}, Names(stages=()))


# -- through the server ----------------------------------------------------------------------------------------------


async def ask(app: Any, kind: str, url: str) -> tuple[httpx.Response, float]:
    """Return the answer, and the seconds until it arrived."""
    message, since = {"role": "user", "content": [{"type": kind, kind: {"url": url}}]}, time.monotonic()
    async with asking(app) as client:
        body = {"messages": [message], "modalities": ["text"]}
        return await client.post("/v1/chat/completions", json=body), time.monotonic() - since


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
async def test_all_failures_to_fetch_give_the_same_answer(
    site: Site, app: Any, engine: ScriptedOmni, kind: str
) -> None:
    engine.script = ("seen",)
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
            found = await asyncio.gather(*(ask(app, kind, url) for url in urls))
            good, _ = await ask(app, kind, site.url(kind))
    assert good.status_code == 200, good.text
    assert len({(answer.status_code, answer.text) for answer, _ in found}) == 1
    error = found[0][0].json()["error"]
    assert (error["code"], error["param"]) == (400, "messages")
    assert error["message"] == f"messages: {kind} {FAILED}"
    assert all(took >= EARLIEST_FAILURE_S for _, took in found)
    assert site.asked[REFUSED] == 0
