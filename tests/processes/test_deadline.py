"""A request that takes longer than the configured deadline ends with one clear error."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm import LLM, SamplingParams

from vllm_omni_ext.errors import RequestFailed

pytestmark = pytest.mark.engine

PROMPT = "<|im_start|>user\nTell me everything.<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("modalities", [["text"], ["text", "audio"]])
def test_deadline(tiny: Path, modalities: list[str]) -> None:
    endless = SamplingParams(max_tokens=1900, min_tokens=1900)
    with LLM(str(tiny), omni=True, max_model_len=2048, request_timeout_s=0.5) as omni:
        late, quick = omni.generate(
            [PROMPT, PROMPT], [endless, SamplingParams(max_tokens=1)], modalities=modalities, use_tqdm=False
        )
        assert isinstance(late.error, RequestFailed) and "request_timeout_s" in str(late.error)
        assert quick.error is None and len(quick.outputs[0].token_ids) == 1
        assert omni._omni.orchestrator.held() == 0
