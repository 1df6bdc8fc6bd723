"""Text from the single stage through all of vLLM: its processor, engine, detokenizer and stops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.support.bagel_runs import golden, picture
from vllm_omni_ext.model_plugins.bagel.family import ALL
from vllm_omni_ext.model_plugins.bagel.generate import generate_text
from vllm_omni_ext.model_plugins.bagel.model import Bagel
from vllm_omni_ext.model_plugins.bagel.prompts import Part
from vllm_omni_ext.plugins.spec import resolve
from vllm_omni_ext.runtime.launch.inherit import compute_threads

pytestmark = pytest.mark.engine

TOKENS = 12
PROMPTS: dict[str, list[Part]] = {
    "chat": golden("chat_fp32").parts,
    "understand": golden("understand_fp32").parts,
    "two pictures": [picture(40, 160, 3), "and", picture(300, 200, 2), "Which one is larger?"],
    "picture at the end": ["What is it?", picture(48, 48, 1)],
}


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[Any]:
    """An engine process with the stage's own arguments."""
    from vllm import LLM, ModelRegistry

    with pytest.MonkeyPatch.context() as patch, compute_threads(1):  # an earlier test may have computed with more
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        patch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")  # the engine knows the registered class
        for architecture, name in ALL.models.items():
            ModelRegistry.register_model(architecture, name)
        arguments = {**ALL.engine_defaults, **ALL.engine, "hf_overrides": resolve(ALL.engine["hf_overrides"])}
        made = LLM(str(checkpoint), dtype="float32", kv_cache_memory_bytes=1 << 24, **arguments)
        yield made
        made.llm_engine.engine_core.shutdown()


def prompt_of(parts: Sequence[Part], model: Bagel) -> dict[str, Any]:
    pad = model.tokens._id("<|image_pad|>")
    ids = [id_ for part in parts for id_ in (model.tokens.text(part) if isinstance(part, str) else [pad])]
    pictures = [part for part in parts if isinstance(part, Image.Image)]
    prompt: dict[str, Any] = {"prompt_token_ids": [*ids, model.tokens.start]}
    return {**prompt, "multi_modal_data": {"image": pictures}} if pictures else prompt


def replies(llm: Any, model: Bagel, names: Sequence[str], **given: Any) -> list[Any]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=TOKENS, **given)
    return [each.outputs[0] for each in llm.generate([prompt_of(PROMPTS[n], model) for n in names], params)]


def test_replies_are_those_of_the_model(llm: Any, model: Bagel) -> None:
    """The second time, vLLM's cache of processed pictures has the pictures."""
    for _ in range(2):
        for name, found in zip(PROMPTS, replies(llm, model, list(PROMPTS)), strict=True):
            assert found.text == generate_text(model, PROMPTS[name], max_tokens=TOKENS + 1)
            assert found.finish_reason == "length"


def test_a_stop_string(llm: Any, model: Bagel) -> None:
    [whole] = replies(llm, model, ["chat"])
    stop = whole.text[3:5]
    [found] = replies(llm, model, ["chat"], stop=[stop])
    assert (found.text, found.finish_reason) == (whole.text[: whole.text.index(stop)], "stop")


def test_a_chat_with_a_picture_is_rendered(llm: Any, model: Bagel) -> None:
    url = "data:image/png;base64," + _png(PROMPTS["understand"])
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": PROMPTS["understand"][1]}]
    template = (
        "{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}<|im_start|>{{ p.text }}<|im_end|>"
        "{% else %}<|image_pad|>{% endif %}{% endfor %}{% endfor %}<|im_start|>"
    )
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=TOKENS)
    [found] = llm.chat([{"role": "user", "content": content}], params, chat_template=template)
    assert found.outputs[0].text == generate_text(model, PROMPTS["understand"], max_tokens=TOKENS + 1)


def _png(parts: Sequence[Part]) -> str:
    import base64
    import io

    found = io.BytesIO()
    source = parts[0]
    assert isinstance(source, Image.Image)
    source.save(found, "png")
    return base64.b64encode(found.getvalue()).decode()
