"""Write tests/data/gpu_golden.json: answers of Transformers on the CPU in float32, and the media of the prompts.

    python -m tests.gpu.make_golden

The file holds all that `run_once.py` needs, so that the machine with the GPU needs neither Transformers' model nor any
package that reads media.
"""

from __future__ import annotations

import base64
import io
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.media import Message, audio, image, of_kind
from tests.support.oracle import Oracle
from vllm_omni_ext.model_plugins.qwen3_omni.tiny.qwen3_omni import write_qwen3_omni

FILE = Path(__file__).parents[1] / "data" / "gpu_golden.json"
TEXT, FRAMES = 24, 40

SEEN = {"type": "image", "image": image(64, 64, seed=2)}
HEARD = {"type": "audio", "audio": audio(0.5, seed=1)}
CLIPS_S = (0.35, 0.95, 0.5, 0.2)
"""Clips of different length: in one call of the encoder, the ends of the shorter ones sound different."""

CASES: dict[str, list[Message]] = {
    "text": [{"role": "user", "content": "hello world"}],
    "long_prompt": [{"role": "user", "content": "word " * 300}],
    "image": [{"role": "user", "content": [SEEN, {"type": "text", "text": "What is this?"}]}],
    "audio": [{"role": "user", "content": [HEARD, {"type": "text", "text": "What do you hear?"}]}],
    "both": [{"role": "user", "content": [SEEN, HEARD, {"type": "text", "text": "Compare them."}]}],
}
for number, seconds in enumerate(CLIPS_S):
    clip = {"type": "audio", "audio": audio(seconds, seed=30 + number)}
    CASES[f"clip_{number}"] = [{"role": "user", "content": [clip, {"type": "text", "text": "Hm?"}]}]


def media_of(messages: Sequence[Message]) -> dict[str, list[str]]:
    """Images as PNG and sounds as 16 bit samples at 16 kHz, in base64."""
    found: dict[str, list[str]] = {"image": [], "audio": []}
    for picture in of_kind(messages, "image"):
        buffer = io.BytesIO()
        picture.save(buffer, format="PNG")
        found["image"].append(base64.b64encode(buffer.getvalue()).decode())
    for samples in of_kind(messages, "audio"):
        found["audio"].append(base64.b64encode((samples * 2**15).astype("<i2").tobytes()).decode())
    return found


def golden(oracle: Oracle, messages: Sequence[Message]) -> dict[str, Any]:
    """One case, ready for JSON."""
    answer = oracle.run(messages, voice="ethan", thinker_max_tokens=TEXT, talker_max_tokens=FRAMES)
    return {
        "prompt": oracle.prompt(messages),
        **media_of(messages),
        "tokens": answer.thinker_ids,
        "frames": answer.frames.tolist(),
        "samples": len(answer.wav),
    }


def main() -> None:
    """Write the file."""
    with tempfile.TemporaryDirectory() as folder:
        oracle = Oracle(write_qwen3_omni(Path(folder) / "model", seed=0))
        cases = {name: golden(oracle, messages) for name, messages in CASES.items()}
    limits = {"text": TEXT, "frames": FRAMES}
    FILE.write_text(json.dumps({"limits": limits, "cases": cases}) + "\n")
    print(f"{FILE}: {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
