"""Convert a text to speech with a running server; the file's ending selects the format (wav, flac, mp3, opus).

vllm serve Qwen/Qwen3-Omni-30B-A3B-Instruct --omni
python examples/speech.py "The sky is blue." --file sky.mp3
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import openai


def main() -> None:
    """Send one text to `/v1/audio/speech`, and store the sound in a file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("text")
    parser.add_argument("--url", default="http://localhost:8000/v1")
    parser.add_argument("--voice", default="ethan")
    parser.add_argument("--file", type=Path, default=Path("speech.wav"))
    args = parser.parse_args()

    client = openai.OpenAI(base_url=args.url, api_key=os.environ.get("VLLM_API_KEY", "none"))
    speech = client.audio.speech.with_streaming_response.create(
        model=client.models.list().data[0].id,
        input=args.text,
        voice=args.voice,
        response_format=args.file.suffix.removeprefix("."),
    )
    with speech as response:
        response.stream_to_file(args.file)
    print(f"{args.file.stat().st_size} bytes: {args.file}")


if __name__ == "__main__":
    main()
