"""Finding and reading stage configs."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_omni_ext.config.load import load_config, pipeline_of, stage_config_names
from vllm_omni_ext.config.parse import Names
from vllm_omni_ext.config.schema import StageConfig
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.model_plugins.qwen3_omni.family import FAMILY

NAMES = Names(stages=("thinker", "talker", "code2wav"))


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", stage_config_names(FAMILY.stage_configs))
def test_every_stage_config_is_valid_for_its_pipeline(name: str) -> None:
    pipeline = FAMILY.pipeline(pipeline_of(name, FAMILY.stage_configs))
    stages = tuple(stage.name for stage in pipeline.stages)
    assert load_config(name, Names(stages=stages), FAMILY.stage_configs).pipeline == pipeline.name
    assert {each.name for each in FAMILY.pipelines} <= set(stage_config_names(FAMILY.stage_configs))
    assert stage_config_names("") == ()


@pytest.mark.parametrize(("text", "name"), [("pipeline: one", "one"), ("", ""), ("- 1", ""), ("pipeline: 3", "")])
def test_a_file_may_name_its_pipeline(tmp_path: Path, text: str, name: str) -> None:
    assert pipeline_of(write(tmp_path / "mine.yaml", text), FAMILY.stage_configs) == name


def test_a_file_is_read_by_path_or_text(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.yaml", "stages:\n  talker:\n    replicas: 3\n")
    assert [load_config(each, NAMES).stage("talker").replicas for each in (path, str(path))] == [3, 3]
    assert load_config(write(tmp_path / "mine", ""), NAMES).stages == {}


def test_a_missing_or_unreadable_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "dir.yaml").mkdir()
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\xfa")
    for name, package, reason in (
        (tmp_path / "dir.yaml", "", r"dir\.yaml: cannot be read: "),
        (tmp_path / "binary.yaml", "", r"binary\.yaml: cannot be read: "),
        (tmp_path / "none.yaml", "", r"none\.yaml: no such stage config file$"),
        (tmp_path / "\0.yaml", "", r"\.yaml: cannot be read: "),
        ("mine", "", r"^mine: no such stage config; give the path of a \.yaml file$"),
        ("qwen4", FAMILY.stage_configs, r"^qwen4: no such stage config; give the path .* or one of qwen3_omni, qwen"),
    ):
        with pytest.raises(ConfigError, match=reason):
            load_config(name, NAMES, package)


def test_keys_of_another_mapping_are_merged(tmp_path: Path) -> None:
    text = (
        "stages:\n"
        "  talker: {<<: &one {devices: '1'}, engine: &two {<<: {seed: 1}, seed: 2}}\n"
        "  code2wav: {<<: *one, replicas: 3, engine: {<<: *two, dtype: half}}\n"
    )
    config = load_config(write(tmp_path / "mine.yaml", text), NAMES)
    assert config.stage("code2wav") == StageConfig(devices="1", replicas=3, engine={"seed": 2, "dtype": "half"})
    assert config.stage("talker") == StageConfig(devices="1", engine={"seed": 2})


def test_variables_keep_their_spelling(tmp_path: Path) -> None:
    env = "{U: 0022, T: 1:30, V: 1_000, F: 1.10, S: 'x', X: 0x10}"
    text = f"stages:\n  talker: {{env: {env}, engine: {{seed: 1_000}}}}\n"
    text += f"  thinker: {{prefill_decode: {{decode: {{env: {env}}}}}}}\n"
    config = load_config(write(tmp_path / "mine.yaml", text), NAMES)
    kept = {"U": "0022", "T": "1:30", "V": "1_000", "F": "1.10", "S": "x", "X": "0x10"}
    split = config.stage("thinker").prefill_decode
    assert split is not None and config.stage("talker").env == split.decode.env == kept
    assert config.stage("talker").engine == {"seed": 1000}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stages:\n  talker:\n    replicas: 1\n    replicas: 2\n", "line 4: key 'replicas' is written twice"),
        ("async_chunk: true\nasync_chunk: true\n", "line 2: key 'async_chunk' is written twice"),
        ("stages: [", "is not valid YAML: "),
        ("stages: " + "[" * 2000 + "]" * 2000, "is not valid YAML: "),
        ("stages:\n  talker: &a {replicas: 1}\n  thinker: {<<: *a, replicas: 2, replicas: 3}\n", "line 3: key 'repl"),
        ("? [a]\n: 1\n", "line 1: key '['a']' is not a plain value"),
        ("stages:\n  talker:\n    replica: 2\n", "stages.talker.replica: unknown key; did you mean 'replicas'?"),
        ("!!python/object:os.system {}", "is not valid YAML: could not determine a constructor"),
    ],
)
def test_wrong_content_is_refused_with_file_and_place(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "bad.yaml", text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, NAMES)
    assert str(caught.value).startswith(f"{path}: {message}")
