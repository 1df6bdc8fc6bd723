"""Makes a folder for PYTHONPATH with the package, for a machine where nothing can be installed.

vLLM's processes find the package by its entry points, which need its metadata. The folder has links to the repository's
files and the metadata. Nothing is built or downloaded.
"""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

PACKAGE = "vllm_omni_ext"


def installed() -> bool:
    """Return whether the package is installed in this Python, with its entry points."""
    found = metadata.entry_points(group="vllm.general_plugins", name="omni_ext")
    return bool(found) and bool(metadata.entry_points(group="torch.backends", name=PACKAGE))


def make(root: Path, site: Path) -> Path:
    """Write or update the folder `site`, and return it.

    Args:
        root: folder of the repository.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text())
    about, mapped = project["project"], project["tool"]["setuptools"]["package-dir"]
    package = site / PACKAGE
    package.mkdir(parents=True, exist_ok=True)
    links = {path.name: path for path in (root / PACKAGE).iterdir() if path.name != "__pycache__"}
    links |= {name.rpartition(".")[2]: root / folder for name, folder in mapped.items()}
    for name, target in links.items():
        link = package / name
        link.unlink(missing_ok=True)
        link.symlink_to(target)
    info = site / f"{PACKAGE}-{about['version']}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {about['name']}\nVersion: {about['version']}\n")
    groups = {"console_scripts": about["scripts"], **about["entry-points"]}
    lines = (
        f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in e.items()) for group, e in groups.items()
    )
    (info / "entry_points.txt").write_text("\n".join(lines))
    return site
