"""Sends long videos to a server, and measures the memory of the devices after each answer.

A video has 1280 x 720 pixels and 2 frames a second; an answer has 4 tokens. If the server refuses its configuration,
the exit status is 3 and the reason is printed.

    python benchmarks/gpu_video.py MODEL [--frames 32 64 128 160] [--json FILE] [-- flags of vllm serve]
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from gpu_parts import REFUSED_STATUS
from gpu_start import measured, split
from spoken_http import MODEL

from examples.server import Server

FRAMES = (32, 64, 128, 160)
WIDTH, HEIGHT, FPS = 1280, 720, 2.0
ANSWER_S = 300.0


def video(frames: int, width: int, height: int) -> str:
    """Return a `data:` URL of an MP4 file: noise that moves."""
    import cv2
    import numpy as np

    picture = np.random.default_rng(0).integers(0, 255, (height, width, 3), np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "video.mp4")
        writer = cv2.VideoWriter(str(file), cv2.VideoWriter_fourcc(*"mp4v"), FPS, (width, height))
        for shift in range(frames):
            writer.write(np.roll(picture, shift, 0))
        writer.release()
        return f"data:video/mp4;base64,{base64.b64encode(file.read_bytes()).decode()}"


def ask(server: Server, url: str) -> dict[str, Any]:
    """Send a request with the video at a URL; return {"prompt_tokens": number, "answer_s": seconds}."""
    content = [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": content}],
        "modalities": ["text"],
        "max_completion_tokens": 4,
        "ignore_eos": True,
    }
    request = urllib.request.Request(
        f"{server.base_url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
        usage = json.load(answer)["usage"]
    return {"prompt_tokens": usage["prompt_tokens"], "answer_s": time.perf_counter() - began}


def memory() -> dict[str, Any]:
    """Return {"devices": used bytes of each CUDA device, "processes": used bytes by process id}."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return {"devices": [], "processes": {}}
    from vllm.third_party import pynvml

    pynvml.nvmlInit()
    devices, processes = [], {}
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        devices.append(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
        try:
            running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        except pynvml.NVMLError:  # possible in a container
            running = []
        for each in running:
            processes[each.pid] = processes.get(each.pid, 0) + (each.usedGpuMemory or 0)
    return {"devices": devices, "processes": processes}


def replicas(server: Server) -> dict[int, str]:
    """Return the ids of the server's replicas, e.g. "talker/0", by process id."""
    with urllib.request.urlopen(f"{server.base_url}/omni/status", timeout=ANSWER_S) as answer:
        stages = json.load(answer)["stages"]
    return {each["pid"]: each["id"] for stage in stages for each in stage["replicas"]}


def after(server: Server, frames: int, **figures: Any) -> dict[str, Any]:
    """Return the figures of one answer with the memory in use now; called after the answer.

    Args:
        frames: frames of the video; 0: before the first video.
        figures: the result of `ask`.
    """
    found = memory()
    names = replicas(server)
    held = {names.get(pid, str(pid)): size for pid, size in found["processes"].items()}
    print(f"{frames} frames: {figures}, bytes of devices {found['devices']}, of replicas {held}", flush=True)
    return {"frames": frames, "devices_bytes": found["devices"], "replicas_bytes": held, **figures}


def main() -> int:
    """Run this benchmark from the command line, and print its results; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory or hub id")
    parser.add_argument("--frames", nargs="+", type=int, default=FRAMES, help="frames of each video")
    parser.add_argument("--size", nargs=2, type=int, default=(WIDTH, HEIGHT), metavar=("WIDTH", "HEIGHT"))
    parser.add_argument("--json", type=Path, help="file that takes the figures")
    ours, flags = split(sys.argv[1:])
    args = parser.parse_args(ours)

    def answers(server: Server) -> list[dict[str, Any]]:
        before = after(server, 0)
        return [before, *(after(server, each, **ask(server, video(each, *args.size))) for each in args.frames)]

    rows = measured(args.model, flags, answers)
    if rows is None:
        return REFUSED_STATUS
    if args.json is not None:
        args.json.write_text(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
