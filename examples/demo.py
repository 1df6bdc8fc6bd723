"""Serve a tiny random Qwen3-Omni, ask it something, and keep what it says as demo/reply.wav.

Run with `make demo` or `python examples/demo.py`. The model has random weights: what it says is noise, but every
stage, process and interface is the real one. It needs no GPU and no download.
"""

from __future__ import annotations

import base64
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import openai
import soundfile
from server import Server, ServerFailed

from vllm_omni_ext.model_plugins.qwen3_omni.tiny.qwen3_omni import write_qwen3_omni

REPLY = Path("demo/reply.wav")
RATE_HZ = 24_000
QUESTION = "Tell me about the blue cat in the moon"


def main() -> int:
    """Run the demonstration; returns the exit status."""
    with tempfile.TemporaryDirectory(prefix="vllm-omni-demo-") as folder:
        model = write_qwen3_omni(Path(folder) / "qwen3-omni", seed=0, real_vocab=True)
        print(f"serving {model}, this takes a while ...", flush=True)
        server = Server(model, Path(folder) / "server.log", ["--served-model-name", "qwen3-omni"])
        try:
            with server:
                ask(server)
                left = server.stop()
                assert not left, f"these processes had to be killed: {left}"
        except ServerFailed as err:
            print(f"failed: {err}", file=sys.stderr)
            return 1
        except (openai.APIError, AssertionError) as err:
            print(f"failed: {err}\n\nthe server's log ends with:\n{server.tail()}", file=sys.stderr)
            return 1
    print("the server has ended, no process is left")
    return 0


def ask(server: Server) -> None:
    """Ask for text and sound, check both, and keep the sound."""
    print(f"ready after {server.startup_s:.1f} s at {server.base_url}")
    client = openai.OpenAI(base_url=server.base_url, api_key=os.environ.get("VLLM_API_KEY", "none"))
    started = time.monotonic()
    reply = client.chat.completions.create(
        model="qwen3-omni",
        messages=[{"role": "user", "content": QUESTION}],
        modalities=["text", "audio"],
        audio={"voice": "ethan", "format": "wav"},
        max_completion_tokens=24,
        seed=1,
        extra_body={"talker": {"max_tokens": 50}},
    )
    took_s = time.monotonic() - started
    message = reply.choices[0].message
    assert message.audio is not None, "the reply has no sound"
    REPLY.parent.mkdir(exist_ok=True)
    REPLY.write_bytes(base64.b64decode(message.audio.data))
    samples, rate = soundfile.read(REPLY)
    assert rate == RATE_HZ, f"the sound has {rate} Hz"
    assert len(samples), "the sound is empty"
    assert np.isfinite(samples).all() and np.ptp(samples) > 0, "the sound is silence"
    print(f"asked      {QUESTION!r}")
    print(f"transcript {message.audio.transcript!r}")
    print(f"sound      {len(samples) / rate:.2f} s at {rate} Hz in {REPLY}, made in {took_s:.2f} s")


if __name__ == "__main__":
    sys.exit(main())
