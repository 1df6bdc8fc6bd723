"""What a request is said to need is what it holds."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.bagel_runs import picture
from vllm_omni_ext.model_plugins.bagel import memory
from vllm_omni_ext.model_plugins.bagel.context import Context
from vllm_omni_ext.model_plugins.bagel.denoise import begin
from vllm_omni_ext.model_plugins.bagel.model import Bagel
from vllm_omni_ext.model_plugins.bagel.parameters import image_parameters
from vllm_omni_ext.model_plugins.bagel.prompts import Part, Prompts
from vllm_omni_ext.model_plugins.bagel.sizes import RELEASED

REQUESTS: list[tuple[list[Part], dict[str, Any]]] = [
    (["a red cat"], {"height": 48, "width": 64}),
    (["a red cat"], {"height": 48, "width": 64, "cfg_text_scale": 1.0}),
    (["a", "b"], {"height": 48, "width": 64, "cfg_img_scale": 2.0}),
    ([picture(60, 80, 1), "blue"], {}),
    (["x", picture(90, 33, 1), picture(50, 50, 2), "blue"], {}),
]


def held(contexts: list[Context]) -> int:
    """Bytes of all keys and values that these contexts hold, shared ones once."""
    seen: dict[int, int] = {}
    for context in contexts:
        link: Context | None = context
        while link is not None:
            seen[id(link)] = sum(key.nbytes + value.nbytes for key, value in link.layers)
            link = link.before
    return sum(seen.values())


def test_the_released_model_has_56_kib_a_token() -> None:
    assert memory.kv_bytes_per_token(RELEASED.llm, 2) == 56 * 1024


def test_the_released_model_editing_a_square_picture() -> None:
    assert memory.picture_tokens(RELEASED, 1024, 1024, latents=True) == 4098 + 4902
    assert memory.image_tokens(RELEASED, 1024, 1024) == 4098


@pytest.mark.parametrize(("parts", "given"), REQUESTS)
def test_context_and_rows(parts: list[Part], given: dict[str, Any], model: Bagel, prompts: Prompts) -> None:
    edit = any(not isinstance(part, str) for part in parts)
    parameters = image_parameters({**given, "num_timesteps": 3}, edit=edit)
    plan = prompts.image(parts)
    running = begin(model, plan, parameters)
    branches = memory.branches_of(plan, parameters)
    assert memory.context_bytes(model.sizes.llm, branches, 4) == held(list(running.branches.values()))
    tokens = running.places.shape[0] + 2
    assert memory.row_tokens(model.sizes, parameters, running.size) == len(running.branches) * tokens
    assert memory.latent_bytes(model.sizes, running.size) == running.latent.nbytes


@pytest.mark.parametrize("size", [(58, 74), (300, 20), (1, 1), (96, 96)])
def test_tokens_of_a_picture_before_it_is_read(size: tuple[int, int], model: Bagel, prompts: Prompts) -> None:
    edit, look = prompts.image([picture(*size, 1)]), prompts.reply([picture(*size, 1)])
    expected = sum(each.length for each in edit.cond)
    assert memory.picture_tokens(model.sizes, *size, latents=True) == expected
    assert memory.picture_tokens(model.sizes, *size, latents=False) == sum(each.length for each in look)
