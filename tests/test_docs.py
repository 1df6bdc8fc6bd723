"""Pages: names of files and functions, links, commands and generated parts are right."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from dev import pages
from examples import chat_http
from tests.support import readme
from vllm_omni_ext.cli import main as cli
from vllm_omni_ext.cli.args import parse_serve
from vllm_omni_ext.model_plugins.bagel.family import FAMILY as BAGEL
from vllm_omni_ext.model_plugins.qwen3_omni.family import FAMILY as QWEN3_OMNI

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = ("architecture", "qwen3-omni", "qwen2-5-omni", "replicas", "connectors", "prefill-decode")
PAGE = "\n".join((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in PAGES)
MODELS = ("qwen3_omni", "qwen2_5_omni", "qwen_omni")
FOLDERS = (ROOT, ROOT / "vllm_omni_ext", *(ROOT / "model_plugins" / model for model in MODELS))
PARTS = ("orchestrator", "engine", "runtime/launch", "runtime/supervise", "runtime/client")
"""Folders of files that are named without a folder."""

FILE_AND_NAME = re.compile(r"`([\w/]+\.py):([\w.]+)`")


def files_named(text: str) -> set[str]:
    """Everything in the text that looks like a file or a folder of this repository."""
    return set(re.findall(r"[\w.][\w./-]*\.(?:py|yaml|md)\b", text)) | set(re.findall(r"`([\w/]+/)`", text))


def find(name: str) -> list[Path]:
    """The files a name may stand for."""
    near = [*FOLDERS, *(ROOT / "vllm_omni_ext" / part for part in PARTS), ROOT / "docs"]
    return [folder / name for folder in (*near, ROOT / "tests" / "processes") if (folder / name).exists()]


def test_every_path_exists() -> None:
    assert sorted(name for name in files_named(PAGE) if not find(name)) == []


def test_every_function_exists() -> None:
    missing = [
        f"{file}:{name}"
        for file, name in FILE_AND_NAME.findall(PAGE)
        if not any(_defines(path, name.split(".")) for path in find(file))
    ]
    assert missing == []


def _defines(path: Path, names: list[str]) -> bool:
    text = path.read_text(encoding="utf-8")
    return all(re.search(rf"^\s*(async )?(def|class) {name}\b", text, re.MULTILINE) for name in names)


README = ROOT / "README.md"
LINKING = sorted([README, *DOCS.glob("*.md"), ROOT / "benchmarks" / "README.md", *(ROOT / "dev").rglob("README.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"^ *(`{3,}).*?^ *\1$", re.MULTILINE | re.DOTALL)
MOST_LINES_OF_THE_README = 150


def anchors(page: Path) -> set[str]:
    """The anchors of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    wrong = []
    for link in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if "://" not in link and not (target.exists() and (not anchor or anchor in anchors(target))):
            wrong.append(link)
    assert wrong == []


def test_the_index_and_the_site_have_every_page() -> None:
    pages = {page.name for page in DOCS.glob("*.md")}
    assert set(re.findall(r"\(([\w-]+\.md)\)", (DOCS / "index.md").read_text(encoding="utf-8"))) == pages - {"index.md"}
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    assert sorted(re.findall(r"[\w-]+\.md", navigation)) == sorted(pages)


def test_the_page_of_models_is_that_of_the_families(tmp_path: Path) -> None:
    pages.write(tmp_path)
    assert (tmp_path / "models.md").read_text() == (DOCS / "models.md").read_text(), "run: make docs"


def test_routes_on_the_page_of_models_are_those_of_the_apis() -> None:
    for api, routes in pages.ROUTES.items():
        module = import_module(api.partition(":")[0])
        assert sorted(route.path for route in module.router.routes) == sorted(routes)


