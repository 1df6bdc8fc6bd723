"""Measures BAGEL's denoise steps: several images in one forward pass, one by one, and as a plain loop; times by part.

    python benchmarks/bagel_steps.py [MODEL] [--wide] [--height 64] [--width 96] [--rounds 5] [--json FILE]
    python benchmarks/bagel_steps.py --released-shape --device cuda --dtype bfloat16 --height 512 --width 512
    python benchmarks/bagel_steps.py --http [MODEL] [--height 64] [--width 96] [-- flags of vllm serve]

Without a model, a tiny random one with a million parameters is written. `--wide` gives it 7 million, so that more of
the time is arithmetic. `--released-shape` is BAGEL-7B-MoT with random weights (30 GB in bfloat16). The variants take
turns in every round. A number is the median of the rounds, with the smallest and largest. The plain loop
(`bagel_plain.py`) follows the reference implementation without this package's layers, in float32 on a CPU only.

Without `--http` there is no engine and no server: the program measures the model's computation alone. With it, the
program starts a server (with `--load-format dummy` for `--released-shape`), and 1, 2 and 4 clients request images and
edits at the same time. The exit status is 3 if the server refuses its configuration.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import bagel_http
import torch
from bagel_http import PROMPT, REFUSED_STATUS, Asked
from bagel_plain import Plain, Trace

from vllm_omni_ext.model_plugins.bagel.checkpoint import empty_bagel, load_bagel
from vllm_omni_ext.model_plugins.bagel.denoise import Denoiser, RunningImage, begin, finish
from vllm_omni_ext.model_plugins.bagel.model import Bagel
from vllm_omni_ext.model_plugins.bagel.parameters import ImageParameters
from vllm_omni_ext.model_plugins.bagel.prompts import Prompts
from vllm_omni_ext.model_plugins.bagel.stages.cuda_attention import attention_for
from vllm_omni_ext.model_plugins.bagel.tiny.bagel import SMALL, write_bagel

TOGETHER = (1, 2, 4)
MS = 1e3
WIDE = replace(SMALL, llm=replace(SMALL.llm, hidden=256, feed_forward=768, layers=6, heads=8, kv_heads=2))

Times = dict[str, list[float]]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="directory of a checkpoint; without it, a random one")
    parser.add_argument("--wide", action="store_true", help="a wider random checkpoint")
    parser.add_argument("--released-shape", action="store_true", help="the released sizes with random weights")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--height", type=int, default=64)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--steps", type=int, default=20, help="denoise steps of an image")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="compute threads")
    parser.add_argument("--http", action="store_true", help="images and edits from a server")
    parser.add_argument("--json", type=Path, help="file that takes the figures")
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:at])
    args.flags = sys.argv[at + 1 :]
    return args


class Bench:
    """A model, and the variants to measure.

    Args:
        plain: the same checkpoint as a plain loop; None: no plain loop is measured.
    """

    def __init__(self, model: Bagel, plain: Plain | None, args: argparse.Namespace) -> None:
        self.model, self.plain, self.args = model, plain, args

    def parameters(self, seed: int) -> ImageParameters:
        size = {"height": self.args.height, "width": self.args.width}
        return ImageParameters(**size, num_timesteps=self.args.steps + 1, seed=seed, cfg_interval=(0.0, 1.0))

    def prepared(self, count: int) -> list[RunningImage]:
        plan = Prompts(self.model.tokens, self.model.sizes).image([PROMPT], think=False)
        return [begin(self.model, plan, self.parameters(seed)) for seed in range(count)]

    def packed(self, count: int) -> float:
        """Return the seconds of all steps of `count` images, with one forward pass for each step."""
        running, denoiser = self.prepared(count), Denoiser(self.model)
        return self.timed(lambda: [denoiser.step(running) for _ in range(self.args.steps)])

    def one_by_one(self, count: int) -> float:
        """Return the seconds of all steps of `count` images, with one forward pass for each image and step."""
        running, denoisers = self.prepared(count), [Denoiser(self.model) for _ in range(count)]
        pairs = list(zip(running, denoisers, strict=True))
        return self.timed(lambda: [each.step([image]) for _ in range(self.args.steps) for image, each in pairs])

    def plain_loop(self, plain: Plain, count: int) -> float:
        """Return the seconds of all steps of `count` images in the plain loop: images and branches one by one."""
        jobs = []
        for seed in range(count):
            cond, text, img = plain.cache(), plain.cache(), plain.cache()
            plain.add_text(cond, PROMPT)
            jobs.append((self.parameters(seed), torch.Generator().manual_seed(seed), cond, text, img))
        grid = self.args.height // 16, self.args.width // 16
        return self.timed(lambda: [plain.denoise(Trace(), p, grid, *rest) for p, *rest in jobs])

    def parts(self) -> dict[str, float]:
        """Return the seconds of one image for its prefill, its steps and the decoding by the autoencoder ("VAE")."""
        found: list[RunningImage] = []
        prefill = self.timed(lambda: found.extend(self.prepared(1)))
        denoiser = Denoiser(self.model)
        steps = self.timed(lambda: [denoiser.step(found) for _ in range(self.args.steps)])
        return {"prefill": prefill, "steps": steps, "VAE": self.timed(lambda: finish(self.model, found[0]))}

    def ways(self) -> dict[str, Callable[[int], float]]:
        """Return the variants to compare: name -> function that takes a number of images and returns seconds."""
        found = {"packed": self.packed, "one by one": self.one_by_one}
        return found if self.plain is None else {**found, "plain loop": partial(self.plain_loop, self.plain)}

    def timed(self, call: Callable[[], object]) -> float:
        """Return the seconds of a call, including the work that it starts on the device."""
        self.wait()
        began = time.perf_counter()
        call()
        self.wait()
        return time.perf_counter() - began

    def wait(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()


def fill(model: Bagel) -> None:
    """Fill a model with random weights that keep numbers finite."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=parameter[0].numel() ** -0.5)
        else:
            parameter.fill_(1.0)


