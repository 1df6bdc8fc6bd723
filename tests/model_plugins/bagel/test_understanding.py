"""Parts of the stage `ar` without an engine: positions, names of tensors, attention's pieces, configs, the template."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_omni_ext.model_plugins.bagel.checkpoint import checkpoint_sizes, model_sources
from vllm_omni_ext.model_plugins.bagel.family import FAMILY
from vllm_omni_ext.model_plugins.bagel.sizes import CheckpointError
from vllm_omni_ext.model_plugins.bagel.stages import hf_configs
from vllm_omni_ext.model_plugins.bagel.stages.picture_attention import Piece, divided
from vllm_omni_ext.model_plugins.bagel.stages.scheduler import tokens_before_a_part
from vllm_omni_ext.model_plugins.bagel.stages.understanding import BagelUnderstanding, checked
from vllm_omni_ext.plugins.registry import family_chat_template

PICTURE = {"type": "image"}
LAYER = "language_model.model.layers.1.self_attn.q_norm.weight"


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def test_a_picture_has_one_position() -> None:
    places = [SimpleNamespace(mm_position=SimpleNamespace(offset=at, length=size)) for at, size in ((1, 4), (5, 3))]
    model: Any = None
    positions, delta = BagelUnderstanding.get_mrope_input_positions(model, [7] * 10, places)
    assert positions.tolist() == [[0, 1, 1, 1, 1, 2, 2, 2, 3, 4]] * 3
    assert delta == -5


@pytest.mark.parametrize(
    ("length", "stop", "ranges", "pieces"),
    [
        (10, 10, [(2, 5)], [(2, 2, True), (4, 6, False), (4, 10, True)]),
        (10, 10, [(0, 3), (4, 9)], [(4, 4, False), (6, 10, False)]),
        (4, 12, [(2, 5)], [(4, 12, True)]),
        (4, 6, [(4, 9)], [(2, 4, True), (2, 6, False)]),
        (6, 10, [(2, 5), (8, 9)], [(2, 6, False), (2, 8, True), (2, 10, False)]),
        (1, 11, [(2, 5)], [(1, 11, True)]),
        (3, 3, [], [(3, 3, True)]),
        (0, 0, [], [(0, 0, True)]),
    ],
)
def test_pieces_of_a_step(length: int, stop: int, ranges: list[Any], pieces: list[Any]) -> None:
    assert list(divided([length], [stop], {0: ranges})) == [Piece(0, *piece) for piece in pieces]


def test_pieces_of_several_sequences() -> None:
    found = list(divided([2, 3, 1], [2, 3, 9], {1: [(0, 1)], 2: [(0, 3)]}))
    assert found == [Piece(0, 2, 2, True), Piece(1, 2, 2, False), Piece(1, 1, 3, True), Piece(2, 1, 9, True)]


def test_a_step_divides_no_picture() -> None:
    for computed, new, fitting in (
        *((0, 1, 0), (0, 4, 0), (0, 5, 5), (0, 7, 7), (0, 8, 7)),
        *((5, 3, 2), (7, 3, 0), (7, 4, 4), (9, 1, 0), (9, 2, 2), (11, 1, 1)),
    ):
        assert tokens_before_a_part([(0, 5), (7, 4)], computed, new) == fitting, (computed, new)


@pytest.fixture
def names(checkpoint: Path) -> set[str]:
    """All tensors of both files of a checkpoint, of the autoencoder only two."""
    sources = model_sources(checkpoint_sizes(checkpoint))
    return {name for each in sources.values() for name in each} | {"encoder.conv_in.weight", "decoder.conv_in.bias"}


def loaded(checkpoint: Path, names: set[str]) -> set[str]:
    return {name for name, _ in checked(((name, torch.empty(0)) for name in names), checkpoint_sizes(checkpoint))}


def test_only_the_weights_for_reading_are_loaded(checkpoint: Path, names: set[str]) -> None:
    found = loaded(checkpoint, names)
    assert "vit_pos_embed.pos_embed" in found
    assert not [name for name in found if "moe_gen" in name or "vae" in name or "latent" in name or "time" in name]
    assert not [name for name in found if name.startswith(("encoder.", "decoder."))]


@pytest.mark.parametrize(
    ("gone", "more", "reason"),
    [
        ({"connector.fc1.bias"}, set(), r"1 missing tensors: connector\.fc1\.bias"),
        ({LAYER}, set(), rf"1 missing tensors: {LAYER}"),
        (set(), {"vit_model.head.weight"}, r"1 unknown tensors: vit_model\.head\.weight"),
    ],
)
def test_a_missing_or_unknown_tensor_is_named(
    gone: set[str], more: set[str], reason: str, checkpoint: Path, names: set[str]
) -> None:
    with pytest.raises(CheckpointError, match=reason):
        loaded(checkpoint, names - gone | more)


@pytest.mark.parametrize(
    ("override", "architecture"),
    [(hf_configs.ar, "BagelUnderstanding"), (hf_configs.dit, "BagelDit"), (hf_configs.single, "BagelSingle")],
)
def test_configs_of_the_stages(override: Any, architecture: str, checkpoint: Path) -> None:
    from transformers import PretrainedConfig
    from vllm.transformers_utils.config import get_config

    dummy = PretrainedConfig()
    assert override(dummy) is dummy
    assert dummy.architectures is None
    config = override(get_config(str(checkpoint), trust_remote_code=False))
    assert config.architectures == [architecture]
    assert config.llm_config.rope_parameters.get("mrope_section") == ([16, 0, 0] if override is hf_configs.ar else None)
    declared = {name for pipeline in FAMILY.pipelines for stage in pipeline.stages for name in stage.models}
    assert architecture in declared


def rendered(messages: list[dict[str, Any]], **given: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    template = family_chat_template(FAMILY)
    [[found], *_] = render_jinja_template(conversations=[messages], chat_template=template, **given)
    return str(found)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("hello", "<hello>"),
        ("  two\nlines\n\n", "<  two\nlines\n\n>"),
        ([PICTURE, text("a")], "@<a>"),
        ([text("a"), PICTURE, PICTURE, text("b")], "<a>@@<b>"),
        ([text("a "), text("b"), PICTURE], "<a b>@"),
        ([text(""), PICTURE, text("")], "@"),
        ("", ""),
        (None, ""),
    ],
)
def test_the_template_of_a_message(content: Any, expected: str) -> None:
    marks = {"<": "<|im_start|>", ">": "<|im_end|>", "@": "<|image_pad|>"}
    assert rendered([{"role": "user", "content": content}]) == "".join(marks.get(each, each) for each in expected)


def test_the_template_of_a_conversation() -> None:
    turns = [("system", "s"), ("user", [PICTURE, text("u")]), ("assistant", "a"), ("user", "v")]
    messages = [{"role": role, "content": content} for role, content in turns]
    expected = (
        "<|im_start|>s<|im_end|><|image_pad|><|im_start|>u<|im_end|><|im_start|>a<|im_end|><|im_start|>v<|im_end|>"
    )
    assert rendered(messages) == expected
    assert rendered(messages, add_generation_prompt=True) == f"{expected}<|im_start|>"


def test_the_template_refuses_tools() -> None:
    with pytest.raises(Exception, match="tools: this model calls no tools"):
        rendered([{"role": "user", "content": "a"}], tools=[{"type": "function", "function": {"name": "f"}}])
