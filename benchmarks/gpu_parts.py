"""The parts of `make gpu` as data: programs of at most ten minutes each, and their stored results."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LIMIT_S = 540
"""A part that takes longer is ended: a machine may be lent for commands of 600 s. Its compiled code is kept."""

FIRST_MODES = ("bf16-graphs-v2", "fp32-graphs-v2")
"""Modes of `tests/gpu/run_once.py` that run first: bfloat16 as in a usual server, and float32 for exact comparisons."""

OK, FAILED, LATE, REFUSED, LEFT_OUT = "ok", "failed", "too late", "refused", "left out"
"""States of a part. `LATE`: it was ended at `LIMIT_S`. `REFUSED`: the model does not fit onto this machine, and the
server has refused to start. `LEFT_OUT`: the machine has too few devices, or a library is missing."""

REFUSED_STATUS = 3
"""Exit status of a part that was refused."""

CONNECTORS = ("mooncake", "nixl")
"""Libraries that move KV caches, as in the names of the modes that use them."""

API_SERVERS = (1, 2, 4)
TEXTS_PER_S, SLOTS = 250, 128
"""Requests a second to API servers, which is more than one API server answers; and requests that the text stage runs at
once. With steps of 20 ms and answers of 16 tokens, the text stage can answer 400 requests a second."""

TINY_LEVELS = ("--tiny", "--rounds", "1", "--text", "8", "--frames", "12")

PICTURES = "benchmarks/bagel_steps.py"
BAGEL_RIGHT = "tests/gpu/bagel_once.py"
STEP_TOKENS = 49_664
"""Tokens of a denoise step that hold four edits of 1024x1024: 4 x 3 branches x (4,096 latent tokens + 2 markers)."""


@dataclass(frozen=True)
class Part:
    """A part of `make gpu`: one run of a program.

    Attributes:
        what: description for the report.
        words: a file below the repository's root, and its arguments. "{model}" and "{qwen2_5}" are the folders of
            checkpoints in released shapes, "{tiny}" that of a tiny one, "{json}" the file that takes the figures.
        devices: fewest CUDA devices.
        one_of: Python modules; one of them must be installed.
    """

    name: str
    what: str
    words: tuple[str, ...]
    devices: int = 1
    one_of: tuple[str, ...] = ()

    def command(self, python: str, folder: Path) -> list[str]:
        """Return the command line; `folder` contains the figures and the checkpoints."""
        places = {"json": self.figures(folder), **{name: folder / name for name in ("model", "qwen2_5", "tiny")}}
        program, *words = self.words
        return [python, str(ROOT / program), *(re.sub(r"^\{(\w+)\}$", lambda m: str(places[m[1]]), w) for w in words)]

    def figures(self, folder: Path) -> Path:
        """Return the file into which the program writes its figures as JSON."""
        return folder / f"{self.name}.json"

    def log(self, folder: Path) -> Path:
        """Return the file with the output of the program."""
        return folder / f"{self.name}.log"

    def missing(self, devices: int, modules: Sequence[str]) -> str | None:
        """Return the reason why the part cannot run on a machine with these devices and modules; None if it can."""
        if devices < self.devices:
            return f"needs {self.devices} CUDA devices, here is {devices}"
        if self.one_of and not set(self.one_of) & set(modules):
            return f"needs {' or '.join(self.one_of)}"
        return None


def parts(modes: Sequence[str], *, tiny: bool) -> tuple[Part, ...]:
    """Return all parts in the order of their runs: start, correctness of answers, speed, then the rest.

    Args:
        modes: of `tests/gpu/run_once.py`.
        tiny: the parts with the tiny checkpoint instead of the released shape; they also run on a CPU.
    """
    right = [
        Part(
            f"right-{mode}",
            f"answers as stored on a CPU, {mode}",
            ("tests/gpu/run_once.py", "--modes", mode),
            one_of=tuple(name for name in CONNECTORS if mode.endswith(name)),
        )
        for mode in modes
    ]
    bagel = tuple(
        Part(f"right-{config}", f"BAGEL as the reference, {config}", (BAGEL_RIGHT, "--stage-config", config))
        for config in (("bagel",) if tiny else ("bagel", "bagel_single"))
    )
    first = [part for mode in FIRST_MODES for part in right if part.name == f"right-{mode}"] or right[:1]
    start, *rest = _tiny_parts() if tiny else _released_parts()
    return (start, *first, *bagel[:1], *rest, *(part for part in right if part not in first), *bagel[1:])


def _released_parts() -> tuple[Part, ...]:
    dummy = ("--", "--load-format", "dummy")
    start = ("benchmarks/gpu_start.py", "{model}", "--json", "{json}", *dummy)
    qwen2_5 = ("benchmarks/gpu_start.py", "{qwen2_5}", "--json", "{json}", "--all-frames", *dummy)
    levels = ("benchmarks/speech_levels.py", "{model}", "--json", "{json}", "--levels")
    text = ("benchmarks/gpu_text.py", "{model}", "--json", "{json}")
    videos = ("benchmarks/gpu_video.py", "{model}", "--json", "{json}", *dummy)
    disaggregated = ("benchmarks/gpu_start.py", "{tiny}", "--json", "{json}", "--", "--stage-config", "qwen3_omni_pd")
    connector = '{"thinker": {"prefill_decode": {"connector": "nixl"}}}'
    return (
        Part("start", "the README's command, released shape, random weights; ten answers after it", start),
        Part("levels-few", "spoken answers, 1 and 4 at once", (*levels, "1", "4")),
        Part("levels-many", "spoken answers, 8, 16 and 32 at once", (*levels, "8", "16", "32")),
        Part("video", "videos of 32 to 160 frames of 1280x720, memory after each", videos),
        _pictures()[0],
        Part("start-fp8", "the README's command with a thinker in FP8", (*start, "--quantization", "fp8")),
        Part("start-qwen2-5", "the same command for Qwen2.5-Omni-7B, in bfloat16", qwen2_5),
        Part("start-qwen2-5-24gb", "the same for one 24 GB card", (*qwen2_5, "--stage-config", "qwen2_5_omni_24gb")),
        Part(
            "levels-talkers",
            "two talkers and two code2wav, 1 to 32 answers at once",
            (*levels, "1", "4", "8", "16", "32", "--talkers", "2"),
        ),
        Part("levels-http", "spoken answers over HTTP, 1 and 32 at once", (*levels, "1", "32", "--http")),
        *(
            Part(
                f"levels-http-{count}",
                f"the same with {count} API servers",
                (*levels, "1", "32", "--http", "--api-servers", str(count)),
            )
            for count in (2, 4)
        ),
        *_api_servers("{tiny}", "--rate", str(TEXTS_PER_S), "--slots", str(SLOTS), "--seconds", "10"),
        Part("text", "text only, compared with stock vLLM", text, devices=2),
        Part("text-fp8", "the same with a thinker in FP8, on both sides", (*text, "--fp8")),
        Part(
            "prefill-decode", "prompts computed apart (Mooncake), tiny checkpoint", disaggregated, one_of=("mooncake",)
        ),
        Part(
            "prefill-decode-nixl",
            "prompts computed apart (NIXL), tiny checkpoint",
            (*disaggregated, "--stage-overrides", connector),
            one_of=("nixl",),
        ),
        *_pictures()[1:],
    )


def _api_servers(*words: str) -> Iterator[Part]:
    """Yield a part for each number of API servers; `words` are arguments of `api_servers.py`."""
    for count in API_SERVERS:
        called = ("benchmarks/api_servers.py", *words, "--servers", str(count), "--kinds", "text", "--json", "{json}")
        yield Part(f"api-servers-{count}", f"text with {count} API servers, compared with stock vLLM", called)


def _pictures() -> tuple[Part, ...]:
    """Return the parts that make pictures, in the released shape."""
    alone = (
        PICTURES,
        "--released-shape",
        "--json",
        "{json}",
        "--rounds",
        "3",
        "--device",
        "cuda",
        "--dtype",
        "bfloat16",
    )
    served = (PICTURES, "--http", "--released-shape", "--json", "{json}", "--rounds", "3")
    room = json.dumps({"dit": {"engine": {"max_num_batched_tokens": STEP_TOKENS}}})
    flags = ("--", "--dtype", "bfloat16", "--stage-config", "bagel_single", "--stage-overrides", room)

    def size(side: int) -> tuple[str, ...]:
        return "--height", str(side), "--width", str(side)

    return (
        Part("picture-steps-512", "denoise steps packed and one by one, 512x512, no server", (*alone, *size(512))),
        Part("picture-steps-1024", "the same, 1024x1024", (*alone, *size(1024))),
        Part(
            "pictures-512",
            "images and edits over HTTP, 512x512, 20 steps, 1, 2, 4 at once",
            (*served, *size(512), *flags),
        ),
        Part("pictures-1024", "the same, 1024x1024", (*served, *size(1024), *flags)),
    )


def _tiny_parts() -> tuple[Part, ...]:
    start = ("benchmarks/gpu_start.py", "{tiny}", "--json", "{json}", "--", "--max-model-len", "2048")
    levels = ("benchmarks/speech_levels.py", "--json", "{json}", *TINY_LEVELS, "--levels")
    text = ("benchmarks/gpu_text.py", "{tiny}", "--tiny", "--json", "{json}")
    videos = ("benchmarks/gpu_video.py", "{tiny}", "--json", "{json}", "--frames", "8", "--size", "128", "128")
    videos += ("--", "--max-model-len", "2048")
    steps = (PICTURES, "--json", "{json}", "--rounds", "1", "--height", "48", "--width", "64")
    return (
        Part("start", "a server with the tiny checkpoint; ten answers after it", start),
        Part("levels-few", "spoken answers, 1 and 2 at once, tiny checkpoint", (*levels, "1", "2")),
        Part("levels-talkers", "two talkers, 2 at once, tiny checkpoint", (*levels, "2", "--talkers", "2")),
        *_api_servers("{tiny}", "--rate", "10", "--seconds", "3"),
        Part("video", "a video of 8 frames, tiny checkpoint", videos),
        Part("text", "text only, compared with stock vLLM, tiny checkpoint", text),
        Part("picture-steps-512", "denoise steps packed and one by one, tiny checkpoint", (*steps, "--steps", "3")),
        Part("pictures-512", "images and edits over HTTP, tiny checkpoint", (*steps, "--http", "--steps", "3")),
    )


@dataclass(frozen=True)
class Result:
    """The result of a part.

    Attributes:
        state: `OK`, `FAILED`, `LATE`, `REFUSED` or `LEFT_OUT`.
        seconds: the duration of the run.
        figures: the figures that the part has written; None: none.
        said: the last lines of the program's output, or the reason why the part was left out.
        commit: the repository's commit in this run.
    """

    state: str
    seconds: float = 0.0
    figures: Any = None
    said: str = ""
    commit: str = ""


@dataclass(frozen=True)
class Results:
    """The results of all parts, stored in a file between two calls of `gpu.py`.

    Attributes:
        machine: device, driver and versions, by name.
        parts: results by name of the part.
    """

    machine: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, Result] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path) -> Results:
        """Read the results from a file; they are empty if the file does not exist."""
        if not file.exists():
            return cls()
        told = json.loads(file.read_text())
        return cls(told["machine"], {name: Result(**result) for name, result in told["parts"].items()})

    def write(self, file: Path) -> None:
        """Replace the file by one with these results, in one step: the machine may be taken back at any moment."""
        new = file.with_suffix(".new")
        new.write_text(json.dumps(asdict(self), indent=1))
        new.replace(file)

    def on(self, machine: Mapping[str, str]) -> Results:
        """Return these results if they are of that machine, else empty results of that machine."""
        return self if self.machine == machine else Results(machine)

    def having(self, name: str, result: Result) -> Results:
        """Return the results with the result of one more part."""
        return replace(self, parts={**self.parts, name: result})

    def left(self, known: Sequence[Part], wanted: Sequence[str], commit: str) -> list[Part]:
        """Return the parts to run.

        Args:
            known: all parts.
            wanted: names of the parts to run; empty: all that have not ended well with this commit, those that have
                failed with it last.

        Raises:
            KeyError: a part of `wanted` does not exist.
        """
        by_name = {part.name: part for part in known}
        if wanted:
            return [by_name[name] for name in wanted]
        done = {name for name, r in self.parts.items() if r.commit == commit and r.state in (OK, REFUSED, LEFT_OUT)}
        failed = {name for name, result in self.parts.items() if result.commit == commit}
        return sorted((part for part in known if part.name not in done), key=lambda part: part.name in failed)
