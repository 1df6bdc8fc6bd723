"""Model families are found by entry points; a faulty one is refused alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from dev import pages
from tests.plugins.conftest import PAINTER, Install
from vllm_omni_ext import doctor
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.plugins.registry import families, family_for, family_of, model_classes, plugins

QWEN = "Qwen3OmniMoeForConditionalGeneration"
QWENS = f"Qwen2_5OmniForConditionalGeneration, Qwen2_5OmniModel, {QWEN}"
BAGEL = "BagelForConditionalGeneration"


def error_of(call: Callable[[str], object], name: str) -> str:
    with pytest.raises(ConfigError) as caught:
        call(name)
    return str(caught.value)


def test_the_packaged_families_are_found() -> None:
    assert [plugin.name for plugin in plugins()] == ["bagel", "qwen2_5_omni", "qwen3_omni"]
    assert all(plugin.distribution.startswith("vllm-omni-ext ") and not plugin.error for plugin in plugins())
    assert family_for(QWEN) is family_of("qwen3_omni")
    assert family_for(QWEN).pipeline().name == "qwen3_omni"
    assert family_for(BAGEL).pipeline().name == "bagel"


def test_a_family_of_another_package_is_found(install: Install) -> None:
    install("omni-painter")
    family = family_for("Painter")
    assert (family.name, family.pipeline().frontend, family.architectures) == ("painter", "canvas", ("Painter",))
    assert model_classes(family) == {"PainterModel": "painter_models:Canvas"}
    assert family_for(QWEN).name == "qwen3_omni"
    install(
        "empty-painter", PAINTER.replace("pipelines=(PIPELINE,)", "pipelines=()").replace("ainter", "rawer"), entry="e"
    )
    assert error_of(family_of("prawer").pipeline, "") == "pipeline: model family 'prawer' has no pipeline yet"


def test_an_unknown_model_lists_the_supported_ones(install: Install) -> None:
    install("omni-painter")
    message = error_of(family_for, "Llama")
    assert message == f"model: architecture 'Llama' has no omni pipeline; supported: {BAGEL}, Painter, {QWENS}"
    assert error_of(family_of, "llama") == (
        "model: no model family 'llama' is installed; there are bagel, painter, qwen2_5_omni, qwen3_omni"
    )


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("raise ImportError('no module\\nof that name')", "cannot be imported: ImportError: no module of that name"),
        ("FAMILY = 3", "is not a ModelFamily"),
    ],
)
def test_a_plugin_that_cannot_be_loaded_is_named_when_a_model_is_unknown(
    install: Install, source: str, why: str
) -> None:
    install("omni-painter", source)
    message = error_of(family_for, "Painter")
    assert message.startswith(f"model: architecture 'Painter' has no omni pipeline; supported: {BAGEL}, {QWENS}; ")
    assert f"model plugin 'painter' of omni-painter 1.0: omni_painter_module:FAMILY {why}" in message
    assert "\n" not in message
    assert family_for(QWEN).name == "qwen3_omni"


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (
            "api_version=2",
            "api_version=7",
            "is for version 7 of the plugin API, this is version 2; update vllm-omni-ext",
        ),
        ("api_version=2", "api_version=0", "is for version 0 of the plugin API, this is version 2; update the plugin"),
        ("stages=(CANVAS,)", "stages=(CANVAS, CANVAS)", "pipeline 'painter': stage 'canvas' is there twice"),
        ('frontend="canvas"', 'frontend="brush"', "pipeline 'painter': 'brush' is not one of its stages: canvas"),
        ('name="canvas"', 'name="can.vas"', "pipeline 'painter': 'can.vas' is not a name for a stage: no dot and"),
        ("pipelines=(PIPELINE,)", "pipelines=(PIPELINE, PIPELINE)", "pipeline 'painter' is there twice"),
        (
            'modalities=("image",)',
            'modalities=("image",), edges=(EdgeSpec("canvas", "frame", "tokens"),)',
            "pipeline 'painter': 'frame' is not one of its stages: canvas",
        ),
        (
            'name="canvas"',
            'name="canvas", accepts="chunk"',
            "pipeline 'painter': stage 'canvas': accepts: 'chunk' is not one of requests, chunks, parts",
        ),
        (
            "stages=(CANVAS,)",
            "stages=(CANVAS, StageSpec(name='frame', splittable=True))",
            "pipeline 'painter': stage 'frame': splittable: only the frontend, 'canvas', can be split",
        ),
        (
            'name="canvas"',
            'name="canvas", accepts="parts", splittable=True',
            "pipeline 'painter': stage 'canvas': splittable: a stage that accepts parts cannot be split, only one that",
        ),
        (
            'name="canvas"',
            'name="canvas", params="canvas:Params", splittable=True',
            "pipeline 'painter': stage 'canvas': splittable: a stage with params canvas:Params cannot be split, only",
        ),
        *(
            (
                "stages=(CANVAS,)",
                f"stages=(CANVAS, StageSpec(name='frame')), edges=(EdgeSpec('canvas', {edge}),)",
                f"pipeline 'painter': edge '{why}",
            )
            for edge, why in (
                ("'frame', 'token'", "canvas to frame': kind: 'token' is not one of tokens, tensors, kv"),
                ("'frame', 'kv'", "canvas to frame': kind: 'kv' is made for a split frontend only; set splittable of"),
                ("'canvas', 'tokens'", "canvas to canvas': leads from 'canvas' to itself"),
                ("'frame', 'tokens', chunks=(1,)", "canvas to frame': chunks: need a name, by which users change"),
                ("'frame', 'tokens', 'f', chunks=(4, -1)", "f': chunks: sizes are positive, or 0 for all; got -1"),
            )
        ),
        ('runtime="painter:Runtime"', 'runtime=""', "family 'painter' has pipelines, so it needs architectures and a"),
        ("pipelines=", 'seams="a.b:SEAMS", pipelines=', "seams: 'a.b:SEAMS' is not a package with seams.toml"),
        ("pipelines=", 'seams="json", pipelines=', "seams: 'json' is not a package with seams.toml"),
        ("pipelines=", 'seams="abc", pipelines=', "seams: 'abc' is not a package with seams.toml"),
    ],
)
def test_a_faulty_family_is_refused_for_its_own_models_only(install: Install, old: str, new: str, why: str) -> None:
    assert old in PAINTER
    install("omni-painter", PAINTER.replace(old, new))
    message = f"model: model plugin 'painter' of omni-painter 1.0: {why}"
    assert error_of(family_for, "Painter").startswith(message)
    assert error_of(family_of, "painter").startswith(message)
    assert [family.name for family in families()] == ["bagel", "qwen2_5_omni", "qwen3_omni"]
    assert error_of(family_for, "Llama").endswith(f"supported: {BAGEL}, {QWENS}")


@pytest.mark.parametrize(
    ("changes", "claim"),
    [
        ({}, "family 'painter'"),
        ({'name="painter", api': 'name="other", api', "PainterModel": "OtherModel"}, "architecture 'Painter'"),
        ({'name="painter", api': 'name="other", api', '"Painter"': '"Other"'}, "model class 'PainterModel'"),
    ],
)
def test_two_packages_that_claim_a_name_are_both_refused(install: Install, changes: dict[str, str], claim: str) -> None:
    install("omni-painter")
    source = PAINTER
    for old, new in changes.items():
        source = source.replace(old, new)
    install("better-painter", source, entry="other", version="2.0")
    message = error_of(family_for, "Painter")
    several = "plugin 'other' of better-painter 2.0 and plugin 'painter' of omni-painter 1.0"
    assert message == f"model: {claim} is claimed by {several}; uninstall all but one of them"
    assert [family.name for family in families()] == ["bagel", "qwen2_5_omni", "qwen3_omni"]


def test_an_unusable_family_claims_no_names(install: Install) -> None:
    install("a-painter", PAINTER.replace("api_version=2", "api_version=7"), entry="a_painter")
    install("omni-painter")
    assert family_for("Painter") is family_of("painter")


def test_the_doctor_lists_usable_and_faulty_plugins(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = {"painter": ["runtime: no", "http: no"]}
    monkeypatch.setattr(doctor, "all_faults", lambda: faults)
    install("omni-painter")
    install("omni-broken", "raise ValueError('no')", entry="broken")
    section = doctor.models()
    assert not section.ok
    lines = {line.name: line for line in section.lines}
    assert [name for name, line in lines.items() if not line.ok] == ["broken", "painter"]
    assert lines["painter"].state == "runtime: no; http: no"
    faults.clear()
    lines = {line.name: line for line in doctor.models().lines}
    assert [name for name, line in lines.items() if not line.ok] == ["broken"]
    assert lines.keys() == {"bagel", "broken", "painter", "qwen2_5_omni", "qwen3_omni"}
    assert lines["painter"].state == "Painter"
    assert lines["painter"].details == {"from": "omni-painter 1.0", "pipelines": "painter"}
    assert "omni-broken 1.0: omni_broken_module:FAMILY cannot be imported: ValueError: no" in lines["broken"].state
    assert "omni-painter" not in pages.patches()


def test_model_classes_are_registered_and_never_replace_those_of_vllm(install: Install) -> None:
    from vllm.model_executor.models import ModelRegistry

    from vllm_omni_ext.plugin import register

    theirs = ModelRegistry.models["LlamaForCausalLM"]
    both = '{"PainterModel": "painter_models:Canvas", "LlamaForCausalLM": "painter_models:Mine"}'
    install("omni-painter", PAINTER.replace('{"PainterModel": "painter_models:Canvas"}', both))
    try:
        register()
        register()
        assert "PainterModel" in ModelRegistry.get_supported_archs()
        assert ModelRegistry.models["LlamaForCausalLM"] is theirs
    finally:
        ModelRegistry.models.pop("PainterModel", None)


@pytest.mark.engine
def test_families_are_found_without_vllm_and_torch() -> None:
    code = (
        "import sys; from vllm_omni_ext.plugins.registry import families; families()\n"
        "print([name for name in ('vllm', 'torch', 'transformers', 'pydantic') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
