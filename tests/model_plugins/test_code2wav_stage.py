"""The code2wav stage as a stock vLLM engine: its own process, reached through vLLM's own client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from tests.support.vocoder_reference import check_equal, expected, header, random_codes, refusal
from vllm_omni_ext.model_plugins.qwen3_omni import hf_configs
from vllm_omni_ext.wire.stage_input import FILLER, PartHeader

pytestmark = pytest.mark.engine

ANSWER_TIMEOUT_S = 60.0
MAX_FRAMES = 4096
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


Part = tuple[str, PartHeader, list[int]]
"""Request id, header and prompt."""


@dataclass
class Stage:
    """A running engine: what a client needs to reach it, and Transformers' decoder of the same checkpoint."""

    config: Any
    executor: type
    listeners: Any
    reference: Qwen3OmniMoeCode2Wav

    async def ask(self, parts: list[Part]) -> dict[str, Tensor]:
        """Send all parts at once; return the answer of each. The engine has one client, so this can be done once."""
        from vllm.pooling_params import PoolingParams
        from vllm.v1.engine import EngineCoreRequest

        from vllm_omni_ext.model_plugins.qwen3_omni.code2wav import POOLING_TASK

        client = self._client()
        try:
            assert list(await client.get_supported_tasks_async()) == [POOLING_TASK]
            for request_id, part_header, prompt in parts:
                request = EngineCoreRequest(
                    request_id=request_id,
                    prompt_token_ids=prompt,
                    mm_features=None,
                    sampling_params=None,
                    pooling_params=PoolingParams(task=POOLING_TASK, extra_kwargs=part_header.as_extra()),
                    arrival_time=time.time(),
                    lora_request=None,
                    cache_salt=None,
                    data_parallel_rank=None,
                )
                await client.add_request_async(request)
            waves: dict[str, Tensor] = {}
            while len(waves) < len(parts):
                outputs = await asyncio.wait_for(client.get_output_async(), ANSWER_TIMEOUT_S)
                for output in outputs.outputs:
                    assert output.finished
                    assert output.request_id not in waves
                    waves[output.request_id] = output.pooling_output
            return waves
        finally:
            client.shutdown()

    def _client(self) -> Any:
        from vllm.v1.engine.core_client import AsyncMPClient

        addresses = {
            "input_address": self.listeners.inputs[0].address,
            "output_address": self.listeners.outputs[0].address,
            "input_listener": self.listeners.inputs[0].socket,
            "output_listener": self.listeners.outputs[0].socket,
        }
        return AsyncMPClient(self.config, self.executor, True, client_addresses=addresses)


def load_reference(checkpoint: Path) -> Qwen3OmniMoeCode2Wav:
    model = Qwen3OmniMoeCode2Wav(AutoConfig.from_pretrained(checkpoint).code2wav_config).eval()
    tensors = load_file(checkpoint / "model.safetensors")
    prefix = "code2wav."
    model.load_state_dict({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
    return model.float()


@pytest.fixture(scope="module")
def stage(tiny: Path) -> Iterator[Stage]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.utils import bind_engine_zmq_listeners, launch_core_engines
    from vllm.v1.executor import Executor

    reference = load_reference(tiny)
    with pytest.MonkeyPatch.context() as environment:
        for name, value in ENVIRONMENT.items():
            environment.setenv(name, value)
        capacity = MAX_FRAMES * reference.config.num_quantizers
        config = AsyncEngineArgs(
            model=str(tiny),
            runner="pooling",
            hf_overrides=hf_configs.code2wav,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            enforce_eager=True,
            dtype="float32",
            max_model_len=capacity,
            max_num_batched_tokens=capacity,
            max_num_seqs=8,
            kv_cache_memory_bytes=1 << 24,
        ).create_engine_config()
        executor = Executor.get_class(config)
        listeners = bind_engine_zmq_listeners(config, 1)
        with launch_core_engines(config, executor, True, listeners.addresses) as launched:
            pass
        try:
            yield Stage(config, executor, listeners, reference)
        finally:
            launched.engine_manager.shutdown()


def whole(prompts: dict[str, list[int]]) -> list[Part]:
    return [(name, header(name, 0, last=True), prompt) for name, prompt in prompts.items()]


def streamed(streams: dict[str, Tensor]) -> list[Part]:
    """Stream n in parts of n + 1 frames, then an end without frames: first part 0 of each, then part 1, and so on."""
    parts: list[tuple[int, Part]] = []
    for n, (name, frames) in enumerate(streams.items()):
        chunks = frames.split(n + 1)
        for number, chunk in enumerate(chunks):
            part_header = header(name, number, last=False)
            parts.append((number, (f"{name}/{number}", part_header, chunk.flatten().tolist())))
        end = header(name, len(chunks), last=True, empty=True)
        parts.append((len(chunks), (f"{name}/{len(chunks)}", end, FILLER)))
    return [part for _, part in sorted(parts, key=lambda numbered: numbered[0])]


async def test_waveforms_equal_transformers(stage: Stage) -> None:
    """Whole utterances, one of them of the longest allowed length; eight streams, parts of one sharing steps because
    more wait than a step takes; and prompts that cannot be decoded."""
    config = stage.reference.config
    codes = {f"{n} frames": random_codes(config, n, seed=n) for n in (1, 40, 300, 301, MAX_FRAMES)}
    streams = {f"stream {n}": random_codes(config, 5 + 7 * n, seed=n) for n in range(8)}
    prompts = {name: frames.flatten().tolist() for name, frames in codes.items()}
    broken = {"half a frame": prompts["40 frames"][:-1], "no such code": [config.codebook_size] * config.num_quantizers}
    parts = streamed(streams)
    half = len(parts) // 2
    waves = await stage.ask([*parts[:half], *whole(prompts | broken), *parts[half:]])
    for name, frames in codes.items():
        check_equal(waves[name], expected(stage.reference, frames))
        assert waves[name].std() > 0.01
    for name, frames in streams.items():
        mine = [waves[request_id] for request_id, part_header, _ in parts if part_header.stream == name]
        check_equal(torch.cat(mine), expected(stage.reference, frames))
    assert all(refusal(waves[name]) for name in broken)
    assert waves["1 frames"].device == torch.device("cpu")
