"""`vllm-omni-ext doctor`: checks the installation. Imports neither vLLM nor torch."""

from __future__ import annotations

import argparse
import json
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path

from vllm_omni_ext import environment
from vllm_omni_ext.compat import PATCHES, require_vllm, supported
from vllm_omni_ext.environment import Line, Section, as_data, as_text
from vllm_omni_ext.errors import IncompatibleVllm
from vllm_omni_ext.patching import seams
from vllm_omni_ext.patching.compare import Difference, differences, other_vllm
from vllm_omni_ext.patching.seams import CORE, Finding
from vllm_omni_ext.patching.source import VllmSource
from vllm_omni_ext.plugins.names import all_faults
from vllm_omni_ext.plugins.registry import Plugin, families, plugins

PROGRAM = "vllm-omni-ext"

FITS = ("fits", "additions only")
"""Results of `patching.compare.state_of` with which `doctor --against` has the exit status 0."""


def main(argv: Sequence[str]) -> int:
    """Print the findings, or write fingerprints. Return the exit status: 1 if a finding is not ok, else 0."""
    args = _parser().parse_args(argv)
    if args.write_fingerprints is not None:
        for package in args.write_fingerprints or own_packages():
            _write_fingerprints(package)
        return 0
    sections = diagnose() if args.against is None else against(args.against)
    print(json.dumps(as_data(sections), indent=2) if args.json else as_text(sections))
    return 0 if all(section.ok for section in sections) else 1


def diagnose() -> list[Section]:
    """Return the findings about the versions, vLLM, the model plugins, the environment and the connectors."""
    return [
        environment.versions(),
        *vllm_sections(),
        models(),
        environment.hooks(),
        environment.traps(),
        environment.connectors(),
    ]


def packages() -> list[str]:
    """Return the packages that have a `seams.toml`: the core, and packages of the installed model families."""
    return [CORE, *(family.seams for family in families() if family.seams)]


def own_packages() -> list[str]:
    """Return those of `packages()` that are in this distribution: the core, and its own model families."""
    own = [each.family for each in plugins() if each.family and each.distribution.partition(" ")[0] == PROGRAM]
    return [CORE, *(family.seams for family in own if family.seams)]


def measured(package: str, source: VllmSource) -> seams.Fingerprints:
    """Compute the fingerprints, in a vLLM source tree, of the vLLM symbols on which a package depends."""
    return seams.measured(package, source, [patch.target for patch in PATCHES] if package == CORE else ())


def models() -> Section:
    """Return a finding for each installed model plugin: its architectures, or its errors."""
    try:
        faults = all_faults()
    except RuntimeError as error:
        return Section("model plugins", (Line("names", False, str(error)),))
    lines = [_model_line(plugin, faults) for plugin in plugins()]
    missing = Line("all", False, "no model plugin is installed; reinstall vllm-omni-ext")
    return Section("model plugins", tuple(lines or [missing]))


def _model_line(plugin: Plugin, faults: Mapping[str, Sequence[str]]) -> Line:
    family = plugin.family
    if family is None or plugin.error:
        return Line(plugin.name, False, plugin.error)
    if wrong := faults.get(family.name):
        return Line(plugin.name, False, "; ".join(wrong), {"from": plugin.distribution})
    served = ", ".join(family.architectures) or "nothing to serve yet"
    details = {"from": plugin.distribution, "pipelines": ", ".join(each.name for each in family.pipelines)}
    return Line(plugin.name, True, served, {key: text for key, text in details.items() if text})


