"""Plugins and flows are told of the model's stages, whatever the plan calls them."""

from __future__ import annotations

from typing import Any

from tests.orchestrator.fakes import OPTIONS, FakePlugin
from vllm_omni_ext.orchestrator.flow import Fail, Produced
from vllm_omni_ext.orchestrator.naming import in_model_terms
from vllm_omni_ext.orchestrator.requests import TextRequest

NAMES = {"text.prefill": "text", "text.decode": "text"}


def test_without_other_names_it_is_the_plugin_itself() -> None:
    plugin: Any = FakePlugin(lambda event: [])
    assert in_model_terms(plugin, {}) is plugin


def test_events_and_tensors_have_the_model_s_names() -> None:
    plugin: Any = FakePlugin(lambda event: [Fail(event.stage)])
    named = in_model_terms(plugin, NAMES)
    flow = named.open(TextRequest(prompt=[1]), OPTIONS)
    for stage, expected in [("text.prefill", "text"), ("text.decode", "text"), ("voice", "voice")]:
        event = Produced(stage, (1, 2), payload="rows", finish="stop", part=3, at=4.0)
        assert flow.handle(event) == [Fail(expected)]
        assert plugin.flows[0].events[-1] == Produced(expected, (1, 2), payload="rows", finish="stop", part=3, at=4.0)
        assert named.decode(stage, "tensor") == (expected, "tensor")
    assert flow.replay("sound") == plugin.flows[0].replay("sound")
    assert (named.sample_rate, named.voices) == (plugin.sample_rate, plugin.voices)
