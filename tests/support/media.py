"""Synthetic audio, images and video from a seed, and the ways to send them.

The content of a message is a string or a list of parts: {"type": "text", "text": str}, {"type": "audio", "audio":
float32 [samples] at 16 kHz}, {"type": "image", "image": RGB image} or {"type": "video", "video": uint8 [frames, height,
width, 3]}. A video with its own sound has "sound" too, like "audio"; then all videos of a conversation have it. The
data URLs are lossless, so that vLLM decodes exactly the oracle's input. vLLM reads at most 32 frames of a video by
default, and ignores its frame rate for Qwen3-Omni.
"""

from __future__ import annotations

import base64
import io
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import av
import cv2
import numpy as np
import soundfile
from PIL import Image

Message = Mapping[str, Any]

AUDIO_RATE = 16_000
"""Samples a second of all audio input."""


def audio(seconds: float, seed: int) -> np.ndarray:
    """Three tones and some noise: [samples] float32 in [-1, 1], exact in 16 bits."""
    rng = np.random.default_rng(seed)
    time = np.arange(round(seconds * AUDIO_RATE)) / AUDIO_RATE
    tones = sum(np.sin(2 * np.pi * rng.uniform(80, 3000) * time + rng.uniform(0, 6)) for _ in range(3))
    sound = 0.2 * tones * np.sin(2 * np.pi * rng.uniform(1, 4) * time) + 0.02 * rng.standard_normal(len(time))
    return (np.clip(sound, -0.99, 0.99) * 2**15).astype(np.int16).astype(np.float32) / 2**15


def image(width: int, height: int, seed: int) -> Image.Image:
    """Colour waves with some noise, RGB."""
    return Image.fromarray(video(1, width, height, seed)[0])


def video(frames: int, width: int, height: int, seed: int) -> np.ndarray:
    """Moving colour waves with some noise: [frames, height, width, 3] uint8."""
    rng = np.random.default_rng(seed)
    t, y, x = np.meshgrid(np.arange(frames), np.arange(height), np.arange(width), indexing="ij")
    waves = []
    for _ in range(3):
        across, down, speed = rng.uniform(0.02, 0.3, 3)
        waves.append(127 + 100 * np.sin(across * x + down * y + 10 * speed * t + rng.uniform(0, 6)))
    pixels = np.stack(waves, axis=-1) + rng.uniform(-20, 20, (frames, height, width, 3))
    return np.clip(pixels, 0, 255).astype(np.uint8)


def audio_url(samples: np.ndarray) -> str:
    """[samples] at 16 kHz as a `data:` URL of a WAV file."""
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, AUDIO_RATE, format="WAV", subtype="PCM_16")
    return _data_url("audio/wav", buffer.getvalue())


def image_url(picture: Image.Image) -> str:
    """An image as a `data:` URL of a PNG file."""
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return _data_url("image/png", buffer.getvalue())


def video_url(frames: np.ndarray, fps: float = 2.0) -> str:
    """[frames, height, width, 3] uint8 as a `data:` URL of an AVI file with the lossless FFV1 codec."""
    _, height, width, _ = frames.shape
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "video.avi"
        writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"FFV1"), fps, (width, height))
        if not writer.isOpened():
            raise RuntimeError("this OpenCV cannot write FFV1")
        for frame in frames:
            writer.write(cv2.cvtColor(frame, cv2.COLOR_RGB2BGR))
        writer.release()
        return _data_url("video/x-msvideo", path.read_bytes())


def sounding_video_url(frames: np.ndarray, samples: np.ndarray, fps: int = 2) -> str:
    """The same with a track of [samples] at 16 kHz, as a `data:` URL of a Matroska file."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska") as container:
        pictures: Any = container.add_stream("ffv1", rate=fps, options={"g": "1"})
        pictures.height, pictures.width, pictures.pix_fmt = *frames.shape[1:3], "bgr0"
        track: Any = container.add_stream("pcm_f32le", rate=AUDIO_RATE, layout="mono")
        for pixels in frames:
            container.mux(pictures.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(pictures.encode())
        sound = av.AudioFrame.from_ndarray(samples[None], format="flt", layout="mono")
        sound.sample_rate = AUDIO_RATE
        container.mux(track.encode(sound))
        container.mux(track.encode())
    return _data_url("video/x-matroska", buffer.getvalue())


def of_kind(messages: Sequence[Message], kind: str) -> list[Any]:
    """All media of one kind (`audio`, `image`, `video` or `sound`, those of videos) in the order of the prompt."""
    contents = [message["content"] for message in messages if not isinstance(message["content"], str)]
    return [part[kind] for content in contents for part in content if kind in part and part["type"] != "text"]


def processor_options(messages: Sequence[Message]) -> dict[str, bool]:
    """Options of Transformers' processor, `generate`, and vLLM's `mm_processor_kwargs`."""
    return {"use_audio_in_video": True} if of_kind(messages, "sound") else {}


def multi_modal_data(messages: Sequence[Message]) -> dict[str, Any]:
    """The media as vLLM's `multi_modal_data`, for the text prompt of the chat template."""
    data = {kind: of_kind(messages, kind) for kind in ("audio", "image", "video")}
    data["audio"] = [(samples, AUDIO_RATE) for samples in (*data["audio"], *of_kind(messages, "sound"))]
    return {kind: items for kind, items in data.items() if items}


def openai_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The same conversation as the body of a chat completion request, media as `data:` URLs."""
    return [{**message, "content": _openai_content(message["content"])} for message in messages]


def _openai_content(content: str | Sequence[Mapping[str, Any]]) -> Any:
    if isinstance(content, str):
        return content
    return [part if part["type"] == "text" else _openai_medium(part) for part in content]


def _openai_medium(part: Mapping[str, Any]) -> dict[str, Any]:
    kind = part["type"]
    if "sound" in part:
        url = sounding_video_url(part["video"], part["sound"])
    else:
        url = {"audio": audio_url, "image": image_url, "video": video_url}[kind](part[kind])
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def _data_url(mime: str, content: bytes) -> str:
    return f"data:{mime};base64,{base64.b64encode(content).decode()}"


def damaged_avif() -> bytes:
    """An image at which Pillow raises RuntimeError."""
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, "AVIF")
    data = bytearray(file.getvalue())
    start = data.index(b"mdat") + 4
    data[start : start + 8] = bytes(8)
    return bytes(data)