def vllm_sections() -> list[Section]:
    """Return the findings about vLLM: its version, and whether the vLLM symbols on which the packages depend changed.

    These are the symbols that patches replace, and the seams, i.e. the symbols listed in `seams.toml` files.
    """
    try:
        source = VllmSource.installed()
        tested = seams.nearest(source.version)
        data = [seams.fingerprints(package, source.version) for package in packages()]
    except IncompatibleVllm as err:
        return [Section("vLLM", (Line("version", False, str(err)),))]
    allowed = seams.allowed_drift()
    expected = {target: seen for groups in data for group in groups.values() for target, seen in group.items()}
    found = {finding.target: finding for finding in seams.inspect_all(expected, source, allowed)}
    patches = {patch.target for patch in PATCHES}
    overrides = sum(len(seams.overrides(package)) for package in packages())
    return [
        Section("vLLM", (_version_line(source), Line("supported", True, supported()))),
        Section("patches", tuple(_patch_lines(found))),
        Section("seams", tuple(_seam_lines([each for each in found.values() if each.target not in patches], tested))),
        Section("overrides at run time", (Line("all", True, f"{overrides}, see docs/patches.md"),)),
    ]


def _version_line(source: VllmSource) -> Line:
    try:
        return Line("version", True, f"{require_vllm(source)} at {source.root}")
    except IncompatibleVllm as err:
        return Line("version", False, str(err))


def _patch_lines(found: dict[str, Finding]) -> Iterator[Line]:
    for patch in PATCHES:
        finding = found[patch.target]
        details = {"target": patch.target, "in place": patch.when, "why": patch.why}
        details |= {"upstream": patch.upstream, "remove when": patch.remove_when}
        yield Line(patch.name, not finding.error, finding.error or finding.state, details)


def _seam_lines(findings: Sequence[Finding], tested: str) -> Iterator[Line]:
    fitting = sum(finding.state == "fits" for finding in findings)
    state = f"{fitting} of {len(findings)} are those of vLLM {tested}"
    yield Line("all", not any(finding.error for finding in findings), state)
    for finding in findings:
        if finding.state != "fits":
            yield Line(finding.target, not finding.error, finding.error or finding.state)


def against(wanted: str) -> list[Section]:
    """Compare the vLLM symbols on which the packages depend in the installed vLLM and in another one.

    Args:
        wanted: the other vLLM: a folder, a wheel file or a version.

    Returns:
        A section with both versions, and one for each state (see `patching.compare.state_of`) with its symbols.
    """
    uses = {patch.target: f"patched: {patch.name}" for patch in PATCHES}
    for package in packages():
        uses |= {target: use for group in seams.seams(package).values() for target, use in group.items()}
    with tempfile.TemporaryDirectory() as folder:
        try:
            old, new = VllmSource.installed(), other_vllm(wanted, Path(folder))
        except (OSError, zipfile.BadZipFile) as err:
            raise IncompatibleVllm(f"--against {wanted}: cannot be read: {err}") from err
        found = differences(uses, old, new)
        versions = [Line("installed", True, f"{old.version} at {old.root}")]
        versions.append(Line("compared with", True, f"{new.version} ({wanted})"))
    counts = Counter[str](each.state for each in found)
    states = ("fits", "additions only", "changed", "gone")
    versions.append(Line("symbols", True, ", ".join(f"{state}: {counts[state]}" for state in states)))
    by_state = (Section(state, tuple(_lines(state, found, uses))) for state in states if counts[state])
    return [Section("vLLM", tuple(versions)), *by_state]


def _lines(state: str, found: Sequence[Difference], uses: dict[str, str]) -> Iterator[Line]:
    for each in found:
        if each.state == state:
            yield Line(each.target, state in FITS, uses[each.target], {"diff": each.diff} if each.diff else {})


def _write_fingerprints(package: str) -> None:
    source = VllmSource.installed()
    file = Path(str(resources.files(package)), "fingerprints", f"{seams.series(source.version)}.json")
    found = measured(package, source)
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(file)
    for group, targets in seams.seams(package).items():
        for target in targets.keys() - found[group].keys():
            print(f"  not in vLLM {source.version}: {target}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"{PROGRAM} doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--against",
        metavar="PATH|VERSION",
        help="compare the functions that this package depends on with those of another vLLM: a folder, a wheel file, "
        "or a version, whose wheel is downloaded; exit status 1 if one has changed or is gone",
    )
    parser.add_argument(
        "--write-fingerprints",
        nargs="*",
        metavar="PACKAGE",
        help="write the fingerprints of the installed vLLM into the package of a plugin; without PACKAGE into our own",
    )
    return parser
