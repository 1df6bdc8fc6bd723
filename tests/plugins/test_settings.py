"""From a command line to the plan of an installed family: its pipelines and parameters, without a stage config."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.plugins.conftest import Install
from vllm_omni_ext.cli.args import parse_serve
from vllm_omni_ext.cli.settings import from_cli, from_kwargs
from vllm_omni_ext.errors import ConfigError, IncompatibleVllm
from vllm_omni_ext.plugins.spec import SAMPLING_PARAMS, make_params, param_names
from vllm_omni_ext.topology.plan import Plan

SOURCE = """
import msgspec

class Denoise(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    steps: int = 50
    guidance: float = 4.0

READER = StageSpec(name="reader", splittable=True)
PAINTER = StageSpec(
    name="painter", accepts="parts", params="omni_painter_module:Denoise", defaults={"steps": 8},
    engine={"enable_prefix_caching": False}, models={"PainterModel": "painter_models:Painter"},
)
BOTH = PipelineSpec(name="both", stages=(PAINTER, READER), frontend="reader", modalities=("text", "image"))
ALONE = PipelineSpec(name="alone", stages=(PAINTER,), frontend="painter", modalities=("image",))
FAMILY = ModelFamily(
    name="painter", api_version=2, architectures=("Painter",), pipelines=(BOTH, ALONE), runtime="painter:Runtime",
)
"""


@pytest.fixture
def plan_of(install: Install, tmp_path: Path) -> Callable[..., Plan]:
    """Plan a model of the family; the arguments are those of the command line."""
    install("omni-painter", SOURCE)
    config = {"architectures": ["Painter"], "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return lambda *words: from_cli(parse_serve([str(tmp_path), *words]))[0]


def test_a_family_is_planned_without_a_stage_config(plan_of: Callable[..., Plan]) -> None:
    plan = plan_of("--max-num-seqs", "3")
    assert (plan.family, plan.pipeline, plan.frontend().name) == ("painter", "both", "reader")
    assert [str(replica.id) for replica in plan.replicas()] == ["painter/0", "reader/0"]
    assert [stage.engine_args.get("max_num_seqs") == 3 for stage in plan.stages] == [False, True]
    assert [stage.accepts for stage in plan.stages] == ["parts", "requests"]
    assert "stream_idle_timeout_s" in plan.stage("painter").engine_args["additional_config"]
    assert "additional_config" not in plan.stage("reader").engine_args


def test_the_stage_config_chooses_the_pipeline(plan_of: Callable[..., Plan], tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("pipeline: alone\nstages: {painter: {params: {guidance: 2}}}\n")
    plan = plan_of("--stage-config", str(file), "--max-num-seqs", "3")
    assert (plan.pipeline, plan.frontend().name) == ("alone", "painter")
    assert plan.frontend().engine_args["max_num_seqs"] == 3
    assert plan.frontend().params == {"steps": 8, "guidance": 2}
    assert plan.frontend().params_type == "omni_painter_module:Denoise"


def test_a_keyword_chooses_the_pipeline(plan_of: Callable[..., Plan], tmp_path: Path) -> None:
    assert from_kwargs(str(tmp_path), pipeline="alone").pipeline == "alone"


def test_the_frontend_may_be_split(plan_of: Callable[..., Plan]) -> None:
    plan = plan_of("--stage-overrides", '{"reader": {"prefill_decode": {}}}', "--max-num-seqs", "3")
    assert plan.frontend().name == "reader.decode"
    assert [stage.engine_args.get("max_num_seqs") == 3 for stage in plan.stages] == [False, True, True]


def test_parameters_are_made_of_a_struct_or_of_vllms_type(install: Install) -> None:
    install("omni-painter", SOURCE)
    denoise = "omni_painter_module:Denoise"
    assert param_names(denoise) == ("steps", "guidance")
    made = make_params(denoise, {"guidance": 2})
    assert (made.steps, made.guidance) == (50, 2.0)
    names = param_names(SAMPLING_PARAMS)
    assert {"temperature", "max_tokens", "seed"} <= set(names) and not any(name.startswith("_") for name in names)
    made = make_params(SAMPLING_PARAMS, {"temperature": 0.5, "stop": "x"})
    assert (made.temperature, made.stop) == (0.5, ["x"])
    for kind, wrong in ((denoise, {"step": 1}), (SAMPLING_PARAMS, {"temprature": 1.0})):
        with pytest.raises(ValueError, match="|".join(wrong)):
            make_params(kind, wrong)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("pipeline: third", "pipeline: model family 'painter' has no pipeline 'third'; use one of both, alone"),
        ("pipeline: alone\nstages: {reader: {}}", "stages.reader: no such stage; use one of painter"),
        ("stages: {painter: {params: {step: 3}}}", "stages.painter.params.step: unknown key; did you mean 'steps'?"),
        (
            "stages: {painter: {params: {steps: many}}}",
            "stages.painter.params: Expected `int`, got `str` - at `$.steps`",
        ),
        ("stages: {painter: {params: {temperature: 1}}}", "stages.painter.params.temperature: unknown key"),
        ("stages: {reader: {params: {temperature: -1}}}", "stages.reader.params: temperature must be non-negative"),
        (
            "stages: {painter: {prefill_decode: {}}}",
            "stages.painter.prefill_decode: 'painter' keeps the state of its streams outside of the KV cache, so its "
            "prompts cannot be computed elsewhere; only 'reader' can be split; remove it",
        ),
        (
            "pipeline: alone\nstages: {painter: {prefill_decode: {}}}",
            "stages.painter.prefill_decode: 'painter' keeps the state of its streams outside of the KV cache, so its "
            "prompts cannot be computed elsewhere; no stage of the pipeline 'alone' can be split; remove it",
        ),
    ],
)
def test_wrong_stage_configs_are_refused(plan_of: Callable[..., Plan], tmp_path: Path, file: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(file)
    with pytest.raises(ConfigError) as caught:
        plan_of("--stage-config", str(path))
    assert str(caught.value).removeprefix(f"{path}: ").startswith(message)


def test_an_unknown_stage_config_is_refused(plan_of: Callable[..., Plan]) -> None:
    with pytest.raises(ConfigError, match=r"^qwen3_omni: no such stage config; give the path of a \.yaml file$"):
        plan_of("--stage-config", "qwen3_omni")


def test_seams_of_the_family_are_checked(install: Install, tmp_path: Path) -> None:
    data = tmp_path / "painter_seams"
    (data / "fingerprints").mkdir(parents=True)
    (data / "__init__.py").touch()
    (data / "seams.toml").touch()
    groups = {"checked_at_start": "EngineCore.sleep", "checked_by_doctor": "EngineCore.unknown"}
    text = json.dumps({group: {f"vllm.v1.engine.core:{name}": "0" * 12} for group, name in groups.items()})
    (data / "fingerprints/0.32.json").write_text(text)
    install("omni-painter", SOURCE.replace("runtime=", 'seams="painter_seams", runtime='))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Painter"], "model_type": "llama"}))
    with pytest.raises(IncompatibleVllm, match=r"^vllm\.v1\.engine\.core:EngineCore\.sleep changed[^\n]*$"):
        from_cli(parse_serve([str(tmp_path)]))
