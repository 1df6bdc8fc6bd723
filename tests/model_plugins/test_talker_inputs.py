"""Input embeddings and positions of the talker, built from ids, equal those of Transformers' talker."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)

from tests.support import media
from tests.support.media import Message
from tests.support.oracle import Oracle
from vllm_omni_ext.engine.input_provider import Span
from vllm_omni_ext.model_plugins.qwen3_omni.code_predictor import CodePredictor
from vllm_omni_ext.model_plugins.qwen3_omni.family import QWEN3_OMNI
from vllm_omni_ext.model_plugins.qwen3_omni.frames import FrameMaker
from vllm_omni_ext.model_plugins.qwen3_omni.prompt import SpecialIds
from vllm_omni_ext.model_plugins.qwen3_omni.runtime import Qwen3OmniRuntime
from vllm_omni_ext.model_plugins.qwen3_omni.talker_feed import TalkerInputProvider
from vllm_omni_ext.plugins.flow import Extend, Open, Produced
from vllm_omni_ext.plugins.runtime import Planned, Rendered, RequestOptions, RuntimeContext
from vllm_omni_ext.wire.envelope import HiddenStatesChunkReady
from vllm_omni_ext.wire.stage_input import EXPORT

TOLERANCE = 1e-5
SYSTEM: Message = {"role": "system", "content": "You are a voice."}
REPLY: Message = {"role": "assistant", "content": "One of many."}


def said(*content: Any) -> Message:
    parts = [{"type": "text", "text": each} if isinstance(each, str) else each for each in content]
    return {"role": "user", "content": parts if len(parts) > 1 else content[0]}


def image(width: int, height: int, seed: int) -> dict[str, Any]:
    return {"type": "image", "image": media.image(width, height, seed)}


def audio(seconds: float, seed: int) -> dict[str, Any]:
    return {"type": "audio", "audio": media.audio(seconds, seed)}


CONVERSATIONS: dict[str, list[Message]] = {
    "one turn": [said("hello world")],
    "turns": [SYSTEM, said("What is a replica?"), REPLY, said("And a stage?"), REPLY, said("Thanks!")],
    "two user turns in a row": [said("first"), said("second")],
    "audio in an earlier turn": [SYSTEM, said(audio(0.5, 1), "Who?"), REPLY, said("Sure?")],
    "audio, then images": [said("Listen:", audio(0.7, 3)), REPLY, said(image(64, 96, 4), "and", image(128, 64, 5))],
    "image and audio": [SYSTEM, said(image(96, 64, 1), audio(0.5, 2), "Which?")],
    "video": [said({"type": "video", "video": media.video(4, 64, 64, 6)}, "What?"), REPLY, said("Sure?")],
}


def feature(modality: str, offset: int, length: int, **data: torch.Tensor) -> MultiModalFeatureSpec:
    field = MultiModalBatchedField()
    item = MultiModalKwargsItem({name: MultiModalFieldElem(value, field) for name, value in data.items()})
    return MultiModalFeatureSpec(item, modality, f"{modality}{offset}", PlaceholderRange(offset, length))


def features_of(oracle: Oracle, inputs: dict[str, torch.Tensor]) -> list[MultiModalFeatureSpec]:
    """vLLM's description of the media that Transformers' processor returned."""
    thinker, ids = oracle.model.config.thinker_config, inputs["input_ids"][0].tolist()
    found: list[MultiModalFeatureSpec] = []
    kinds = {
        "audio": (
            thinker.audio_token_id,
            lambda i: {"audio_feature_lengths": inputs["feature_attention_mask"][i].sum()},
        ),
        "image": (thinker.image_token_id, lambda i: {"image_grid_thw": inputs["image_grid_thw"][i]}),
        "video": (
            thinker.video_token_id,
            lambda i: {
                "video_grid_thw": inputs["video_grid_thw"][i],
                "second_per_grid_ts": torch.as_tensor(inputs["video_second_per_grid"][i]),
            },
        ),
    }
    for kind, (token, data) in kinds.items():
        starts = [p for p, t in enumerate(ids) if t == token and ids[p - 1] != token]
        for i, start in enumerate(starts):
            stop = next(p for p in range(start, len(ids)) if ids[p] != token)
            found.append(feature(kind, start, stop - start, **data(i)))
    return found


class Weights:
    """The feeder's view of Transformers' weights."""

    def __init__(self, model: Any) -> None:
        talker = model.talker
        self.text_table = talker.text_projection(model.thinker.get_input_embeddings().weight)
        self.codec_eos = model.config.talker_config.codec_eos_token_id
        self.code_predictor = CodePredictor(talker.code_predictor.config)
        self.code_predictor.load_state_dict(talker.code_predictor.state_dict())
        self.codec_rows = talker.get_input_embeddings()
        self.frames = FrameMaker(self.code_predictor, self.codec_rows.weight.data, rows=1)
        self.project_hidden = talker.hidden_projection


class Heard:
    """One `generate`, with all inputs of thinker and talker recorded."""

    def __init__(self, oracle: Oracle, messages: list[Message], tokens: int, frames: int) -> None:
        model, self.fed, self.hidden, self.given, self.positions = oracle.model, [], [], {}, []
        inputs = oracle.inputs(messages)
        codes = model.config.talker_config.text_config.vocab_size
        talk, forward, think = model.talker.generate, model.talker.model.forward, model.thinker.generate

        def talked(**kwargs: Any) -> Any:
            self.given = kwargs
            self.result = talk(**kwargs)
            return self.result

        def stepped(*args: Any, **kwargs: Any) -> Any:
            out = forward(*args, **kwargs)
            self.fed.append(kwargs["inputs_embeds"][0])
            self.positions.append(kwargs["position_ids"][-3:, 0].long())
            self.hidden.append(out.last_hidden_state[0, -1])
            return out

        def thought(**kwargs: Any) -> Any:
            self.thinker = think(**kwargs)
            return self.thinker

        with (
            mock.patch.object(model.talker, "generate", talked),
            mock.patch.object(model.talker.model, "forward", stepped),
            mock.patch.object(model.thinker, "generate", thought),
        ):
            model.generate(
                **inputs,
                speaker="chelsie",
                thinker_max_new_tokens=tokens,
                thinker_eos_token_id=oracle.eos_ids,
                thinker_do_sample=False,
                talker_max_new_tokens=frames,
                talker_do_sample=False,
                talker_suppress_tokens=list(range(codes - 1024, codes)),  # the end too: it talks to the limit
                return_audio=True,
            )
        self.prompt = inputs["input_ids"][0].tolist()
        self.features = features_of(oracle, inputs)
        self.reply = self.thinker.sequences[0, len(self.prompt) :].tolist()

    def rows(self, layer: int, positions: list[int]) -> Tensor:
        """The thinker's hidden states of prompt positions."""
        return self.thinker.hidden_states[0][layer][0][positions]


