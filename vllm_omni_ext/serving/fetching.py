"""Fetches of a URL that a client has named: only from addresses that are meant for everybody, unless the operator
allows others.

The address is checked when a socket is made for it, which is the moment it is connected to: no name can resolve to
something else in between, and every redirect is checked like the first URL.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias

import aiohttp
from aiohttp.helpers import get_env_proxy_for_url
from vllm import envs
from vllm.version import __version__ as VLLM_VERSION
from yarl import URL

from vllm_omni_ext.config.checks import EVERYTHING, as_network

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

MOST_REDIRECTS = 5
REDIRECTS = frozenset({301, 302, 303, 307, 308})
OK = range(200, 300)
READ_BYTES = 64 << 10
MIB = 1 << 20

LIMIT_S = 60.0
"""For a fetch without a time limit of its own."""

TRANSLATED = ipaddress.IPv6Network("64:ff9b::/96")
"""NAT64: the last four bytes are the IPv4 address that is connected to."""

GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")

NOT_FOR_EVERYBODY = (ipaddress.IPv4Network("192.0.0.0/24"), ipaddress.IPv4Network("168.63.129.16/32"))
"""Addresses that Python takes for global, and that clouds use for their metadata and hosts."""


class FetchRefused(PermissionError):
    """A URL that must not be fetched."""


@dataclass(frozen=True)
class Rules:
    """Where media may be fetched from.

    Attributes:
        private_names: hosts that may have any address.
        private_networks: networks whose addresses are allowed although they are private.
        everything: nothing is refused.
        domains: vLLM's `--allowed-media-domains`; empty: all.
    """

    private_names: frozenset[str] = frozenset()
    private_networks: tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...] = ()
    everything: bool = False
    domains: frozenset[str] = frozenset()

    @classmethod
    def of(cls, allowed: str | None, domains: Collection[str] = ()) -> Rules:
        """From the stage config's `allow_private_media`, which has been checked, and vLLM's list."""
        words = [word.strip().lower() for word in (allowed or "").split(",") if word.strip()]
        networks = [network for word in words if (network := as_network(word)) is not None]
        names = frozenset(word for word in words if as_network(word) is None and word != EVERYTHING)
        return cls(names, tuple(networks), EVERYTHING in words, frozenset(domains))

    def check_url(self, url: URL) -> None:
        """FetchRefused for a URL that is not to be fetched whatever its address is."""
        if url.scheme not in ("http", "https") or not url.raw_host:
            raise FetchRefused("only http and https URLs of a host are fetched")
        if self.domains and url.raw_host not in self.domains:
            raise FetchRefused(f"{url.raw_host} is not one of --allowed-media-domains")

    def check_address(self, host: str, address: str) -> None:
        """FetchRefused if the address that `host` has must not be connected to."""
        if self.everything or host.lower() in self.private_names:
            return
        for each in destinations(ipaddress.ip_address(address.partition("%")[0])):
            inside = any(each.version == network.version and each in network for network in self.private_networks)
            if not inside and not for_everybody(each):
                raise FetchRefused(f"{host} has the address {address}, which is not public (see allow_private_media)")


def for_everybody(address: Address) -> bool:
    """Whether an address is one of the public internet, for one receiver."""
    if isinstance(address, ipaddress.IPv6Address):
        return address in GLOBAL_UNICAST and address.is_global
    special = address.is_multicast or address.is_reserved or any(address in network for network in NOT_FOR_EVERYBODY)
    return address.is_global and not special


def destinations(address: Address) -> Iterator[Address]:
    """What a connection to an address may reach: the address itself, and IPv4 addresses that are written in it."""
    if isinstance(address, ipaddress.IPv4Address):
        yield address
    elif address.ipv4_mapped is not None:
        yield address.ipv4_mapped
    elif address in TRANSLATED:
        yield ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    else:
        yield address
        if address.sixtofour is not None:
            yield address.sixtofour
        yield from address.teredo or ()


class Budget:
    """Bytes of media that a process may hold at once, from their arrival until they are decoded.

    Args:
        most: the fetch that would make them more fails.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.held = 0

    @contextmanager
    def lease(self) -> Iterator[None]:
        """What is fetched by this task inside the block is held until its end."""
        lease = _Lease(self)
        token = _LEASE.set(lease)
        try:
            yield
        finally:
            _LEASE.reset(token)
            self.held -= lease.taken

    def take(self, count: int) -> None:
        """FetchRefused if there is no room for so many more bytes."""
        self.held += count
        if self.held > self._most:
            raise FetchRefused(f"all media being fetched have more than {self._most} bytes together")


