"""Measures the time from the end of speech to the first sound of a Realtime session, with streaming input and without.

Two servers of one checkpoint run, one with `--no-omni-streaming-input`, and answer the same turn one after the other.
The client sends the sound as it is spoken, in pieces of 100 ms; the time begins with its last piece. Both answers have
the same text and the same length of sound. The CPU time of a server's processes meanwhile is a second figure, on which
the load of the machine has less influence. Without a model, the checkpoint has random weights, a quarter of the
released widths, half of its layers, its blocks of 8 s and its vocabulary.

    python benchmarks/streaming_input.py [MODEL] [--seconds 10] [--rounds 5] [--loud-end] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import websockets

sys.path.append(str(Path(__file__).resolve().parents[1]))

from examples.server import Server
from vllm_omni_ext.model_plugins.qwen3_omni.tiny.config import REAL_VOCAB, Sizes
from vllm_omni_ext.model_plugins.qwen3_omni.tiny.qwen3_omni import write_sizes

RATE_HZ, PIECE_S = 24_000, 0.1
TEXT, FRAMES = 12, 24
OVERRIDES = {
    "thinker": {"params": {"temperature": 0, "ignore_eos": True, "max_tokens": TEXT}, "engine": {"block_size": 32}},
    "talker": {"params": {"temperature": 0, "min_tokens": FRAMES, "max_tokens": FRAMES}},
}
EXPERTS = {"mrope_section": (12, 10, 10), "num_experts": 16, "head_dim": 64}
QUARTER: Sizes = replace(
    REAL_VOCAB,
    name="quarter",
    accept_hidden_layer=12,
    thinker={
        **REAL_VOCAB.thinker,
        **EXPERTS,
        "hidden_size": 512,
        "intermediate_size": 192,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 192,
    },
    talker={
        **REAL_VOCAB.talker,
        **EXPERTS,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 10,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 96,
        "shared_expert_intermediate_size": 192,
    },
    predictor={
        **REAL_VOCAB.predictor,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    audio={
        "d_model": 320,
        "encoder_layers": 16,
        "encoder_attention_heads": 5,
        "encoder_ffn_dim": 1280,
        "downsample_hidden_size": 120,
        "n_window_infer": 800,
    },
)


def speech(seconds: float, seed: int, loud_end: bool) -> bytes:
    """Return noise; with `loud_end`, pauses of silence and a last second that is four times as loud as the others."""
    noise = np.random.default_rng(seed).uniform(-0.2, 0.2, int(seconds * RATE_HZ))
    if loud_end:
        noise *= (np.arange(len(noise)) // (RATE_HZ // 2)) % 2
        noise[-RATE_HZ:] *= 4
    return bytes((noise * 32767).astype("<i2").tobytes())


def cpu_s(server: Server) -> float:
    """Return the CPU time of a server's processes, in seconds."""
    return sum(sum(process.cpu_times()[:2]) for process in server.processes())


async def turn(server: Server, model: str, data: bytes) -> tuple[float, float, str, int]:
    """Send the sound of one turn in real time, and request an answer.

    Args:
        data: the sound, PCM16 at 24 kHz.

    Returns:
        (seconds from the end of the sound to the first sound of the answer, CPU seconds of the server meanwhile,
        transcript of the answer, bytes of its sound).
    """
    url = f"{server.base_url.replace('http', 'ws')}/realtime?model={model}"
    async with websockets.connect(url, max_size=None) as socket:

        async def send(kind: str, **fields: Any) -> None:
            await socket.send(json.dumps({"type": kind, **fields}))

        manual = {"type": "realtime", "audio": {"input": {"turn_detection": None}}}
        await send("session.update", session=manual)
        size, began = int(PIECE_S * RATE_HZ) * 2, time.monotonic()
        for at in range(0, len(data), size):
            await asyncio.sleep(began + (at + size) / (2 * RATE_HZ) - time.monotonic())  # the piece has been spoken
            await send("input_audio_buffer.append", audio=base64.b64encode(data[at : at + size]).decode())
        before, first, work, sound, text = cpu_s(server), 0.0, 0.0, 0, ""
        ended = time.monotonic()
        await send("input_audio_buffer.commit")
        await send("response.create")
        async for message in socket:
            event = json.loads(message)
            if event["type"] == "response.output_audio.delta":
                if not first:
                    first, work = time.monotonic() - ended, cpu_s(server) - before
                sound += len(base64.b64decode(event["delta"]))
            elif event["type"] == "response.output_audio_transcript.done":
                text = event["transcript"]
            elif event["type"] == "response.done":
                assert first and event["response"]["status"] in ("completed", "incomplete"), event
                return first, work, text, sound
    raise RuntimeError("the connection was closed before the end of the answer")


def main() -> None:
    """Run this benchmark from the command line, and print its results."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("model", nargs="?", help="directory or hub id; without it, a random checkpoint")
    flags.add_argument("--seconds", type=float, default=10.0, help="length of the turn")
    flags.add_argument("--rounds", type=int, default=5, help="measured turns, after one that warms up")
    flags.add_argument("--loud-end", action="store_true", help="the loudest sound is the last: no block can be reused")
    flags.add_argument("--json", type=Path, help="file that takes every figure")
    args = flags.parse_args()
    names = ("streaming", "without")
    figures: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in names} for kind in ("time", "CPU time")}
    with tempfile.TemporaryDirectory(prefix="omni-bench-") as folder, ExitStack() as stack:
        model = args.model or str(write_sizes(Path(folder) / "model", QUARTER))
        common = ["--served-model-name", "bench", "--max-model-len", "4096", "--stage-overrides", json.dumps(OVERRIDES)]
        servers = {}
        for name in names:
            off = ["--no-omni-streaming-input"] if name == "without" else []
            servers[name] = stack.enter_context(Server(model, Path(folder) / f"{name}.log", [*common, *off]))
        for seed in range(args.rounds + 1):
            data, answers = speech(args.seconds, seed, args.loud_end), set()
            for name, server in servers.items():
                first, work, *answer = asyncio.run(turn(server, "bench", data))
                answers.add(tuple(answer))
                if seed:
                    figures["time"][name].append(first)
                    figures["CPU time"][name].append(work)
            assert len(answers) == 1, f"round {seed}: other answers"
    print(f"end of {args.seconds:g} s of speech to first sound, medians of {args.rounds}, ms:")
    print(f"{'':>10}{'streaming':>12}{'without':>12}{'ratio':>10}{'smallest':>10}{'largest':>10}")
    for kind, by_name in figures.items():
        streaming, without = (statistics.median(by_name[name]) for name in names)
        ratios = [one / other for one, other in zip(*by_name.values(), strict=True)]
        print(
            f"{kind:>10}{1e3 * streaming:12.0f}{1e3 * without:12.0f}{streaming / without:10.2f}"
            f"{min(ratios):10.2f}{max(ratios):10.2f}"
        )
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
