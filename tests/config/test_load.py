"""Finding and reading stage configs."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_omni_ext.config.load import load_config, pipeline_of, preset_names
from vllm_omni_ext.config.parse import Names
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.model_plugins.qwen3_omni.family import FAMILY

NAMES = Names(stages=("thinker", "talker", "code2wav"))


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", preset_names(FAMILY.presets))
def test_every_preset_is_valid_for_its_pipeline(name: str) -> None:
    pipeline = FAMILY.pipeline(pipeline_of(name, FAMILY.presets))
    stages = tuple(stage.name for stage in pipeline.stages)
    assert load_config(name, Names(stages=stages), FAMILY.presets).pipeline == pipeline.name


@pytest.mark.parametrize("pipeline", [p.name for p in FAMILY.pipelines])
def test_every_pipeline_has_a_preset_of_its_name(pipeline: str) -> None:
    assert pipeline in preset_names(FAMILY.presets)


def test_a_family_may_have_no_presets(tmp_path: Path) -> None:
    assert preset_names("") == ()
    with pytest.raises(ConfigError, match=r"^mine: no such stage config; give the path of a \.yaml file$"):
        load_config("mine", NAMES)


@pytest.mark.parametrize(("text", "name"), [("pipeline: one", "one"), ("", ""), ("- 1", ""), ("pipeline: 3", "")])
def test_the_pipeline_of_a_file(tmp_path: Path, text: str, name: str) -> None:
    assert pipeline_of(write(tmp_path / "mine.yaml", text), FAMILY.presets) == name


def test_replicas_config() -> None:
    config = load_config("qwen3_omni_replicas", NAMES, FAMILY.presets)
    assert [config.stage(name).replicas for name in NAMES.stages] == [1, 2, 2]


def test_file(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.yaml", "stages:\n  talker:\n    replicas: 3\n")
    assert load_config(path, NAMES).stage("talker").replicas == 3
    assert load_config(str(path), NAMES).stage("talker").replicas == 3


def test_file_without_suffix_and_empty_file(tmp_path: Path) -> None:
    assert load_config(write(tmp_path / "mine", ""), NAMES).stages == {}


def test_unknown_name_lists_the_presets() -> None:
    with pytest.raises(ConfigError, match=r"^qwen4: no such stage config; give the path .* or one of qwen3_omni, qwen"):
        load_config("qwen4", NAMES, FAMILY.presets)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: no such stage config file$"):
        load_config(tmp_path / "none.yaml", NAMES)


def test_unreadable(tmp_path: Path) -> None:
    (tmp_path / "dir.yaml").mkdir()
    with pytest.raises(ConfigError, match=r"dir\.yaml: cannot be read: "):
        load_config(tmp_path / "dir.yaml", NAMES)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ConfigError, match=r"binary\.yaml: cannot be read: "):
        load_config(tmp_path / "binary.yaml", NAMES)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stages:\n  talker:\n    replicas: 1\n    replicas: 2\n", "line 4: key 'replicas' is written twice"),
        ("async_chunk: true\nasync_chunk: true\n", "line 2: key 'async_chunk' is written twice"),
        ("stages: [", "is not valid YAML: "),
        ("? [a]\n: 1\n", "line 1: key '['a']' is not a plain value"),
        ("stages:\n  talker:\n    replica: 2\n", "stages.talker.replica: unknown key; did you mean 'replicas'?"),
        ("!!python/object:os.system {}", "is not valid YAML: could not determine a constructor"),
    ],
)
def test_wrong_content_names_file_and_place(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "bad.yaml", text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, NAMES)
    assert str(caught.value).startswith(f"{path}: {message}")
