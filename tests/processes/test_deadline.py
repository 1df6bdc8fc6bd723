"""A request that takes longer than `request_timeout_s` ends with one clear error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, SamplingParams

from vllm_omni_ext.errors import RequestFailed
from vllm_omni_ext.model_plugins.qwen3_omni.http import OPENING
from vllm_omni_ext.model_plugins.qwen_omni.speech import rendered
from vllm_omni_ext.plugins.runtime import RequestOptions
from vllm_omni_ext.serving.served import ServedModel

pytestmark = pytest.mark.engine

PROMPT = "<|im_start|>user\nTell me everything.<|im_end|>\n<|im_start|>assistant\n"
ENDLESS = SamplingParams(max_tokens=1900, min_tokens=1900)


@pytest.fixture(scope="module")
def omni(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    config = tmp_path_factory.mktemp("config") / "stages.yaml"
    config.write_text("timeouts: {request_timeout_s: 1.0}")
    with LLM(str(tiny), omni=True, max_model_len=2048, stage_config=str(config)) as started:
        yield started


def test_only_the_request_that_takes_too_long_fails(omni: Any) -> None:
    late, quick = omni.generate([PROMPT, PROMPT], [ENDLESS, SamplingParams(max_tokens=1)], use_tqdm=False)
    assert isinstance(late.error, RequestFailed) and "request_timeout_s" in str(late.error)
    assert quick.error is None and len(quick.outputs[0].token_ids) == 1
    assert omni._omni.orchestrator.held() == 0


def test_a_text_that_is_read_aloud_too_long_fails(omni: Any) -> None:
    """As for `/v1/audio/speech`: no stage that writes text takes part."""
    options = RequestOptions(modalities=("audio",), fields={"voice": "ethan"}, params={"talker": ENDLESS})

    async def read() -> list[Any]:
        request = await rendered("on and on " * 50, ServedModel(omni._omni), OPENING)
        return [piece async for piece in omni._omni.start(request, options, "speech")]

    with pytest.raises(RequestFailed, match="request_timeout_s"):
        omni._run(read())
    assert omni._omni.orchestrator.held() == 0