def plan(oracle: Oracle, heard: Heard, text: Any) -> Planned:
    config, limits = oracle.model.config, dict.fromkeys(("thinker", "talker", "code2wav"), 10_000)
    context = RuntimeContext(
        hf_config=config, pipeline="qwen3_omni", frontend="thinker", chunks=QWEN3_OMNI.chunks(), limits=limits
    )
    options = RequestOptions(
        modalities=("text", "audio"), fields={"voice": "chelsie"}, chunks={"text": text, "frames": "all"}
    )
    request = Rendered(prompt=heard.prompt, features=heard.features)
    return Qwen3OmniRuntime(context).plan(request, options)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("text", ["all", [1, 3]], ids=str)
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_the_inputs_of_the_talker_are_those_of_transformers(oracle: Oracle, name: str, text: Any) -> None:
    steps = 14
    heard = Heard(oracle, CONVERSATIONS[name], tokens=10, frames=steps)
    planned = plan(oracle, heard, text)
    multimodal = SpecialIds.of(oracle.model.config).multimodal
    mixed = [p for p, token in enumerate(heard.prompt) if token in multimodal]
    assert [p for a, b in planned.frontend_args.get(EXPORT, ()) for p in range(a, b)] == mixed
    assert planned.skip_prefix_cache == bool(mixed)
    input_provider = TalkerInputProvider(Weights(oracle.model), device=torch.device("cpu"))
    rows = heard.rows(oracle.model.config.talker_config.accept_hidden_layer, mixed) if mixed else None
    ready = HiddenStatesChunkReady(source="tcp://a", name="0/r", first=0, count=len(mixed)) if mixed else None
    for i, token in enumerate(heard.reply):
        end = i == len(heard.reply) - 1
        for action in planned.flow.handle(Produced("thinker", (token,), None if i else ready, "stop" if end else None)):
            _carry_out(input_provider, action, rows)
    expected, track = heard.given["inputs_embeds"][0], heard.given["trailing_text_hidden"][0]
    length = expected.shape[0]
    torch.testing.assert_close(input_provider.rows([Span("a", 0, length)]), expected, atol=TOLERANCE, rtol=0)
    assert input_provider.positions("a", length)[0].tolist() == heard.positions[0].tolist()
    request = input_provider._requests["a"]
    assert len(request.track) == len(track)
    torch.testing.assert_close(input_provider._model.text_table[request.track], track, atol=TOLERANCE, rtol=0)
    for step in range(steps - 1):  # the text runs out on the way: then the fill is fed
        code = heard.result.sequences[0, step].item()
        input_provider.sampled(["a"], [[code]], heard.hidden[step][None])
        got = input_provider.rows([Span("a", length + step, 1)])
        torch.testing.assert_close(got, heard.fed[step + 1], atol=TOLERANCE, rtol=0)
    assert len(track) < steps - 1


def _carry_out(provider: TalkerInputProvider, action: Any, hidden: Any) -> None:
    match action:
        case Open():
            provider.open("a", action.payload, action.hidden_spans, SimpleNamespace(temperature=0.0, seed=None))
            if hidden is not None:
                assert action.hidden_states.count == len(hidden)
                provider.add_hidden_states("a", hidden)
        case Extend():
            provider.extend("a", action.payload)
        case _:
            raise AssertionError(action)
