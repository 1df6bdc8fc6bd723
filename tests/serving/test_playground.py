"""The page `/playground` on the real server application: its routes, its headers, and the references in its files."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
import pytest_asyncio

from tests.serving.conftest import asking
from tests.support.scripted import ScriptedOmni
from vllm_omni_ext.serving.playground import routes

pytestmark = pytest.mark.asyncio(loop_scope="session")

NAMED = "input", "textarea", "select"
"""Elements that need a label."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def page(server_parts: tuple[ScriptedOmni, Any]) -> Any:
    """The application with the page, and an API key."""
    from vllm_omni_ext.serving.app import make_app

    omni, args = copy.copy(server_parts[0]), copy.copy(server_parts[1])
    omni.plan = replace(omni.plan, config=replace(omni.plan.config, playground=True))
    args.api_key = ["a-key"]
    return await make_app(omni, args)


class Elements(HTMLParser):
    """The elements of a page: (tag, attributes), and the ids that labels are for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def of(self, name: str) -> list[str]:
        """Values of an attribute."""
        return [value for _, attributes in self.found if (value := attributes.get(name)) is not None]


def text_of(path: str) -> str:
    return routes.files()[path][0].decode()


async def test_there_is_no_page_unless_the_deployment_has_it(app: Any, page: Any) -> None:
    async with asking(app) as client:
        assert {(await client.get(path)).status_code for path in routes.paths()} == {404}
    async with asking(page) as client:
        for path in routes.paths():
            answer = await client.get(path)
            assert answer.status_code == 200, path
            policy = answer.headers["Content-Security-Policy"].split("; ")
            assert {"default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'"} <= {*policy}
            assert not re.search(r"unsafe|\*|https?:|data:", " ".join(policy))
        assert (await client.head(routes.PATH)).headers["content-type"] == "text/html; charset=utf-8"


async def test_the_page_needs_no_key_and_its_requests_do(page: Any) -> None:
    async with asking(page) as client:
        facts = (await client.get(routes.FACTS)).json()
        assert facts == {"needs_key": True, "routes": list(routes.USED)}
        others = ("/v1/models", "/v1/omni/status", f"{routes.PATH}/routes.py", f"{routes.PATH}/../version")
        for path in others:
            assert (await client.get(path)).status_code == 401, path
        answer = await client.get("/v1/models", headers={"Authorization": "Bearer a-key"})
        assert {"modalities", "request_fields"} <= answer.json()["data"][0].keys()


async def test_the_files_refer_to_each_other_only() -> None:
    page = Elements(text_of(routes.PATH))
    referred = {f"/{link}" for name in ("src", "href") for link in page.of(name) if not link.startswith("#")}
    for path in sorted(routes.files().keys() - {routes.PATH}):
        text = text_of(path)
        imported = re.findall(r"from \"\./([\w.]+)\"|new URL\(\"([\w.]+)\", import\.meta\.url\)", text)
        referred |= {f"{routes.PATH}/{first or second}" for first, second in imported}
        assert not re.search(r"@import|url\(", text), path
    assert referred == routes.files().keys() - {routes.PATH}
    for path in routes.files():
        outside = re.findall(r"\w+://[^\s\"'`<)]*|[\"'(]//\w", text_of(path).replace("http://www.w3.org/2000/svg", ""))
        assert set(outside) <= {"https://"}, (path, outside)  # the name of the scheme, in an error
        assert not re.search(r"localStorage|sessionStorage|indexedDB|document\.cookie|caches\.", text_of(path)), path


async def test_every_control_has_a_name_and_every_id_exists() -> None:
    page = Elements(text_of(routes.PATH))
    ids, labelled = page.of("id"), page.of("for")
    assert len(ids) == len(set(ids))
    for tag, attributes in page.found:
        assert tag not in NAMED or attributes["id"] in labelled, attributes
        assert not any(name == "style" or name.startswith("on") for name in attributes), attributes
    mentioned = {*labelled, *page.of("aria-labelledby"), *page.of("aria-describedby")}
    mentioned |= {link[1:] for link in page.of("href") if link.startswith("#")}
    script = text_of(f"{routes.PATH}/page.js")
    assert mentioned | set(re.findall(r"\$\(\"([\w-]+)\"\)", script)) <= set(ids)
    assert {"lang": "en"} in [attributes for tag, attributes in page.found if tag == "html"]
