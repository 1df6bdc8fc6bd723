"""`vllm-omni-ext doctor`: checks the installation. Imports neither vLLM nor torch."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from vllm_omni_ext import environment
from vllm_omni_ext.compat import overrides_of, require_vllm, seams_of
from vllm_omni_ext.errors import IncompatibleVllm
from vllm_omni_ext.patches import ALL
from vllm_omni_ext.patching.check import Finding, allowed_drift, inspect_all
from vllm_omni_ext.patching.overrides import OVERRIDES
from vllm_omni_ext.patching.patch_target import is_applied
from vllm_omni_ext.patching.seams import SEAMS
from vllm_omni_ext.patching.source import VllmSource
from vllm_omni_ext.patching.spec import Patch, split_target
from vllm_omni_ext.patching.table import markdown
from vllm_omni_ext.plugins.registry import Plugin, families, plugins
from vllm_omni_ext.report import Line, Section, as_data, as_text

DOCS = Path("docs/patches.md")

PROGRAM = "vllm-omni-ext"


def main(argv: Sequence[str]) -> int:
    """Print the findings. Returns 0 if all are ok, else 1."""
    args = _parser().parse_args(argv)
    if args.write_docs is not None:
        args.write_docs.write_text(page(), encoding="utf-8")
        print(args.write_docs)
        return 0
    sections = diagnose(args.vllm_root)
    print(json.dumps(as_data(sections), indent=2) if args.json else as_text(sections))
    return 0 if all(section.ok for section in sections) else 1


def diagnose(vllm_root: Path | None = None) -> list[Section]:
    """Check everything.

    Args:
        vllm_root: a folder or wheel file with another vLLM than the installed one.
    """
    return [
        environment.versions(),
        *vllm_sections(vllm_root),
        models(),
        environment.hooks(),
        environment.traps(),
        environment.connectors(),
    ]


def page() -> str:
    """docs/patches.md: the patches, the overrides and seams of the core and of the families that come with it."""
    own = [each.family for each in plugins() if each.family and each.distribution.partition(" ")[0] == PROGRAM]
    overrides = (*OVERRIDES, *(override for family in own for override in overrides_of(family)))
    return markdown(ALL, overrides, (*SEAMS, *(seam for family in own for seam in seams_of(family))))


def models() -> Section:
    """The installed model families, and the reasons why some cannot be used."""
    lines = [_model_line(plugin) for plugin in plugins()]
    missing = Line("all", False, "no model plugin is installed; reinstall vllm-omni-ext")
    return Section("model plugins", tuple(lines or [missing]))


def _model_line(plugin: Plugin) -> Line:
    family = plugin.family
    if family is None or plugin.error:
        return Line(plugin.name, False, plugin.error)
    served = ", ".join(family.architectures) or "nothing to serve yet"
    details = {"from": plugin.distribution, "pipelines": ", ".join(each.name for each in family.pipelines)}
    return Line(plugin.name, True, served, {key: text for key, text in details.items() if text})


def vllm_sections(vllm_root: Path | None = None) -> list[Section]:
    """vLLM's version, and whether each patch and each seam fits."""
    try:
        source = VllmSource.installed() if vllm_root is None else VllmSource.at(vllm_root)
        version = source.version
    except IncompatibleVllm as err:
        return [Section("vLLM", (Line("version", False, str(err)),))]
    allowed = allowed_drift()
    patches = tuple(_patch_line(finding) for finding in inspect_all(ALL, source, allowed=allowed))
    relied_on = (*SEAMS, *(seam for family in families() for seam in seams_of(family)))
    seams = inspect_all(relied_on, source, allowed=allowed)
    overrides = len(OVERRIDES) + sum(len(overrides_of(family)) for family in families())
    return [
        Section("vLLM", (_version_line(source, version),)),
        Section("patches", patches),
        Section("seams", tuple(_seam_lines(seams))),
        Section("overrides at run time", (Line("all", True, f"{overrides}, see docs/patches.md"),)),
    ]


def _version_line(source: VllmSource, version: str) -> Line:
    try:
        require_vllm(source)
    except IncompatibleVllm as err:
        return Line("version", False, str(err))
    return Line("version", True, f"{version} at {source.root}")


def _patch_line(finding: Finding) -> Line:
    patch = finding.item
    assert isinstance(patch, Patch)
    module = sys.modules.get(split_target(patch.target)[0])
    state = "applied" if module is not None and is_applied(patch, module) else finding.state
    details = {
        "target": patch.target,
        "vLLM": patch.vllm,
        "why": patch.why,
        "upstream": patch.upstream,
        "remove when": patch.remove_when,
    }
    return Line(patch.name, finding.error is None, str(finding.error or state), details)


def _seam_lines(findings: Sequence[Finding]) -> Iterable[Line]:
    fitting = sum(finding.state == "fits" for finding in findings)
    yield Line("all", all(finding.error is None for finding in findings), f"{fitting} of {len(findings)} are as tested")
    for finding in findings:
        if finding.state != "fits":
            yield Line(finding.item.name, finding.error is None, str(finding.error or finding.state))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vllm-omni-ext doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--vllm-root", type=Path, metavar="PATH", help="look at the vLLM in this folder or wheel file instead"
    )
    parser.add_argument(
        "--write-docs",
        type=Path,
        nargs="?",
        const=DOCS,
        metavar="FILE",
        help=f"write the table of patches; without FILE to {DOCS}",
    )
    return parser
