"""Stock vLLM loads a tiny BAGEL checkpoint and answers text as the reference does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.bagel_runs import golden
from vllm_omni_ext.model_plugins.bagel.tiny.bagel import write_bagel

pytestmark = pytest.mark.engine


def test_the_reply_to_a_text_is_the_references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    from vllm import LLM, SamplingParams

    info = golden("chat_fp32").info
    [prompt], [reply] = info["prompt_ids"][:1], info["generated_ids"]
    engine = LLM(
        str(write_bagel(tmp_path / "model")),
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 27,
        max_model_len=512,
        max_num_seqs=4,
    )
    try:
        greedy = SamplingParams(temperature=0, max_tokens=len(reply) - 1)
        [output] = engine.generate({"prompt_token_ids": [*prompt, reply[0]]}, greedy, use_tqdm=False)
    finally:
        engine.llm_engine.engine_core.shutdown()
    assert list(output.outputs[0].token_ids) == reply[1:]
