"""Finds installed model families by entry points, and checks each; a faulty family does not affect the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata, resources
from typing import Any

from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.plugins.spec import (
    ACCEPTS,
    API_VERSION,
    EDGES,
    ENTRY_POINTS,
    KV,
    SAMPLING_PARAMS,
    EdgeSpec,
    ModelFamily,
    PipelineSpec,
    StageSpec,
)


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """One entry point of the group `vllm_omni_ext.models`.

    Attributes:
        name: name of the entry point.
        distribution: the installed package that declares it, with its version.
        family: None if it could not be loaded.
        error: the reason that the family cannot be used; "" if it can.
    """

    name: str
    distribution: str
    family: ModelFamily | None = None
    error: str = ""


@cache
def plugins() -> tuple[Plugin, ...]:
    """Return a `Plugin` for each installed entry point, sorted by name, including those whose family cannot be used."""
    found = sorted(metadata.entry_points(group=ENTRY_POINTS), key=lambda entry: (entry.name, entry.value))
    return _without_collisions([_load(entry) for entry in found])


def families() -> tuple[ModelFamily, ...]:
    """Return the usable families, sorted by the name of their entry point."""
    return tuple(plugin.family for plugin in plugins() if plugin.family is not None and not plugin.error)


def family_of(name: str) -> ModelFamily:
    """Return the family of that name; ConfigError if it is not installed or cannot be used."""
    if found := [each for each in plugins() if each.family is not None and each.family.name == name]:
        return _usable(found)
    known = ", ".join(family.name for family in families())
    raise ConfigError(f"model: no model family '{name}' is installed; there are {known or 'none'}{_broken()}")


def family_for(architecture: str) -> ModelFamily:
    """Return the family that serves an architecture; ConfigError lists the supported architectures."""
    if found := [each for each in plugins() if each.family is not None and architecture in each.family.architectures]:
        return _usable(found)
    known = ", ".join(name for family in families() for name in family.architectures)
    supported = f"supported: {known}" if known else "no model plugin is installed; reinstall vllm-omni-ext"
    raise ConfigError(f"model: architecture '{architecture}' has no omni pipeline; {supported}{_broken()}")


def model_classes(family: ModelFamily) -> dict[str, str]:
    """Return the model classes that all stages of a family declare: vLLM architecture -> "module:class"."""
    return {name: target for p in family.pipelines for stage in p.stages for name, target in stage.models.items()}


def family_chat_template(family: ModelFamily) -> str | None:
    """Return the text of a family's own chat template; None if the checkpoint's template is to be used."""
    package, _, file = family.chat_template.partition(":")
    return resources.files(package).joinpath(file).read_text(encoding="utf-8") if package else None


def _broken() -> str:
    """Return the errors of plugins that could not be loaded, to append to a "not found" error; "" if there are none."""
    return "".join(f"; {plugin.error}" for plugin in plugins() if plugin.family is None)


def _usable(found: Sequence[Plugin]) -> ModelFamily:
    """Return the family of the first plugin without an error.

    Args:
        found: plugins whose families match the same name or architecture.

    Raises:
        ConfigError: all plugins have an error; contains the error of the first.
    """
    for plugin in found:
        if plugin.family is not None and not plugin.error:
            return plugin.family
    raise ConfigError(f"model: {found[0].error}")


def _load(entry: metadata.EntryPoint) -> Plugin:
    about = entry.dist
    plugin = Plugin(name=entry.name, distribution=f"{about.name} {about.version}" if about else "an unknown package")
    try:
        family: Any = entry.load()
    except Exception as err:  # a plugin's import may raise anything: other plugins must still load
        why = f"{entry.value} cannot be imported: {type(err).__name__}: {' '.join(str(err).split())}"
        return replace(plugin, error=_refusal(plugin, why))
    if not isinstance(family, ModelFamily):
        return replace(plugin, error=_refusal(plugin, f"{entry.value} is not a ModelFamily"))
    why = _fault(family)
    return replace(plugin, family=family, error=why and _refusal(plugin, why))


def _refusal(plugin: Plugin, why: str) -> str:
    return f"model plugin '{plugin.name}' of {plugin.distribution}: {why}"


def _fault(family: ModelFamily) -> str:
    """Return the reason that a family is invalid, without regard to other families; "" if it is valid."""
    if family.api_version != API_VERSION:
        newer = "vllm-omni-ext" if family.api_version > API_VERSION else "the plugin"
        return f"is for version {family.api_version} of the plugin API, this is version {API_VERSION}; update {newer}"
    if family.pipelines and not (family.architectures and family.runtime):
        return f"family '{family.name}' has pipelines, so it needs architectures and a runtime"
    if family.seams and not _has_seams(family.seams):
        return f"seams: '{family.seams}' is not a package with seams.toml"
    names = [pipeline.name for pipeline in family.pipelines]
    if twice := _repeated(names):
        return f"pipeline '{twice}' is there twice"
    return next((f"pipeline '{each.name}': {why}" for each in family.pipelines if (why := _pipeline_fault(each))), "")


def _has_seams(package: str) -> bool:
    try:
        return resources.files(package).joinpath("seams.toml").is_file()
    except (ImportError, TypeError):  # TypeError: a module, not a package
        return False


def _pipeline_fault(pipeline: PipelineSpec) -> str:
    stages = [stage.name for stage in pipeline.stages]
    if twice := _repeated(stages):
        return f"stage '{twice}' is there twice"
    if dotted := next((name for name in stages if not name or "." in name or "/" in name), None):
        return f"'{dotted}' is not a name for a stage: no dot and no slash"
    ends = [pipeline.frontend, *(end for edge in pipeline.edges for end in (edge.source, edge.target))]
    if unknown := next((name for name in ends if name not in stages), None):
        return f"'{unknown}' is not one of its stages: {', '.join(stages)}"
    if twice := _repeated([edge.name for edge in pipeline.edges if edge.name]):
        return f"edge '{twice}' is there twice"
    for stage in pipeline.stages:
        if stage.accepts not in ACCEPTS:
            return f"stage '{stage.name}': accepts: '{stage.accepts}' is not one of {', '.join(ACCEPTS)}"
        if stage.splittable and (why := _split_fault(pipeline, stage)):
            return f"stage '{stage.name}': splittable: {why}"
    return next((why for edge in pipeline.edges if (why := _edge_fault(edge))), "")


def _split_fault(pipeline: PipelineSpec, stage: StageSpec) -> str:
    """Return the reason that a stage cannot have prefill and decode replicas; "" if it can."""
    if stage.name != pipeline.frontend:
        return f"only the frontend, '{pipeline.frontend}', can be split"
    if stage.accepts != "requests":
        return f"a stage that accepts {stage.accepts} cannot be split, only one that accepts requests"
    if stage.params != SAMPLING_PARAMS:
        return f"a stage with params {stage.params} cannot be split, only one with vLLM's SamplingParams"
    return ""


def _edge_fault(edge: EdgeSpec) -> str:
    where = f"edge '{edge.name or f'{edge.source} to {edge.target}'}'"
    if edge.kind not in EDGES:
        return f"{where}: kind: '{edge.kind}' is not one of {', '.join(EDGES)}"
    if edge.kind == KV:
        return f"{where}: kind: '{KV}' is made for a split frontend only; set splittable of that stage instead"
    if edge.source == edge.target:
        return f"{where}: leads from '{edge.source}' to itself"
    if edge.chunks and not edge.name:
        return f"{where}: chunks: need a name, by which users change them"
    if wrong := [size for size in edge.chunks if not isinstance(size, int) or size < 0]:
        return f"{where}: chunks: sizes are positive, or 0 for all; got {wrong[0]}"
    return ""


def _repeated(names: Iterable[str]) -> str:
    names = list(names)
    return next((name for name in names if names.count(name) > 1), "")


def _without_collisions(loaded: list[Plugin]) -> tuple[Plugin, ...]:
    """Set `error` of all plugins whose families have the same name, architecture or model class as another one."""
    owners: dict[str, list[Plugin]] = {}
    for plugin in loaded:
        for claim in _claims(plugin):
            owners.setdefault(claim, []).append(plugin)
    errors: dict[int, str] = {}
    for claim, several in owners.items():
        if len(several) > 1:
            listed = " and ".join(f"plugin '{plugin.name}' of {plugin.distribution}" for plugin in several)
            for plugin in several:
                errors.setdefault(id(plugin), f"{claim} is claimed by {listed}; uninstall all but one of them")
    return tuple(replace(plugin, error=errors.get(id(plugin), plugin.error)) for plugin in loaded)


def _claims(plugin: Plugin) -> list[str]:
    """Return texts such as "family 'x'" for the names that no other family may have; none for an unusable family."""
    if plugin.family is None or plugin.error:
        return []
    family = plugin.family
    claims = [f"architecture '{name}'" for name in family.architectures]
    return [f"family '{family.name}'", *claims, *(f"model class '{name}'" for name in model_classes(family))]