def test_inputs_of_pipelines_are_those_of_the_processors() -> None:
    from vllm.model_executor.models.qwen3_omni_moe_thinker import Qwen3OmniMoeThinkerProcessingInfo

    from vllm_omni_ext.model_plugins.bagel.stages.processor import PictureInfo

    for family, info in ((QWEN3_OMNI, Qwen3OmniMoeThinkerProcessingInfo), (BAGEL, PictureInfo)):
        media = info.get_supported_mm_limits(object.__new__(info))
        assert {frozenset(pipeline.inputs) for pipeline in family.pipelines} == {frozenset({"text", *media})}


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command in the code blocks of a page for bash, without comments and redirections."""
    for block in re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        command = ""
        for line in block.replace("\\\n", " ").splitlines(keepends=True):
            command += line
            try:
                words = shlex.split(command, comments=True)
            except ValueError:  # a quotation that goes on in the next line
                continue
            command = ""
            if words:
                yield words[: next((at for at, word in enumerate(words) if word in (">", "&")), len(words))]


def test_every_server_command_has_flags_of_the_server() -> None:
    found = {tuple(words) for page in LINKING for words in commands(page.read_text(encoding="utf-8"))}
    served = sorted(words for words in found if words[:2] == ("vllm", "serve") and "--omni" in words)
    assert len(served) > 10
    for words in served:
        assert parse_serve([*words[1:]]).omni, words


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A folder with the config of each model that the README names."""
    folder = tmp_path_factory.mktemp("shapes")
    for name, words in (("qwen3-omni", ["--released"]), ("bagel", [])):
        assert cli.main(["tiny", name, str(folder / name), *words]) == 0
    assert cli.main(["tiny", "qwen3-omni", str(folder / "tiny-omni")]) == 0
    return {
        "Qwen/Qwen3-Omni-30B-A3B-Instruct": str(folder / "qwen3-omni"),
        "ByteDance-Seed/BAGEL-7B-MoT": str(folder / "bagel"),
        "tiny-omni": str(folder / "tiny-omni"),
    }


README_PLANS = [words[2:] for words in commands(README.read_text(encoding="utf-8")) if words[1] in ("serve", "plan")]


@pytest.mark.slow
@pytest.mark.parametrize("words", README_PLANS, ids=" ".join)
def test_server_commands_of_the_readme_have_a_plan(words: list[str], shapes: dict[str, str]) -> None:
    machine = [] if "--machine" in words else ["--machine", "cuda:141GiBx3"]
    assert cli.main(["plan", shapes[words[0]], *words[1:], *machine]) == 0


def test_the_chat_example_reports_an_answer_without_sound(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    delta, file = SimpleNamespace(content="Yes", audio=None), tmp_path / "reply.wav"
    answer = [SimpleNamespace(choices=[SimpleNamespace(delta=delta)])]
    client: Any = SimpleNamespace(
        models=SimpleNamespace(list=lambda: SimpleNamespace(data=[SimpleNamespace(id="tiny")])),
        chat=SimpleNamespace(completions=SimpleNamespace(create=lambda **fields: answer)),
    )
    monkeypatch.setattr("openai.OpenAI", lambda **settings: client)
    monkeypatch.setattr("sys.argv", ["chat_http.py", "Yes or no?", "--wav", str(file)])
    chat_http.main()
    assert capsys.readouterr().out == "Yes\nno sound\n" and not file.exists()


def test_every_make_command_of_the_readme_has_a_target() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = README.read_text(encoding="utf-8")
    wanted = set(re.findall(r"(?:^|`)make ([\w-]+)", text, re.MULTILINE))
    assert {"demo", "test"} <= wanted <= targets


def test_the_readme_is_short_and_begins_with_what_to_do() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST_LINES_OF_THE_README
    first = readme.blocks("bash")[:2]
    assert "make demo" in first[0] and "make test" in first[0] and "vllm serve" in first[1]


def test_the_picture_has_a_text_for_screen_readers_and_dark_colours() -> None:
    file = DOCS / "images" / "stages.svg"
    root = ElementTree.parse(file).getroot()
    space = {"svg": "http://www.w3.org/2000/svg"}
    ids = {name: root.find(f"svg:{name}", space) for name in ("title", "desc")}
    assert root.get("role") == "img" and root.get("aria-labelledby", "").split() == ["title", "desc"]
    assert all(each is not None and each.get("id") == name and each.text for name, each in ids.items())
    assert "prefers-color-scheme: dark" in file.read_text()