def directory_of(args: argparse.Namespace, folder: str) -> Path:
    """Return the directory of the checkpoint `args.model`; without one, write a random checkpoint into `folder`."""
    size = WIDE if args.wide else None
    return args.model or write_bagel(f"{folder}/model", size=size, released_shape=args.released_shape)


def made(args: argparse.Namespace, folder: str) -> Bench:
    """Return the benchmark with the model of the arguments."""
    directory, dtype = directory_of(args, folder), getattr(torch, args.dtype)
    read = empty_bagel if args.released_shape else load_bagel
    model = read(directory, dtype=dtype, device=args.device)
    model.llm.attention = attention_for(model.device, dtype, model.sizes.llm.head_dim)
    if args.released_shape:
        fill(model)
        return Bench(model, None, args)
    plain = args.device == "cpu" and dtype == torch.float32
    return Bench(model, Plain(directory, model) if plain else None, args)


def measure(bench: Bench) -> tuple[Times, Times]:
    """Measure all rounds.

    Returns:
        (seconds by "VARIANT COUNT", e.g. "packed 4"; seconds by part of an image), each a list with a value per round.
    """
    ways, parts = Times(), Times()
    for number in range(bench.args.rounds + 1):
        for count in TOGETHER:
            for name, way in bench.ways().items():
                seconds = way(count)
                if number:  # the first round warms up
                    ways.setdefault(f"{name} {count}", []).append(seconds)
        for name, seconds in bench.parts().items():
            if number:
                parts.setdefault(name, []).append(seconds)
    return ways, parts


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def beside(ways: Times, count: int) -> dict[str, float]:
    """Return the median of (time of "packed" / time of the variant) for `count` images, by name of each other variant.

    Args:
        ways: seconds by "VARIANT COUNT", as from `measure`.
    """
    names = dict.fromkeys(key.rpartition(" ")[0] for key in ways)
    found = {}
    for name in list(names)[1:]:
        pairs = zip(ways[f"packed {count}"], ways[f"{name} {count}"], strict=True)
        found[name] = statistics.median(packed / other for packed, other in pairs)
    return found


def table(ways: Times, parts: Times, steps: int) -> list[str]:
    """Return the results as the lines of two Markdown tables."""
    names = list(dict.fromkeys(key.rpartition(" ")[0] for key in ways))
    ratios = [f"packed / {name}, time" for name in names[1:]]
    lines = [f"| images | {', image-steps/s | '.join(names)}, image-steps/s | {' | '.join(ratios)} |"]
    lines.append("|---" * (len(names) + len(ratios) + 1) + "|")
    for count in TOGETHER:
        rates = [spread([count * steps / seconds for seconds in ways[f"{name} {count}"]]) for name in names]
        compared = [f"{ratio:.2f}" for ratio in beside(ways, count).values()]
        lines.append(f"| {count} | {' | '.join(rates)} | {' | '.join(compared)} |")
    lines += ["", "| part of an image | ms |", "|---|---|"]
    lines += [f"| {name} | {spread([MS * seconds for seconds in values])} |" for name, values in parts.items()]
    return lines


def figures(ways: Times, parts: Times, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the medians for a file: one entry for each number of images."""
    size = {"height": args.height, "width": args.width, "steps": args.steps}
    spent = {name: statistics.median(values) for name, values in parts.items()}
    return [
        {
            "images": count,
            **size,
            "seconds": {
                key.rpartition(" ")[0]: statistics.median(ways[key]) for key in ways if key.endswith(f" {count}")
            },
            "packed_beside": beside(ways, count),
            "parts": spent,
        }
        for count in TOGETHER
    ]


def over_http(args: argparse.Namespace, folder: str) -> tuple[list[str], list[dict[str, Any]]] | None:
    """Measure a server; return (lines of the table, figures), or None if it has refused its configuration."""
    flags = [*(["--load-format", "dummy"] if args.released_shape else []), *args.flags]
    asked = Asked(args.height, args.width, args.steps)
    rows = bagel_http.measure(directory_of(args, folder), flags, asked, TOGETHER, args.rounds)
    return None if rows is None else (list(bagel_http.table(rows)), bagel_http.as_json(rows))


def computed(args: argparse.Namespace, folder: str) -> tuple[list[str], list[dict[str, Any]]]:
    """Measure the computation without a server; return (lines of the tables, figures)."""
    torch.set_num_threads(args.threads)
    ways, parts = measure(made(args, folder))
    return table(ways, parts, args.steps), figures(ways, parts, args)


def main() -> int:
    args = arguments()
    with tempfile.TemporaryDirectory(prefix="bagel-bench-") as folder:
        found = over_http(args, folder) if args.http else computed(args, folder)
    if found is None:
        return REFUSED_STATUS
    lines, told = found
    print("\n".join(lines))
    if args.json is not None:
        args.json.write_text(json.dumps(told, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
