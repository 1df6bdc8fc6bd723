"""Deployments in released shapes, and the requests that each of them answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

TEXT: Mapping[str, Any] = {"modalities": ["text"], "max_completion_tokens": 4}
SPOKEN: Mapping[str, Any] = {
    "max_completion_tokens": 16,
    "talker": {"max_tokens": 24, "min_tokens": 24},
    "chunks": {"adaptive": True},  # parts of frames as for a streamed answer
}


@dataclass(frozen=True)
class Gpu:
    """A kind of device: its name, and its memory in MiB, as NVML reports both."""

    name: str
    mib: int


H200, H100 = Gpu("NVIDIA H200", 143_771), Gpu("NVIDIA H100 80GB HBM3", 81_559)
L40S, RTX_4090 = Gpu("NVIDIA L40S", 46_068), Gpu("NVIDIA GeForce RTX 4090", 24_564)
"""Names and memory; kernels are compiled for compute capability 9.0 as for the others."""


@dataclass(frozen=True)
class Calls:
    """Limits of a replica for one request: launches (a graph is one), and waits of the host for the device."""

    launches: int
    waits: int


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One chat request.

    Attributes:
        content: parts; those that are no text are made by `__main__.made`.
        fields: more fields of the request.
        refused: a part of the error, if the request must be refused with status 400.
        calls: by replica.
    """

    name: str
    content: tuple[Mapping[str, Any], ...]
    fields: Mapping[str, Any] = field(default_factory=lambda: TEXT)
    refused: str = ""
    calls: Mapping[str, Calls] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One request for pictures: `size` as `512x512`, and more fields.

    Attributes:
        edit: a picture of that size is edited.
    """

    name: str
    size: str
    edit: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Restart:
    """The process of a replica is killed; its successor must be up."""

    name: str
    replica: str


@dataclass(frozen=True, kw_only=True)
class Sleep:
    """All stages sleep and wake up: weights and KV caches leave the devices and return."""

    name: str


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One deployment.

    Attributes:
        devices: number of devices.
        flags: of `vllm serve MODEL --omni`, as the documents have them.
        environ: more environment variables.
        steps: sent or done one after the other.
        program: a file next to this one that runs `LLM(MODEL, omni=True)` instead of a server.
        compiles: kernels that requests may compile.
        twice: started twice, so that the second start has a compile cache. One scenario of each model does.
    """

    name: str
    model: str
    gpu: Gpu
    devices: int = 1
    flags: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    steps: tuple[Ask | Picture | Restart | Sleep, ...] = ()
    program: str = ""
    compiles: tuple[str, ...] = ()
    twice: bool = False

    def starts(self, *, once: bool = False) -> tuple[Scenario, ...]:
        """Return the scenario, and for another start the same deployment with the first two steps.

        Args:
            once: without another start.
        """
        return (self, replace(self, steps=self.steps[:2])) if self.twice and not once else (self,)


def say(text: str) -> Mapping[str, Any]:
    """A part with text."""
    return {"type": "text", "text": text}


def video(frames: int) -> Mapping[str, Any]:
    """A part with a video of 1280 x 720 pixels."""
    return {"type": "video", "frames": frames, "width": 1280, "height": 720}


SHORT = Ask(name="spoken", content=(say("Why is the sky blue?"),), fields=SPOKEN)
AGAIN = replace(SHORT, name="spoken again")
AFTER = replace(SHORT, name="spoken at the end")
LONG = Ask(name="long prompt", content=(say("word " * 12_000),))
IMAGE = Ask(name="large image", content=({"type": "image", "width": 3584, "height": 3584}, say("What is this?")))
SOUND = Ask(name="sound of 30 s", content=({"type": "audio", "seconds": 30}, say("What do you hear?")))
VIDEOS = tuple(
    Ask(name=f"video of {frames} frames", content=(video(frames), say("What is this?"))) for frames in (32, 64, 128)
)

MOST_CALLS = {"thinker/0": Calls(690, 17), "talker/0": Calls(1330, 52), "code2wav/0": Calls(220, 10)}
"""For 16 tokens, 24 frames and their sound. A wait is for sampled tokens, frames or sound. Code2wav's vary: a part that
arrives during a pass joins the next one."""

TALK = (SHORT, AGAIN, SOUND, LONG, IMAGE, *VIDEOS, AFTER)
FEWER = (SHORT, AGAIN, IMAGE, VIDEOS[0], AFTER)

