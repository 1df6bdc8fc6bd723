"""Run a tiny Qwen3-Omni through all stages in several modes and compare with stored answers. Needs no pytest.

    python tests/gpu/run_once.py [--modes NAME ...] [--list]

Each mode runs in a process of its own, one after the other. In float32 every token and frame must be the stored one;
in bfloat16 it is only counted how many are, and the answer has to be complete. On a machine without CUDA the modes
are "cpu" and "cpu-compiled" with the V1 model runner, and "cpu-v2" and "cpu-v2-compiled" with Model Runner V2, whose
kernels Triton interprets. In modes that end with "mooncake" or "nixl", prompts are computed apart, and this library
moves their KV caches; on a CPU they run only by name, as both libraries listen on all network interfaces. Exit status 1
if a mode failed.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

GOLDEN = Path(__file__).parents[1] / "data" / "gpu_golden.json"
INTERPRETED = Path(__file__).parents[1] / "interpreted"
"""On PYTHONPATH, this folder lets Triton's interpreter run vLLM's kernels."""

CACHE_BYTES = 256 << 20
MAX_LEN, MAX_SEQS = 2048, 8
STEP_TOKENS = 128  # longer prompts are prefilled in chunks
RATE_HZ = 16_000
TIMEOUT_S = 400
PATIENCE_S = 60.0
"""Time for a KV cache to come, on a machine that is busy."""


@dataclass(frozen=True)
class Mode:
    """Configuration of the engines.

    Attributes:
        asynchronous: the thinker's scheduler is ahead of it, as always on CUDA.
        native_rotary: the thinker's rotary embedding is compiled from its operators. The effect is the
            difference in stored tokens and frames from the mode without it.
        connector: prompts are computed apart and their KV caches moved by this library; "": one thinker.
    """

    dtype: str
    eager: bool
    v2: bool
    asynchronous: bool = False
    native_rotary: bool = False
    connector: str = ""


MODES = {
    "fp32-eager-v2": Mode("float32", eager=True, v2=True),
    "fp32-graphs-v2": Mode("float32", eager=False, v2=True),
    "bf16-eager-v2": Mode("bfloat16", eager=True, v2=True),
    "bf16-graphs-v2": Mode("bfloat16", eager=False, v2=True),
    "bf16-graphs-v2-native-rotary": Mode("bfloat16", eager=False, v2=True, native_rotary=True),
    "fp32-eager-v1": Mode("float32", eager=True, v2=False),
    "bf16-graphs-v1": Mode("bfloat16", eager=False, v2=False),
    "fp32-graphs-v2-mooncake": Mode("float32", eager=False, v2=True, connector="mooncake"),
    "fp32-graphs-v2-nixl": Mode("float32", eager=False, v2=True, connector="nixl"),
}
CPU_MODES = {
    "cpu": Mode("float32", eager=True, v2=False),
    "cpu-compiled": Mode("float32", eager=False, v2=False),
    "cpu-v2": Mode("float32", eager=True, v2=True),
    "cpu-v2-compiled": Mode("float32", eager=False, v2=True, asynchronous=True),
    "cpu-mooncake": Mode("float32", eager=True, v2=False, connector="mooncake"),
    "cpu-nixl": Mode("float32", eager=True, v2=False, connector="nixl"),
}
FULL_FLOAT32 = {"TRITON_F32_DEFAULT": "ieee", "NVIDIA_TF32_OVERRIDE": "0"}
"""By default Triton's matrix products and cuDNN's convolutions may round their float32 operands to 11 bits (TF32)."""

COMPILED = {"enforce_eager": False, "compilation_config": {"mode": 3, "backend": "eager"}}
"""Graphs are traced and split as on a GPU, and run by PyTorch: seconds to compile, every wrong shape is seen."""


def prompt_of(case: dict[str, Any]) -> dict[str, Any]:
    """The case's prompt with its media decoded."""
    import numpy as np
    from PIL import Image

    pictures = [Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB") for data in case["image"]]
    sounds = [np.frombuffer(base64.b64decode(data), "<i2").astype("f4") / 2**15 for data in case["audio"]]
    media: dict[str, list[Any]] = {"image": pictures, "audio": [(sound, RATE_HZ) for sound in sounds]}
    return {"prompt": case["prompt"], "multi_modal_data": {kind: items for kind, items in media.items() if items}}


def same(got: list[Any], expected: list[Any]) -> int:
    """Length of the common beginning."""
    differing = (i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b)
    return next(differing, min(len(got), len(expected)))


def judge(name: str, output: Any, case: dict[str, Any], *, exact: bool) -> bool:
    """Compare an answer with the stored one; print the result."""
    if output.error is not None:
        print(f"  {name}: FAILED: {output.error}")
        return False
    tokens, frames = list(output.outputs[0].token_ids), output.frames.tolist()
    ok = output.audio is not None and bool((abs(output.audio) <= 1).all()) and len(output.audio) > 0
    if exact:
        ok = ok and (tokens, frames, len(output.audio)) == (case["tokens"], case["frames"], case["samples"])
    print(
        f"  {name}: {'ok' if ok else 'WRONG'}; tokens {same(tokens, case['tokens'])} of {len(case['tokens'])}, "
        f"frames {same(frames, case['frames'])} of {len(case['frames'])} as stored"
    )
    return ok


def one_by_one() -> Any:
    """Start replicas one after the other: a small machine does not survive all at once."""
    from vllm_omni_ext.runtime.launch import launcher

    class OneByOne(launcher.Deployment):
        def _launch(self, *args: Any) -> None:
            super()._launch(*args)
            super().wait()

        def wait(self) -> None:
            """All are ready already."""

    return mock.patch.object(launcher, "Deployment", OneByOne)


def asynchronous_thinker() -> Any:
    """Let the thinker schedule ahead on a CPU too, where vLLM switches that off."""
    from vllm.platforms.cpu import CpuPlatform

    update = CpuPlatform.check_and_update_config.__func__

    def keep(cls: type, config: Any) -> None:
        update(cls, config)
        if config.model_config is not None and config.model_config.architecture.startswith("Qwen3OmniMoe"):
            config.scheduler_config.async_scheduling = True

    return mock.patch.object(CpuPlatform, "check_and_update_config", classmethod(keep))


def v2_on_a_cpu() -> dict[str, str]:
    """Environment in which vLLM for CPUs uses Model Runner V2, in this process's children and theirs."""
    path = os.pathsep.join(filter(None, (str(INTERPRETED), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}


def run(mode: Mode, model: str, *, cpu: bool) -> bool:
    """Start all stages and run the cases."""
    from vllm import LLM

    started = time.perf_counter()
    small = {"max_model_len": MAX_LEN, "max_num_seqs": MAX_SEQS}
    compiled = COMPILED if cpu and not mode.eager else {}
    native = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}} if mode.native_rotary else {}
    patient = {"transfer_timeout_s": PATIENCE_S} if mode.connector == "mooncake" else {}
    apart = {"connector": mode.connector, "on_failure": "fail", **patient}
    llm = LLM(
        model,
        omni=True,
        dtype=mode.dtype,
        **({"enforce_eager": True} if mode.eager else {}),
        **small,
        max_num_batched_tokens=STEP_TOKENS,
        stage_overrides={
            "thinker": {"kv_cache_bytes": CACHE_BYTES, "engine": compiled | native}
            | ({"prefill_decode": apart} if mode.connector else {}),
            "talker": {"kv_cache_bytes": CACHE_BYTES, "engine": small | compiled},
        },
    )
    print(f"  ready after {time.perf_counter() - started:.1f} s")
    try:
        ok = ask(llm, mode)
        if mode.connector:
            moved = sum(edge.handed for edge in llm._omni.orchestrator.pairs())
            print(f"  {moved} prompts were computed apart")
            ok = ok and moved > 0
        return ok
    finally:
        llm.close()


def ask(llm: Any, mode: Mode) -> bool:
    """Clips of different length together, before they are in a cache; then all others, alone and together."""
    from vllm import SamplingParams

    golden = json.loads(GOLDEN.read_text())
    cases, limits = golden["cases"], golden["limits"]
    sampling = {
        "thinker": SamplingParams(temperature=0, max_tokens=limits["text"]),
        "talker": SamplingParams(temperature=0, repetition_penalty=1.05, max_tokens=limits["frames"]),
    }
    clips = [name for name in cases if name.startswith("clip")]
    others = [name for name in cases if name not in clips]
    turns = {"clips together": clips, **{f"{name} alone": [name] for name in others}}
    turns |= {"together": others, "together again": list(cases)}
    ok = True
    for turn, names in turns.items():
        began = time.perf_counter()
        prompts = [prompt_of(cases[name]) for name in names]
        outputs = llm.generate(prompts, sampling, voice="ethan", use_tqdm=False)
        print(f"  {turn}: {time.perf_counter() - began:.3f} s")
        for name, output in zip(names, outputs, strict=True):
            ok = judge(name, output, cases[name], exact=mode.dtype == "float32") and ok
    return ok


def in_a_process(name: str, model: str) -> bool:
    """Run one mode in a fresh interpreter, its log going where ours goes."""
    environment = {**os.environ, "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1"}
    if name in MODES:
        environment["VLLM_USE_V2_MODEL_RUNNER"] = str(int(MODES[name].v2))
        if MODES[name].dtype == "float32":
            environment |= FULL_FLOAT32
    else:
        environment["VLLM_DISABLE_COMPILE_CACHE"] = "1"
        environment |= v2_on_a_cpu() if CPU_MODES[name].v2 else {}
    command = [sys.executable, __file__, "--mode", name, "--model", model]
    print(f"== {name}", flush=True)
    began = time.perf_counter()
    try:
        done = subprocess.run(command, env=environment, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        print(f"== {name}: FAILED, not done after {TIMEOUT_S} s", flush=True)
        return False
    state = "ok" if done.returncode == 0 else f"FAILED with {done.returncode}"
    print(f"== {name}: {state} after {time.perf_counter() - began:.1f} s", flush=True)
    return done.returncode == 0


def main() -> int:
    """Run the selected modes."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--modes", nargs="+", choices=[*MODES, *CPU_MODES], help="default: all that this machine can do")
    flags.add_argument("--list", action="store_true", help="print the modes for CUDA")
    flags.add_argument("--mode", choices=[*MODES, *CPU_MODES], help=argparse.SUPPRESS)
    flags.add_argument("--model", help=argparse.SUPPRESS)
    args = flags.parse_args()
    if args.list:
        print("\n".join(MODES))
        return 0
    if args.mode is not None:
        mode = (MODES | CPU_MODES)[args.mode]
        with one_by_one(), asynchronous_thinker() if mode.asynchronous else nullcontext():
            return 0 if run(mode, args.model, cpu=args.mode in CPU_MODES) else 1
    import torch

    from vllm_omni_ext.model_plugins.qwen3_omni.tiny.qwen3_omni import write_qwen3_omni

    names = args.modes or (
        [name for name, mode in MODES.items() if not mode.connector or find_spec(mode.connector)]
        if torch.cuda.is_available()
        else [name for name, mode in CPU_MODES.items() if not mode.connector]
    )
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_qwen3_omni(f"{folder}/model", seed=0))
        results = [in_a_process(name, model) for name in names]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
