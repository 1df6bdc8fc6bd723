"""`LLM(MODEL, omni=True)` in a released shape: two spoken answers, then the end. Prints their defects."""

from __future__ import annotations

import sys

from vllm import LLM

FRAMES = 24
SAMPLES_A_FRAME = 1920


def main() -> None:
    with LLM(sys.argv[1], omni=True, load_format="dummy") as llm:
        messages = [{"role": "user", "content": "Why is the sky blue?"}]
        for _ in range(2):
            (reply,) = llm.chat(
                messages,
                max_tokens=16,
                ignore_eos=True,
                talker={"max_tokens": FRAMES, "min_tokens": FRAMES},
                use_tqdm=False,
                raise_on_error=True,
            )
            if len(tokens := reply.outputs[0].token_ids) != 16:
                print(f"DEFECT {len(tokens)} tokens of text")
            if not 0 < len(reply.audio) <= FRAMES * SAMPLES_A_FRAME:
                print(f"DEFECT {len(reply.audio)} samples")


if __name__ == "__main__":
    main()
