"""Fetches the URLs in requests from public addresses, and from addresses that the operator allows.

The address is checked when the socket of the connection is created. Thus the host name cannot resolve to another
address between the check and the connection. Every redirect is checked like the first URL.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import socket
from collections.abc import Callable, Collection, Iterator
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
"""Time limit in seconds of a fetch if the caller sets none."""

TRANSLATED = ipaddress.IPv6Network("64:ff9b::/96")
"""NAT64 addresses: the last four bytes are the IPv4 address that the connection reaches."""

GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")

NOT_FOR_EVERYBODY = (ipaddress.IPv4Network("192.0.0.0/24"), ipaddress.IPv4Network("168.63.129.16/32"))
"""Addresses for which Python's `is_global` is true, but which clouds use for metadata services and hosts."""


class FetchRefused(PermissionError):
    """The rules forbid the URL or its address, or the response is not acceptable."""


@dataclass(frozen=True)
class Rules:
    """The hosts and addresses from which media may be fetched.

    Attributes:
        private_names: hosts whose addresses are not checked.
        private_networks: networks that are allowed although they are not public.
        everything: all addresses are allowed.
        domains: vLLM's `--allowed-media-domains`; empty: all hosts are allowed.
    """

    private_names: frozenset[str] = frozenset()
    private_networks: tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...] = ()
    everything: bool = False
    domains: frozenset[str] = frozenset()

    @classmethod
    def of(cls, allowed: str | None, domains: Collection[str] = ()) -> Rules:
        """Return the rules for the stage config's `allow_private_media` (already checked) and vLLM's domain list."""
        words = [word.strip().lower() for word in (allowed or "").split(",") if word.strip()]
        networks = [network for word in words if (network := as_network(word)) is not None]
        names = frozenset(word for word in words if as_network(word) is None and word != EVERYTHING)
        return cls(names, tuple(networks), EVERYTHING in words, frozenset(domains))

    def check_url(self, url: URL) -> None:
        """Raise FetchRefused if the URL's scheme is not http or https, or its host is missing or not in `domains`."""
        if url.scheme not in ("http", "https") or not url.raw_host:
            raise FetchRefused("only http and https URLs of a host are fetched")
        if self.domains and url.raw_host not in self.domains:
            raise FetchRefused(f"{url.raw_host} is not one of --allowed-media-domains")

    def check_address(self, host: str, address: str) -> None:
        """Raise FetchRefused if the rules forbid a connection to `address`, to which `host` has resolved."""
        if self.everything or host.lower() in self.private_names:
            return
        for each in destinations(ipaddress.ip_address(address.partition("%")[0])):
            inside = any(each.version == network.version and each in network for network in self.private_networks)
            if not inside and not for_everybody(each):
                raise FetchRefused(f"{host} has the address {address}, which is not public (see allow_private_media)")


def for_everybody(address: Address) -> bool:
    """Return whether an address is a public unicast address."""
    if isinstance(address, ipaddress.IPv6Address):
        return address in GLOBAL_UNICAST and address.is_global
    special = address.is_multicast or address.is_reserved or any(address in network for network in NOT_FOR_EVERYBODY)
    return address.is_global and not special


def destinations(address: Address) -> Iterator[Address]:
    """Yield the addresses that a connection to `address` can reach, including IPv4 addresses embedded in `address`."""
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


class Fetcher:
    """Replaces the HTTP connection of vLLM's `MediaConnector`.

    Args:
        rules: the allowed hosts and addresses.
        take: called with the number of bytes of each piece of a body; an error that it raises ends the fetch.
    """

    def __init__(self, rules: Rules, take: Callable[[int], None]) -> None:
        self._rules = rules
        self._take = take

    async def async_get_bytes(
        self,
        url: str,
        *,
        timeout: float | None = None,
        allow_redirects: bool = True,
        max_bytes: int | None = None,
        request_budget: Any = None,
    ) -> bytes:
        """Return the body behind a URL.

        Args:
            timeout: seconds for the whole fetch: name resolution, connections, redirects and the body.
            max_bytes: byte limit of the body, in addition to VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB.
            request_budget: vLLM's byte limit of all bodies of a request (since vLLM 0.33). Its method `charge` takes
                a number of bytes and raises an error if the limit is exceeded.

        Raises:
            FetchRefused: the URL, a redirect, or an address is forbidden, or the response is not acceptable.
            OSError, TimeoutError, aiohttp.ClientError: the fetch failed.
        """
        limits = [each for each in (max_bytes, envs.VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB * MIB) if each and each > 0]
        charges = [self._take] if request_budget is None else [self._take, request_budget.charge]
        async with asyncio.timeout(LIMIT_S if timeout is None else timeout):
            here = URL(url)
            for _ in range(MOST_REDIRECTS + 1 if allow_redirects else 1):
                found = await self._get(here, min(limits, default=math.inf), charges)
                if isinstance(found, bytes):
                    return found
                here = found
        raise FetchRefused("too many redirects")

    async def _get(self, url: URL, longest: float, charges: list[Callable[[int], None]]) -> bytes | URL:
        """Send one HTTP request; return the response's body, or the target URL of a redirect."""
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
                raise FetchRefused("the answer is compressed although that was not requested")
            if (answer.content_length or 0) > longest:
                raise FetchRefused(f"the body has {answer.content_length} bytes, more than {longest}")
            body = bytearray()
            async for piece in answer.content.iter_chunked(READ_BYTES):
                body += piece
                for charge in charges:
                    charge(len(piece))
                if len(body) > longest:
                    raise FetchRefused(f"the body has more than {longest} bytes")
            return bytes(body)

    def _session(self, url: URL, *, direct: bool) -> aiohttp.ClientSession:
        host = url.raw_host or ""

        def checked(info: Any) -> socket.socket:
            family, kind, protocol, _, address = info
            if direct:
                self._rules.check_address(host, address[0])
            return socket.socket(family, kind, protocol)

        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(socket_factory=checked, use_dns_cache=False, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None),  # the caller limits the time of all requests together
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,  # a small compressed body could expand to any size
            headers={"User-Agent": f"vLLM/{VLLM_VERSION}", "Accept-Encoding": "identity"},
        )

    async def _proxy(self, url: URL) -> dict[str, Any]:
        """Return aiohttp's arguments for the proxy that the environment sets for a URL; empty without a proxy.

        The proxy resolves the name of the host and connects to it. This process checks the addresses only if it can
        resolve the name too.
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
