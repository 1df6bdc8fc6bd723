"""Deployments in released shapes, and the requests that each of them answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TEXT: Mapping[str, Any] = {"modalities": ["text"], "max_completion_tokens": 4}
SPOKEN: Mapping[str, Any] = {"max_completion_tokens": 16, "talker": {"max_tokens": 24, "min_tokens": 24}}


@dataclass(frozen=True)
class Gpu:
    """A kind of device: its name, and its memory in MiB, as NVML reports both."""

    name: str
    mib: int


H200, H100 = Gpu("NVIDIA H200", 143_771), Gpu("NVIDIA H100 80GB HBM3", 81_559)


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One chat request: `name` of its content (`support.media`), and more fields."""

    name: str
    content: tuple[Mapping[str, Any], ...]
    fields: Mapping[str, Any] = field(default_factory=lambda: TEXT)


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One request for pictures: `size` as `512x512`, and more fields."""

    name: str
    size: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One deployment.

    Attributes:
        devices: number of devices.
        flags: of `vllm serve MODEL --omni`, as the documents have them.
    """

    name: str
    model: str
    gpu: Gpu
    devices: int = 1
    flags: tuple[str, ...] = ()
    asks: tuple[Ask | Picture, ...] = ()


def say(text: str) -> Mapping[str, Any]:
    """A part with text."""
    return {"type": "text", "text": text}


def video(frames: int) -> Mapping[str, Any]:
    """A part with a video of 1280 x 720 pixels."""
    return {"type": "video", "frames": frames, "width": 1280, "height": 720}


TALK = (
    Ask(name="spoken", content=(say("Why is the sky blue?"),), fields=SPOKEN),
    Ask(name="spoken again", content=(say("Why is the sky blue?"),), fields=SPOKEN),
    Ask(name="long prompt", content=(say("word " * 12_000),)),
    Ask(name="large image", content=({"type": "image", "width": 3584, "height": 3584}, say("What is this?"))),
    Ask(name="video of 32 frames", content=(video(32), say("What is this?"))),
    Ask(name="video of 64 frames", content=(video(64), say("What is this?"))),
    Ask(name="video of 128 frames", content=(video(128), say("What is this?"))),
    Ask(name="text after the videos", content=(say("And now?"),), fields=SPOKEN),
)
FEWER = (*TALK[:2], TALK[3], TALK[4], TALK[-1])

PICTURES = (
    Picture(name="picture", size="512x512", fields={"num_inference_steps": 4}),
    Picture(name="large picture", size="1024x1024", fields={"num_inference_steps": 4}),
    Ask(name="described image", content=({"type": "image", "width": 980, "height": 980}, say("What is this?"))),
)

SCENARIOS = (
    Scenario(name="h200", model="qwen3-omni", gpu=H200, asks=TALK),
    Scenario(
        name="fp8",
        model="qwen3-omni",
        gpu=H100,
        flags=("--quantization", "fp8"),
        asks=TALK,
    ),
    Scenario(
        name="two",
        model="qwen3-omni",
        gpu=H100,
        devices=2,
        flags=("--max-model-len", "32768"),
        asks=FEWER,
    ),
    Scenario(name="bagel", model="bagel", gpu=H100, asks=PICTURES),
    Scenario(
        name="bagel-single",
        model="bagel",
        gpu=H100,
        flags=("--stage-config", "bagel_single"),
        asks=PICTURES,
    ),
)
