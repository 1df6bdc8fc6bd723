"""Generate text and sound without a server.

python examples/offline.py Qwen/Qwen3-Omni-30B-A3B-Instruct "Why is the sky blue?"
"""

from __future__ import annotations

import argparse

import soundfile
from vllm import LLM


def main() -> None:
    """Answer one question with `LLM`; print the text, and store the sound as a WAV file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("question")
    parser.add_argument("--voice", default="ethan")
    parser.add_argument("--wav", default="reply.wav")
    args = parser.parse_args()

    llm = LLM(args.model, omni=True)
    [reply] = llm.chat([{"role": "user", "content": args.question}], voice=args.voice)
    print(reply.outputs[0].text)
    if reply.audio is None:
        print(f"no sound: {reply.error or reply.note}")
    else:
        soundfile.write(args.wav, reply.audio, reply.sample_rate)
        print(f"{len(reply.audio) / reply.sample_rate:.2f} s of sound: {args.wav}")
    llm.close()


if __name__ == "__main__":
    main()
