"""Denoise steps of BAGEL: several images in one forward pass, one by one, as a plain loop; and the parts of an image.

    python benchmarks/bagel_steps.py [MODEL] [--wide] [--height 64] [--width 96] [--rounds 5]
    python benchmarks/bagel_steps.py --released-shape --device cuda --dtype bfloat16 --height 512 --width 512

Without a model, a tiny random one is written; `--wide` makes it 7 million parameters in place of one, so that more of
the time is arithmetic, `--released-shape` is BAGEL-7B-MoT with random weights (30 GB in bfloat16). The ways take turns
in every round; a number is the median of the rounds, with the smallest and largest. The plain loop is for a checkpoint
in float32 on a CPU. No engine and no server: this is the model's computation alone.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from bagel_plain import Plain, Trace

from vllm_omni_ext.model_plugins.bagel.checkpoint import load_bagel
from vllm_omni_ext.model_plugins.bagel.denoise import Denoiser, RunningImage, finish
from vllm_omni_ext.model_plugins.bagel.generate import prepare_image
from vllm_omni_ext.model_plugins.bagel.model import Bagel
from vllm_omni_ext.model_plugins.bagel.parameters import ImageParameters
from vllm_omni_ext.model_plugins.bagel.sizes import RELEASED
from vllm_omni_ext.model_plugins.bagel.tokens import Tokens
from vllm_omni_ext.tiny.bagel import write_bagel
from vllm_omni_ext.tiny.bagel_sizes import BagelSizes

PROMPT = "a small red fox in the snow, watercolor"
TOGETHER = (1, 2, 4)
MS = 1e3
WIDE = BagelSizes(hidden=256, feed_forward=768, layers=6, heads=8, kv_heads=2)

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
    return parser.parse_args()


class Bench:
    """The model and what is asked of it."""

    def __init__(self, model: Bagel, plain: Plain | None, args: argparse.Namespace) -> None:
        self.model, self.plain, self.args = model, plain, args

    def parameters(self, seed: int) -> ImageParameters:
        size = {"height": self.args.height, "width": self.args.width}
        return ImageParameters(**size, num_timesteps=self.args.steps + 1, seed=seed, cfg_interval=(0.0, 1.0))

    def prepared(self, count: int) -> list[RunningImage]:
        return [prepare_image(self.model, [PROMPT], self.parameters(seed))[0] for seed in range(count)]

    def packed(self, count: int) -> float:
        """Seconds for all steps of so many images in one forward pass each."""
        running, denoiser = self.prepared(count), Denoiser(self.model)
        return self.timed(lambda: [denoiser.step(running) for _ in range(self.args.steps)])

    def one_by_one(self, count: int) -> float:
        """Seconds for the same, one image after the other at each step."""
        running, denoisers = self.prepared(count), [Denoiser(self.model) for _ in range(count)]
        pairs = list(zip(running, denoisers, strict=True))
        return self.timed(lambda: [each.step([image]) for _ in range(self.args.steps) for image, each in pairs])

    def plain_loop(self, plain: Plain, count: int) -> float:
        """Seconds for the same as a plain loop: images, branches and experts one after the other."""
        jobs = []
        for seed in range(count):
            cond, text, img = plain.cache(), plain.cache(), plain.cache()
            plain.add_text(cond, PROMPT)
            jobs.append((self.parameters(seed), torch.Generator().manual_seed(seed), cond, text, img))
        grid = self.args.height // 16, self.args.width // 16
        return self.timed(lambda: [plain.denoise(Trace(), p, grid, *rest) for p, *rest in jobs])

    def parts(self) -> dict[str, float]:
        """Seconds of one image by part."""
        found: list[RunningImage] = []
        prefill = self.timed(lambda: found.extend(self.prepared(1)))
        denoiser = Denoiser(self.model)
        steps = self.timed(lambda: [denoiser.step(found) for _ in range(self.args.steps)])
        return {"prefill": prefill, "steps": steps, "VAE": self.timed(lambda: finish(self.model, found[0]))}

    def ways(self) -> dict[str, Callable[[int], float]]:
        """What is compared, by name."""
        found = {"packed": self.packed, "one by one": self.one_by_one}
        return found if self.plain is None else {**found, "plain loop": partial(self.plain_loop, self.plain)}

    def timed(self, call: Callable[[], object]) -> float:
        """Seconds until everything that the call started is done."""
        self.wait()
        began = time.perf_counter()
        call()
        self.wait()
        return time.perf_counter() - began

    def wait(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()


def random_weights(device: str, dtype: torch.dtype, tokens: Tokens) -> Bagel:
    """The released shape with weights that keep numbers finite."""
    with torch.device("meta"):
        model = Bagel(RELEASED).eval().requires_grad_(False)
    for part in (model.llm, model.vision, model.latents):
        part.to(dtype)
    model.to_empty(device=device)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=parameter[0].numel() ** -0.5)
        else:
            parameter.fill_(1.0)
    model.tokens = tokens
    return model


def made(args: argparse.Namespace, folder: str) -> Bench:
    """The benchmark with the model that was asked for."""
    directory = args.model or write_bagel(f"{folder}/model", size=WIDE if args.wide else None)
    dtype = getattr(torch, args.dtype)
    if args.released_shape:
        return Bench(random_weights(args.device, dtype, Tokens.from_directory(directory)), None, args)
    model = load_bagel(directory, dtype=dtype, device=args.device)
    plain = args.device == "cpu" and dtype == torch.float32
    return Bench(model, Plain(directory, model) if plain else None, args)


def measure(bench: Bench) -> tuple[Times, Times]:
    """Seconds of each way, and of each part of an image, by round."""
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


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def table(ways: Times, parts: Times, steps: int) -> list[str]:
    """The results as lines of a table."""
    names = list(dict.fromkeys(key.rpartition(" ")[0] for key in ways))
    lines = [f"| images | {', image-steps/s | '.join(names)}, image-steps/s | packed / one by one, time |"]
    lines.append("|---" * (len(names) + 2) + "|")
    for count in TOGETHER:
        rates = [spread([count * steps / seconds for seconds in ways[f"{name} {count}"]]) for name in names]
        pairs = zip(ways[f"packed {count}"], ways[f"one by one {count}"], strict=True)
        ratio = statistics.median(packed / single for packed, single in pairs)
        lines.append(f"| {count} | {' | '.join(rates)} | {ratio:.2f} |")
    lines += ["", "| part of an image | ms |", "|---|---|"]
    lines += [f"| {name} | {spread([MS * seconds for seconds in values])} |" for name, values in parts.items()]
    return lines


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(prefix="bagel-bench-") as folder:
        ways, parts = measure(made(args, folder))
    print("\n".join(table(ways, parts, args.steps)))


if __name__ == "__main__":
    main()