class _Lease:
    """What one task has taken."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.taken = 0

    def take(self, count: int) -> None:
        self.taken += count
        self._budget.take(count)


_LEASE: ContextVar[_Lease | None] = ContextVar("omni_media_lease", default=None)


class Fetcher:
    """What vLLM's `MediaConnector` takes for its connection.

    Args:
        rules: where from.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules

    async def async_get_bytes(
        self, url: str, *, timeout: float | None = None, allow_redirects: bool = True, max_bytes: int | None = None
    ) -> bytes:
        """The body behind a URL.

        Args:
            timeout: seconds for everything together: names, connections, redirects and the body.
            max_bytes: longest body; VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB limits it too.

        Raises:
            FetchRefused: the URL, a redirect or an address is not allowed, or the answer has a form that is not.
            OSError, TimeoutError, aiohttp.ClientError: it could not be had.
        """
        longest = _longest(max_bytes)
        async with asyncio.timeout(LIMIT_S if timeout is None else timeout):
            here = URL(url)
            for _ in range(MOST_REDIRECTS + 1 if allow_redirects else 1):
                found = await self._get(here, longest)
                if isinstance(found, bytes):
                    return found
                here = found
        raise FetchRefused("too many redirects")

    def get_bytes(self, url: str, **options: Any) -> bytes:
        """The same, in a thread without an event loop."""
        return asyncio.run(self.async_get_bytes(url, **options))

    async def _get(self, url: URL, longest: int | None) -> bytes | URL:
        """One request: the body, or where it leads."""
        self._rules.check_url(url)
        proxy = await self._proxy(url)
        async with (
            self._session(url, direct=not proxy) as session,
            session.get(url, allow_redirects=False, **proxy) as answer,
        ):
            if answer.status in REDIRECTS:
                return url.join(URL(answer.headers.get("Location", "")))
            if answer.status not in OK:
                raise FetchRefused(f"the answer has status {answer.status}")
            if answer.headers.get("Content-Encoding", "identity").lower() != "identity":
                raise FetchRefused("the answer is compressed although that was not asked for")
            return await _read(answer, longest)

    def _session(self, url: URL, *, direct: bool) -> aiohttp.ClientSession:
        host = url.raw_host or ""

        def checked(info: Any) -> socket.socket:
            family, kind, protocol, _, address = info
            if direct:
                self._rules.check_address(host, address[0])
            return socket.socket(family, kind, protocol)

        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(socket_factory=checked, use_dns_cache=False, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None),  # the time of all requests together is limited
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,  # a small body could become one of any size
            headers={"User-Agent": f"vLLM/{VLLM_VERSION}", "Accept-Encoding": "identity"},
        )

    async def _proxy(self, url: URL) -> dict[str, Any]:
        """The environment's proxy for a URL, as arguments of a request; empty without one.

        The proxy makes the connection. What it should refuse is its own matter; names are checked as far as they can be
        resolved here.
        """
        try:
            proxy, auth = get_env_proxy_for_url(url)
        except LookupError:
            return {}
        try:
            found = await asyncio.get_running_loop().getaddrinfo(url.raw_host, url.port)
        except OSError:
            found = []
        for *_, address in found:
            self._rules.check_address(url.raw_host or "", str(address[0]))
        return {"proxy": proxy, "proxy_auth": auth}


def _longest(max_bytes: int | None) -> int | None:
    limits = [each for each in (max_bytes, envs.VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB * MIB) if each is not None and each > 0]
    return min(limits, default=None)


async def _read(answer: aiohttp.ClientResponse, longest: int | None) -> bytes:
    """The body; FetchRefused as soon as it is known to be longer than `longest` bytes."""
    body, lease = bytearray(), _LEASE.get()
    if longest is not None and (answer.content_length or 0) > longest:
        raise FetchRefused(f"the body has {answer.content_length} bytes, more than {longest}")
    async for piece in answer.content.iter_chunked(READ_BYTES):
        body += piece
        if lease is not None:
            lease.take(len(piece))
        if longest is not None and len(body) > longest:
            raise FetchRefused(f"the body has more than {longest} bytes")
    return bytes(body)
