"""Stream text and sound from a running server.

vllm serve Qwen/Qwen3-Omni-30B-A3B-Instruct --omni
python examples/chat_http.py "Why is the sky blue?" --wav sky.wav
"""

from __future__ import annotations

import argparse
import base64
import os

import numpy as np
import openai
import soundfile

RATE_HZ = 24_000


def main() -> None:
    """Send one question; print the streamed text, and store the streamed sound as a WAV file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("question")
    parser.add_argument("--url", default="http://localhost:8000/v1")
    parser.add_argument("--voice", default="ethan")
    parser.add_argument("--wav", default="reply.wav")
    args = parser.parse_args()

    client = openai.OpenAI(base_url=args.url, api_key=os.environ.get("VLLM_API_KEY", "none"))
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": args.question}],
        modalities=["text", "audio"],
        audio={"voice": args.voice, "format": "pcm16"},
        stream=True,
    )
    pieces = []
    for chunk in stream:
        delta = chunk.choices[0].delta
        print(delta.content or "", end="", flush=True)
        if delta.audio and delta.audio.data:
            pieces.append(np.frombuffer(base64.b64decode(delta.audio.data), np.int16))
    print()
    if pieces:
        samples = np.concatenate(pieces)
        soundfile.write(args.wav, samples, RATE_HZ)
        print(f"{len(samples) / RATE_HZ:.2f} s of sound in {len(pieces)} pieces: {args.wav}")
    else:
        print("no sound")


if __name__ == "__main__":
    main()
