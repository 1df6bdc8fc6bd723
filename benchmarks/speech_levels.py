"""Measures spoken answers at rising concurrency: first sound, whole answer, real-time factor, requests a second.

On CUDA devices: Qwen3-Omni in its released shape (30B), random weights (`load_format: dummy`), bfloat16, CUDA graphs
on; the stages are placed as in a server. With `--tiny`, on any machine: the tiny checkpoint with the released
vocabulary. It tests this program, and its figures are not about a GPU.

A level is a number of concurrent answers of fixed lengths (`spoken.py`). At each level, `--rounds` times that number of
answers are measured, after one round that warms up. The program also prints published figures of other projects, for
answers of other lengths.

    python benchmarks/speech_levels.py [MODEL] [--tiny] [--http [--api-servers 1]] [--talkers 1]
        [--levels 1 4 8 16 32] [--rounds 4] [--json FILE]
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # run as a file, from anywhere
if find_spec("flashinfer") is None:
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # else the sampler imports it and the stages end

from checkpoint import parser
from gpu_parts import REFUSED_STATUS
from spoken import Answer, Ask, Lengths, inside, several
from spoken_http import over_http, served
from vllm import LLM
from vllm.platforms import current_platform

from vllm_omni_ext.cli.settings import from_kwargs
from vllm_omni_ext.model_plugins.qwen3_omni.tiny.qwen3_omni import write_qwen3_omni

LEVELS = (1, 4, 8, 16, 32)
MAX_LEN = 2048
STEP_TOKENS = 2048
GIB = 1 << 30
CACHE_BYTES = {"thinker": 2 * GIB, "talker": GIB}
"""KV cache by stage: room for 32 answers of full length. A token has 96 KiB in the thinker and 20 KiB in the talker."""

NEEDED_GIB = {"thinker": 64, "talker": 9, "code2wav": 2}
"""Estimated memory of the stages on a device: weights (59, 6.5 and 0.4 GiB), cache, activations and graphs."""

GOAL_FIRST_MS = 200


@dataclass(frozen=True)
class Anchor:
    """Figures published by another project.

    Attributes:
        who: the project and its machine.
        level: number of concurrent answers; None: not published.
        said: the figures.
    """

    who: str
    level: int | None
    said: str


ANCHORS = (
    Anchor("Qwen3-Omni report, theoretical", 1, "first packet 234 ms (72 + 88 + 57 + 14 + 3), real-time factor 0.47"),
    Anchor("sglang-omni, one H100", 1, "first sound p50 256 ms, whole answer 0.57 s"),
    Anchor("sglang-omni, one H100", 32, "7.3 requests/s"),
    Anchor("vllm-omni", None, "first sound 329 to 760 ms, real-time factor 0.17"),
)


@dataclass(frozen=True)
class Level:
    """Measurements with one number of concurrent answers.

    Attributes:
        seconds: duration of all answers together.
    """

    concurrency: int
    seconds: float
    answers: Sequence[Answer]

    def figures(self) -> dict[str, float]:
        """Return the figures for the report; `_s` at the end of a key means seconds, `_per_s` a number a second."""
        firsts = sorted(answer.first_s for answer in self.answers)
        return {
            "concurrency": self.concurrency,
            "answers": len(self.answers),
            "first_p50_s": statistics.median(firsts),
            "first_max_s": firsts[-1],
            "whole_p50_s": statistics.median(answer.whole_s for answer in self.answers),
            "real_time_factor_p50": statistics.median(answer.real_time_factor for answer in self.answers),
            "late_max_s": max(answer.late_s for answer in self.answers),
            "requests_per_s": len(self.answers) / self.seconds,
            "sound_per_s": sum(answer.sound_s for answer in self.answers) / self.seconds,
        }


def engine_settings(levels: Sequence[int], *, device_bytes: int | None, talkers: int = 1) -> dict[str, Any]:
    """Return the arguments for `LLM`, as keywords, without the model.

    Args:
        levels: numbers of concurrent answers.
        device_bytes: memory of a CUDA device; None: the tiny checkpoint is used, on any machine.
        talkers: number of replicas of talker and of code2wav.
    """
    slots = max(levels)
    stages: dict[str, dict[str, Any]] = {
        stage: {"engine": {"max_num_seqs": slots}} for stage in ("thinker", "talker", "code2wav")
    }
    stages["talker"]["engine"] |= {"max_model_len": MAX_LEN}
    for stage in ("talker", "code2wav"):
        stages[stage]["replicas"] = talkers
    common: dict[str, Any] = {"max_model_len": MAX_LEN}
    if device_bytes is not None:
        common |= {"load_format": "dummy", "dtype": "bfloat16"}
        stages["thinker"]["engine"] |= {"skip_mm_profiling": True}
        for stage, bytes_ in CACHE_BYTES.items():
            stages[stage]["kv_cache_bytes"] = bytes_
            stages[stage]["engine"] |= {"max_num_batched_tokens": STEP_TOKENS}
        for stage, needed in NEEDED_GIB.items():
            stages[stage]["engine"] |= {"gpu_memory_utilization": round(needed * GIB / device_bytes, 3)}
    return {**common, "stage_overrides": stages}


def devices_of(model: str, settings: Mapping[str, Any]) -> int:
    """Return the number of CUDA devices that the stages use."""
    return len({device for replica in from_kwargs(model, **settings).replicas() for device in replica.devices})


def as_flags(settings: Mapping[str, Any]) -> list[str]:
    """Return the arguments of `engine_settings` as flags of `vllm serve`."""
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in settings.items()}
    return [word for name, text in texts.items() for word in (f"--{name.replace('_', '-')}", text)]


Run = Callable[[Coroutine[Any, Any, Any]], Any]


@contextmanager
def subject(model: str, settings: Mapping[str, Any], lengths: Lengths, args: Any) -> Iterator[tuple[Ask, Run]]:
    """Start a server or an `LLM`; yield (function that requests an answer, function that runs such coroutines)."""
    if args.http:
        flags = [*as_flags(settings), "--api-server-count", str(args.api_servers)]
        with served(model, flags) as server, over_http(server, lengths) as (ask, runner):
            yield ask, runner.run
        return
    with LLM(model, omni=True, **settings) as omni:
        yield inside(omni, lengths), omni._run


def measure(ask: Ask, run: Run, concurrency: int, rounds: int) -> Level:
    """Request `concurrency` answers that warm up, then measure `concurrency` * `rounds` answers."""
    run(several(ask, concurrency, concurrency))
    seconds, answers = run(several(ask, concurrency * rounds, concurrency))
    return Level(concurrency, seconds, answers)


def table(levels: Sequence[Level]) -> Iterator[str]:
    """Yield the printed lines: figures, the goal, published figures."""
    columns = {"first p50, ms": 14, "longest": 9, "answer p50, s": 14, "RTF": 7, "late, s": 9, "requests/s": 11}
    yield f"{'at once':>7}" + "".join(f"{name:>{width}}" for name, width in columns.items()) + f"{'sound s/s':>11}"
    for level in levels:
        f = level.figures()
        yield (
            f"{level.concurrency:7}{f['first_p50_s'] * 1e3:14.0f}{f['first_max_s'] * 1e3:9.0f}{f['whole_p50_s']:14.3f}"
            f"{f['real_time_factor_p50']:7.3f}{f['late_max_s']:9.2f}{f['requests_per_s']:11.2f}{f['sound_per_s']:11.1f}"
        )
    yield ""
    slow = [str(level.concurrency) for level in levels if level.figures()["first_p50_s"] * 1e3 >= GOAL_FIRST_MS]
    yield f"goal: first sound below {GOAL_FIRST_MS} ms; " + (f"missed at {', '.join(slow)}" if slow else "met")
    for anchor in ANCHORS:
        where = "" if anchor.level is None else f", {anchor.level} at once"
        yield f"{anchor.who}{where}: {anchor.said}"


def device_bytes(args: Any, flags: Any) -> int | None:
    """Return the bytes of a CUDA device, None for the tiny checkpoint; end the program if the memory is too small.

    The value is read from the driver, because PyTorch would create a CUDA context in this process, which takes memory
    that the stages need.

    Args:
        flags: the parser of the command line, for errors.
    """
    if args.tiny:
        return None
    if not current_platform.is_cuda():
        flags.error("no CUDA device: the released shape has nowhere to run; --tiny tries the program out on a CPU")
    total, alone = current_platform.get_device_total_memory(0), current_platform.device_count() == 1
    copies = {stage: 1 if stage == "thinker" else args.talkers for stage in NEEDED_GIB}
    needed = sum(copies[stage] * size for stage, size in NEEDED_GIB.items()) if alone else max(NEEDED_GIB.values())
    if total < needed * GIB:
        print(f"error: {total / GIB:.0f} GiB on a CUDA device, about {needed} GiB are needed")
        sys.exit(REFUSED_STATUS)
    return total


def main() -> None:
    """Run this benchmark from the command line, and print its results."""
    flags = parser(__doc__ or "")
    flags.add_argument("--tiny", action="store_true", help="the tiny checkpoint on whatever this machine has")
    flags.add_argument("--http", action="store_true", help="ask a server over HTTP")
    flags.add_argument("--talkers", type=int, default=1, help="replicas of talker and of code2wav")
    flags.add_argument("--api-servers", type=int, default=1, help="API servers, with --http")
    flags.add_argument("--levels", nargs="+", type=int, default=list(LEVELS), help="answers at once")
    flags.add_argument("--rounds", type=int, default=4, help="measured answers at each level, divided by the level")
    flags.add_argument("--text", type=int, default=Lengths.text, help="text tokens of an answer")
    flags.add_argument("--frames", type=int, default=Lengths.frames, help="frames of an answer, 80 ms each")
    flags.add_argument("--json", type=Path, help="file that takes the figures and every answer")
    args = flags.parse_args()
    if args.api_servers != 1 and not args.http:
        flags.error("--api-servers: only with --http")
    settings = engine_settings(args.levels, device_bytes=device_bytes(args, flags), talkers=args.talkers)
    with tempfile.TemporaryDirectory(prefix="omni-bench-") as folder:
        model = args.model or str(
            write_qwen3_omni(f"{folder}/model", seed=0, real_vocab=args.tiny, released_shape=not args.tiny)
        )
        devices = devices_of(model, settings)
        with subject(model, settings, Lengths(args.text, args.frames), args) as (ask, run):
            levels = [measure(ask, run, level, args.rounds) for level in args.levels]
    where = "tiny checkpoint" if args.tiny else f"{current_platform.get_device_name(0)}, released shape"
    print(f"{where}, random weights; {args.text} text tokens and {args.frames} frames an answer")
    print(*table(levels), sep="\n")
    if args.json is not None:
        told = [
            level.figures() | {"devices": devices, "each": [asdict(answer) for answer in level.answers]}
            for level in levels
        ]
        args.json.write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
