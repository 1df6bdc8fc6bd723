"""What the talker is fed, built from ids, equals what Transformers feeds its talker from hidden states."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.support import media
from tests.support.media import Message
from tests.support.oracle import Oracle
from vllm_omni_ext.connectors.chunks import ChunkSchedule
from vllm_omni_ext.engine.input_provider import Span
from vllm_omni_ext.model_plugins.qwen3_omni.code_predictor import CodePredictor
from vllm_omni_ext.model_plugins.qwen3_omni.flow import SpeechFlow, SpeechPlan
from vllm_omni_ext.model_plugins.qwen3_omni.frames import FrameMaker
from vllm_omni_ext.model_plugins.qwen3_omni.prompt import SpecialIds, find_parts
from vllm_omni_ext.model_plugins.qwen3_omni.talker_feed import TalkerInputProvider
from vllm_omni_ext.plugins.flow import Extend, Open, Produced
from vllm_omni_ext.wire.envelope import HiddenStatesChunkReady

TOLERANCE = 1e-5
SYSTEM: Message = {"role": "system", "content": "You are a voice."}
REPLY: Message = {"role": "assistant", "content": "One of many."}


def said(*content: Any) -> Message:
    return {"role": "user", "content": list(content) if len(content) > 1 else content[0]}


CONVERSATIONS: dict[str, list[Message]] = {
    "one turn": [said("hello world")],
    "system": [SYSTEM, said("Say something nice.")],
    "turns": [SYSTEM, said("What is a replica?"), REPLY, said("And a stage?"), REPLY, said("Thanks!")],
    "two user turns in a row": [said("first"), said("second")],
    "sound in an earlier turn": [
        SYSTEM,
        said({"type": "audio", "audio": media.audio(0.5, 1)}, {"type": "text", "text": "Who?"}),
        REPLY,
        said("Sure?"),
    ],
    "pictures": [
        said(
            {"type": "image", "image": media.image(64, 96, 2)},
            {"type": "text", "text": "and"},
            {"type": "image", "image": media.image(96, 64, 3)},
        )
    ],
}


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
    """One `generate` with everything that passes between thinker and talker taken down."""

    def __init__(self, oracle: Oracle, messages: list[Message], tokens: int, frames: int) -> None:
        model, self.fed, self.hidden, self.given = oracle.model, [], [], {}
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
        self.reply = self.thinker.sequences[0, len(self.prompt) :].tolist()

    def rows(self, layer: int, positions: list[int]) -> Tensor:
        """The thinker's hidden states of prompt positions."""
        return self.thinker.hidden_states[0][layer][0][positions]


@torch.no_grad()
@pytest.mark.parametrize("text", [ChunkSchedule(), ChunkSchedule((1, 3))], ids=["whole", "chunks"])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_the_talker_is_fed_what_transformers_feeds_it(oracle: Oracle, name: str, text: ChunkSchedule) -> None:
    steps = 14
    heard = Heard(oracle, CONVERSATIONS[name], tokens=10, frames=steps)
    ids, config = SpecialIds.of(oracle.model.config), oracle.model.config.talker_config
    parts = find_parts(heard.prompt, ids)
    assert parts is not None
    flow = SpeechFlow(
        SpeechPlan(prompt=heard.prompt, parts=parts, voice="chelsie", ids=ids, sample_rate=24_000),
        text=text,
        frames=ChunkSchedule(),
    )
    input_provider = TalkerInputProvider(Weights(oracle.model), device=torch.device("cpu"))
    mixed = [p for a, b in parts.multimodal for p in range(a, b)]
    rows = heard.rows(config.accept_hidden_layer, mixed) if mixed else None
    ready = HiddenStatesChunkReady(source="tcp://a", name="0/r", first=0, count=len(mixed)) if mixed else None
    for i, token in enumerate(heard.reply):
        end = i == len(heard.reply) - 1
        for action in flow.handle(Produced("thinker", (token,), None if i else ready, "stop" if end else None)):
            _carry_out(input_provider, action, rows)
    expected, track = heard.given["inputs_embeds"][0], heard.given["trailing_text_hidden"][0]
    length = expected.shape[0]
    torch.testing.assert_close(input_provider.rows([Span("a", 0, length)]), expected, atol=TOLERANCE, rtol=0)
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
