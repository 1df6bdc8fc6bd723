"""Counts bytes between thinker and talker: for each token of an answer to text, and for a prompt with sound.

It counts the bytes through the API server, and those over the connector, which transfers hidden states directly. The
bytes through the API server are the notices in the thinker's outputs (where hidden states are stored), and the requests
and chunks to the talker's replica, encoded as vLLM encodes them on its socket.

    python benchmarks/handoff_bytes.py [MODEL] [--tokens 200] [--seconds 10] [--connector shared_memory]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from checkpoint import checkpoint, parser
from vllm import LLM, SamplingParams
from vllm.v1.serial_utils import MsgpackEncoder

from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.orchestrator import orchestrator
from vllm_omni_ext.wire.envelope import HiddenStatesChunkReady, unpack

TALKER = ReplicaId("talker", 0)
QUESTION = [{"role": "user", "content": "Tell me about the blue cat in the moon"}]
SHORTEST = 2  # tokens of the shortest reply that is spoken
SAMPLE_RATE_HZ = 16_000
PLACEHOLDERS = "<|audio_start|><|audio_pad|><|audio_end|>"


@dataclass
class Passed:
    """Traffic of the API server between thinker and talker.

    Attributes:
        messages: bytes of each message to the talker.
        notices: bytes of each notice from the thinker that it has stored hidden states.
        hidden_states: number of hidden states that the notices announce.
    """

    messages: list[int] = field(default_factory=list)
    notices: list[int] = field(default_factory=list)
    hidden_states: int = 0


@contextmanager
def sent_to(omni: Any, target: ReplicaId) -> Iterator[list[int]]:
    """Yield a list of the sizes, in bytes, of all encoded requests and chunks that a replica gets inside the block."""
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


@contextmanager
def passed(omni: Any) -> Iterator[Passed]:
    """Yield the traffic of the API server between thinker and talker inside the block."""
    found = Passed()

    def looking(tensor: Any) -> Any:
        message = unpack(tensor)
        if isinstance(message, HiddenStatesChunkReady):
            found.notices.append(tensor.nbytes)
            found.hidden_states += message.count
        return message

    orchestrator.unpack = looking
    try:
        with sent_to(omni, TALKER) as found.messages:
            yield found
    finally:
        orchestrator.unpack = unpack


def sampling(tokens: int) -> dict[str, SamplingParams]:
    """Return sampling parameters by stage for an answer of exactly `tokens` tokens and a short sound."""
    thinker = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return {"thinker": thinker, "talker": SamplingParams(temperature=0, max_tokens=8)}


def measure(omni: Any, tokens: int) -> list[int]:
    """Return the bytes of each message to the talker for a reply of exactly `tokens` tokens."""
    with passed(omni) as found:
        (output,) = omni.chat(QUESTION, sampling(tokens), use_tqdm=False)
    if output.error is not None:
        raise output.error
    return found.messages


def with_sound(omni: Any, seconds: float) -> tuple[Passed, float]:
    """Send a prompt with `seconds` of sound; return (traffic, seconds to the end of an answer of the least length)."""
    sound = np.random.default_rng(0).standard_normal(int(seconds * SAMPLE_RATE_HZ)).astype(np.float32)
    prompt = {
        "prompt": f"<|im_start|>user\n{PLACEHOLDERS}What is it?<|im_end|>\n<|im_start|>assistant\n",
        "multi_modal_data": {"audio": [(sound, SAMPLE_RATE_HZ)]},
    }
    began = time.perf_counter()
    with passed(omni) as found:
        (output,) = omni.generate(prompt, sampling(SHORTEST), use_tqdm=False)
    if output.error is not None:
        raise output.error
    return found, time.perf_counter() - began


def main() -> None:
    """Run this benchmark from the command line, and print its results."""
    flags = parser(__doc__ or "")
    flags.add_argument("--tokens", type=int, default=200, help="thinker tokens of the longer reply")
    flags.add_argument("--seconds", type=float, default=10.0, help="of sound in a prompt")
    flags.add_argument("--connector", default="shared_memory")
    args = flags.parse_args()
    connectors = {"hidden_states": {"name": args.connector}}
    with (
        checkpoint(args.model) as model,
        LLM(model, omni=True, max_model_len=args.tokens + 2048, connectors=connectors) as omni,
    ):
        least, most = measure(omni, SHORTEST), measure(omni, args.tokens)
        width = omni.model_config.hf_config.thinker_config.text_config.hidden_size
        itemsize = omni.model_config.dtype.itemsize
        runs = [with_sound(omni, args.seconds) for _ in range(5)]
        chunking = omni.plan.config.async_chunk
    each = (sum(most) - sum(least)) / (args.tokens - SHORTEST)
    print(f"async_chunk: {chunking}, {args.connector}")
    print(f"{SHORTEST} tokens: {sum(least)} bytes in {len(least)} messages (what every request costs)")
    print(f"{args.tokens} tokens: {sum(most)} bytes in {len(most)} messages")
    print(f"{each:.1f} bytes a token; one hidden row of this model would be {width * itemsize}")
    found, took = runs[-1][0], statistics.median(seconds for _, seconds in runs)
    beside = found.hidden_states * width * itemsize
    print(f"{args.seconds:g} s of sound: {found.hidden_states} hidden states,")
    print(f"  in {took:.3f} s from the prompt to the end of a short answer")
    print(f"  through the API server: {sum(found.notices)} bytes in {len(found.notices)} notices from the thinker,")
    print(f"    {sum(found.messages)} bytes in {len(found.messages)} messages to the talker")
    print(f"  over the connector: {beside} bytes; as many would pass through the API server twice without it")


if __name__ == "__main__":
    main()
