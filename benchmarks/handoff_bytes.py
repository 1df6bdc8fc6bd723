"""Bytes that pass from the thinker to the talker for each token of a text-only prompt's spoken answer.

Counted are the very requests and chunks the talker's replica gets, encoded as vLLM encodes them on its socket.

    python benchmarks/handoff_bytes.py [MODEL] [--tokens 200]
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from checkpoint import checkpoint, parser
from vllm import LLM, SamplingParams
from vllm.v1.serial_utils import MsgpackEncoder

from vllm_omni_ext.ids import ReplicaId

TALKER = ReplicaId("talker", 0)
QUESTION = [{"role": "user", "content": "Tell me about the blue cat in the moon"}]
SHORTEST = 2  # tokens of the shortest reply that is spoken


@contextmanager
def sent_to(omni: Any, target: ReplicaId) -> Iterator[list[int]]:
    """Encoded sizes in bytes of the requests and chunks that a replica gets inside the block."""
    replica = omni._omni.orchestrator.replicas[target]
    add, sizes, encoder = replica.add, [], MsgpackEncoder()

    async def counting(request: Any) -> None:
        sizes.append(sum(memoryview(part).nbytes for part in encoder.encode(request)))
        await add(request)

    replica.add = counting
    try:
        yield sizes
    finally:
        del replica.add


def measure(omni: Any, tokens: int) -> list[int]:
    """Sizes of the messages of a reply of exactly `tokens` tokens."""
    sampling = {
        "thinker": SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True),
        "talker": SamplingParams(temperature=0, max_tokens=8),
    }
    with sent_to(omni, TALKER) as sizes:
        (output,) = omni.chat(QUESTION, sampling, use_tqdm=False)
    if output.error is not None:
        raise output.error
    return sizes


def main() -> None:
    """Measure once and print."""
    flags = parser(__doc__ or "")
    flags.add_argument("--tokens", type=int, default=200, help="thinker tokens of the longer reply")
    args = flags.parse_args()
    with checkpoint(args.model) as model, LLM(model, omni=True, max_model_len=args.tokens + 512) as omni:
        least, most = measure(omni, SHORTEST), measure(omni, args.tokens)
        hidden = omni.model_config.hf_config.thinker_config.text_config.hidden_size
        chunking = omni.plan.config.async_chunk
    each = (sum(most) - sum(least)) / (args.tokens - SHORTEST)
    print(f"async_chunk: {chunking}")
    print(f"{SHORTEST} tokens: {sum(least)} bytes in {len(least)} messages (what every request costs)")
    print(f"{args.tokens} tokens: {sum(most)} bytes in {len(most)} messages")
    print(f"{each:.1f} bytes a token; one hidden row of this model in bfloat16 would be {2 * hidden}")


if __name__ == "__main__":
    main()
