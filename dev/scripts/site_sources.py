"""MkDocs hook: links to files and folders outside docs/ lead to pages of the site that show the file or folder.

The hook makes these pages, below `source/` of the site. In the repository the links are relative paths to the files.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
DOCS = "docs"
SOURCE = "source"
LINK = re.compile(r"(\]\()([^)#:\s]+)(#[^)]*)?(\))")


def on_files(files: Files, config: Any) -> Files:
    """Rewrite the links of all pages, and add a page for each file or folder to which any page links."""
    todo = [DOCS + "/" + file.src_uri for file in files if file.is_documentation_page()]
    texts: dict[str, str] = {}
    while todo:
        path = todo.pop()
        if path not in texts:
            texts[path] = _linked(path, _content(path), todo.append)
    for path, text in texts.items():
        uri = _uri(path)
        if (old := files.get_file_from_path(uri)) is not None:
            files.remove(old)
        files.append(File.generated(config, uri, content=text))
    return files


def _linked(path: str, text: str, add: Callable[[str], None]) -> str:
    """Return the text of a page, with its links to files of the repository changed to links to pages of the site.

    Args:
        path: path of the page's file in the repository.
        add: called with the path of each linked file or folder outside docs/.
    """

    def target(match: re.Match[str]) -> str:
        to = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[2]))
        if not (ROOT / to).exists():
            return match[0]
        if not to.startswith(DOCS + "/"):
            add(to)
        relative = os.path.relpath(_uri(to), posixpath.dirname(_uri(path)) or ".")
        return f"{match[1]}{relative}{match[3] or ''}{match[4]}"

    return LINK.sub(target, text) if path.endswith(".md") else text


def _uri(path: str) -> str:
    """Return the path, in the site, of the page for a file of the repository."""
    if path.startswith(DOCS + "/"):
        return path.removeprefix(DOCS + "/")
    return f"{SOURCE}/{path}" if path.endswith(".md") else f"{SOURCE}/{path}.md"


def _content(path: str) -> str:
    """Return the Markdown of a page: a folder as a list of its files, a Markdown file as it is, other files as code."""
    file = ROOT / path
    if file.is_dir():
        inside = sorted(each.relative_to(ROOT) for each in file.rglob("*") if each.is_file() and each.suffix != ".pyc")
        return f"# {path}\n\n" + "".join(f"- `{name}`\n" for name in inside)
    text = file.read_text(encoding="utf-8")
    return text if path.endswith(".md") else f"# {path}\n\n````{file.suffix.removeprefix('.')}\n{text}````\n"