NOT_QUANTIZED = '{"ignore": ["*.mlp.gate", "visual.*", "audio_tower.*"]}'
LIMIT = ("--omni-max-media-tokens", "49152")
TOO_LARGE = Ask(
    name="video of 160 frames",
    content=(video(160), say("What is this?")),
    refused="a part of type video has 57,600 tokens, but limits.max_media_tokens is 49,152",
)
IMAGE_KERNEL = ("kernel_unified_attention",)
"""vLLM compiles it for each number of images in a prompt of BAGEL."""

PICTURES = (
    Picture(name="picture", size="512x512", fields={"num_inference_steps": 4}),
    Picture(name="large picture", size="1024x1024", fields={"num_inference_steps": 4}),
    Picture(name="edited picture", size="1024x1024", fields={"num_inference_steps": 4}, edit=True),
    Ask(name="described image", content=({"type": "image", "width": 980, "height": 980}, say("What is this?"))),
)

SCENARIOS = (
    Scenario(
        name="h200",
        model="qwen3-omni",
        gpu=H200,
        steps=(*TALK[:-1], replace(AFTER, calls=MOST_CALLS)),
        twice=True,
    ),
    Scenario(
        name="fp8",
        model="qwen3-omni",
        gpu=H100,
        flags=("--quantization", "fp8"),
        steps=(
            *TALK,
            Restart(name="the talker's process is killed", replica="talker/0"),
            replace(SHORT, name="spoken by the next talker"),
            Restart(name="the thinker's process is killed", replica="thinker/0"),
            replace(VIDEOS[2], name="video for the next thinker"),
        ),
    ),
    Scenario(
        name="fp8-channel",
        model="qwen3-omni",
        gpu=H100,
        flags=("--quantization", "fp8_per_channel", "--quantization-config", NOT_QUANTIZED),
        steps=(SHORT, IMAGE),
    ),
    Scenario(
        name="two",
        model="qwen3-omni",
        gpu=H100,
        devices=2,
        flags=LIMIT,
        steps=(SHORT, AGAIN, IMAGE, VIDEOS[2], TOO_LARGE, AFTER),
    ),
    Scenario(
        name="prefill-decode",
        model="qwen3-omni",
        gpu=H100,
        devices=3,
        flags=("--stage-config", "qwen3_omni_pd", *LIMIT),
        steps=FEWER,
    ),
    Scenario(
        name="replicas",
        model="qwen3-omni",
        gpu=H100,
        devices=3,
        flags=("--stage-config", "qwen3_omni_replicas", *LIMIT),
        steps=(SHORT, AGAIN, replace(SHORT, name="spoken a third time"), AFTER),
    ),
    Scenario(
        name="sleep",
        model="qwen3-omni",
        gpu=H200,
        flags=("--enable-sleep-mode", "--enforce-eager"),
        environ={"VLLM_SERVER_DEV_MODE": "1"},
        steps=(SHORT, Sleep(name="sleep"), AFTER),
    ),
    Scenario(name="program", model="qwen3-omni", gpu=H200, program="program.py"),
    Scenario(
        name="qwen2-5",
        model="qwen2-5-omni",
        gpu=L40S,
        steps=(SHORT, AGAIN, SOUND, replace(LONG, content=(say("word " * 5000),)), IMAGE, VIDEOS[0], AFTER),
        twice=True,
    ),
    Scenario(
        name="qwen2-5-24gb",
        model="qwen2-5-omni",
        gpu=RTX_4090,
        flags=("--stage-config", "qwen2_5_omni_24gb"),
        steps=(
            SHORT,
            AGAIN,
            Ask(name="image", content=({"type": "image", "width": 1792, "height": 1792}, say("What is this?"))),
            Ask(
                name="larger image",
                content=({"type": "image", "width": 2016, "height": 2016}, say("What is this?")),
                refused="has 5,184 tokens, but limits.max_media_tokens is 4,096",
            ),
            AFTER,
        ),
    ),
    Scenario(name="bagel", model="bagel", gpu=H100, steps=PICTURES, compiles=IMAGE_KERNEL, twice=True),
    Scenario(name="bagel-h200", model="bagel", gpu=H200, steps=PICTURES, compiles=IMAGE_KERNEL),
    Scenario(
        name="bagel-single",
        model="bagel",
        gpu=H100,
        flags=("--stage-config", "bagel_single"),
        steps=PICTURES,
        compiles=IMAGE_KERNEL,
    ),
)
