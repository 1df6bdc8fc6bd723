"""Fields of requests, their limits and refusals, the planned stages, and the released sizes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig
from vllm.sampling_params import SamplingParams

from vllm_omni_ext.errors import ConfigError, PromptTooLong, RequestError
from vllm_omni_ext.model_plugins.qwen2_5_omni.facts import facts
from vllm_omni_ext.model_plugins.qwen2_5_omni.family import QWEN2_5_OMNI
from vllm_omni_ext.model_plugins.qwen2_5_omni.flow import ReadAloudFlow, SpeechFlow
from vllm_omni_ext.model_plugins.qwen2_5_omni.messages import Token2WavParams
from vllm_omni_ext.model_plugins.qwen2_5_omni.runtime import Qwen2_5OmniRuntime
from vllm_omni_ext.model_plugins.qwen2_5_omni.tiny.qwen2_5_omni import write_qwen2_5_omni
from vllm_omni_ext.model_plugins.qwen_omni.requests import MOST_SPEECH_TOKENS, ReadAloud
from vllm_omni_ext.plugins.flow import Forward, Open, Submit
from vllm_omni_ext.plugins.runtime import Planned, Rendered, RequestOptions, RuntimeContext
from vllm_omni_ext.wire.stage_input import EXPORT, EXPORTED, OPEN_END

BOTH = ("text", "audio")
LIMITS = {"thinker": 200, "talker": 100, "token2wav": 80}
PROMPT = [1, 2, 3, 4]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen2_5_omni(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def runtime(checkpoint: Path) -> Qwen2_5OmniRuntime:
    return made(checkpoint)


def made(checkpoint: Path, **defaults: Any) -> Qwen2_5OmniRuntime:
    context = RuntimeContext(
        hf_config=AutoConfig.from_pretrained(checkpoint),
        pipeline="qwen2_5_omni",
        frontend="thinker",
        chunks=QWEN2_5_OMNI.chunks(),
        limits=LIMITS,
        max_num_seqs={"token2wav": 2},
        defaults=defaults,
        model_config=SimpleNamespace(model=str(checkpoint), revision=None),
    )
    return Qwen2_5OmniRuntime(context)


def options(**more: Any) -> RequestOptions:
    return RequestOptions(**{"modalities": BOTH, **more})


def utterance(planned: Planned) -> Any:
    """The message with the first part for token2wav."""
    flow: Any = planned.flow
    flow._sound.frames.add(np.array([[5]]))
    return flow._sound.again().payload


def test_capabilities(runtime: Qwen2_5OmniRuntime) -> None:
    capabilities = runtime.capabilities()
    every = {"thinker", "talker", "token2wav"}
    assert capabilities.modalities == capabilities.default_modalities == BOTH
    assert capabilities.routes == {"text": {"thinker"}, "audio": every, "speech": every}
    assert capabilities.card == {
        "voices": ["Chelsie", "Ethan"],
        "default_voice": "Chelsie",
        MOST_SPEECH_TOKENS: 80,
    }


def test_voices(runtime: Qwen2_5OmniRuntime) -> None:
    names = (None, "ethan", "ETHAN", "alloy", "Ash", "nobody", "")
    assert [runtime.speaker(name) for name in names] == ["Chelsie", "Ethan", "Ethan", "Chelsie", "Ethan", None, None]


@pytest.mark.parametrize(
    ("changed", "parameter"),
    [
        ({"modalities": ("video",)}, "modalities"),
        ({"modalities": ()}, "modalities"),
        ({"fields": {"voice": "nobody"}}, "voice"),
    ],
)
def test_wrong_options_are_named(changed: dict[str, Any], parameter: str, runtime: Qwen2_5OmniRuntime) -> None:
    with pytest.raises(RequestError) as refused:
        runtime.validate(options(**changed))
    assert refused.value.parameter == parameter


def test_text_alone_exports_nothing(runtime: Qwen2_5OmniRuntime) -> None:
    planned = runtime.plan(Rendered(prompt=PROMPT), options(modalities=("text",)))
    assert planned.flow.begin() == [Forward("thinker")]
    assert not planned.frontend_args and not planned.skip_prefix_cache


def test_sound_needs_the_hidden_states_of_all_positions(runtime: Qwen2_5OmniRuntime) -> None:
    planned = runtime.plan(Rendered(prompt=PROMPT), options(fields={"voice": "ethan"}))
    assert isinstance(planned.flow, SpeechFlow) and planned.skip_prefix_cache
    assert planned.frontend_args == {EXPORT: [[0, OPEN_END]], EXPORTED: 0} and planned.budgets == {"talker": 80}
    _, opened = planned.flow.begin()
    assert isinstance(opened, Open) and opened.hidden_spans == ((0, 4), (5, 6)) and opened.prompt_positions == 5


def test_a_text_is_read_by_all_stages(runtime: Qwen2_5OmniRuntime) -> None:
    planned = runtime.plan(Rendered(data=ReadAloud(prompt=PROMPT, reply=[7, 8])), options(modalities=("audio",)))
    thinker, talker = planned.flow.begin()
    assert isinstance(planned.flow, ReadAloudFlow) and planned.budgets == {"thinker": 1, "talker": 80}
    assert isinstance(thinker, Open) and thinker.prompt == [*PROMPT, 7, 8] and thinker.export == ((0, 6),)
    assert isinstance(talker, Open) and talker.stage == "talker"


@pytest.mark.parametrize(
    ("rendered", "changed", "error", "parameter"),
    [
        ({"prompt": [1] * 98}, {}, PromptTooLong, "messages"),
        ({"prompt": PROMPT}, {"params": {"talker": SamplingParams(max_tokens=81)}}, RequestError, "talker.max_tokens"),
        ({"data": ReadAloud(prompt=PROMPT, reply=[1] * 81)}, {}, RequestError, "input"),
    ],
)
def test_a_request_that_exceeds_a_limit_is_refused(
    rendered: dict[str, Any],
    changed: dict[str, Any],
    error: type[RequestError],
    parameter: str,
    runtime: Qwen2_5OmniRuntime,
) -> None:
    with pytest.raises(error) as refused:
        runtime.plan(Rendered(**rendered), options(**changed))
    assert refused.value.parameter == parameter


def test_each_request_has_noise_of_its_own_unless_a_seed_is_given(checkpoint: Path) -> None:
    runtime, seeded = made(checkpoint), made(checkpoint, token2wav={"seed": 3, "num_steps": 5})
    seeds = {utterance(runtime.plan(Rendered(prompt=PROMPT), options())).params.seed for _ in range(3)}
    assert len(seeds) == 3
    assert utterance(seeded.plan(Rendered(prompt=PROMPT), options())).params == Token2WavParams(seed=3, num_steps=5)
    given = options(params={"token2wav": Token2WavParams(seed=9)}, fields={"voice": "ash"})
    said = utterance(seeded.plan(Rendered(prompt=PROMPT), given))
    assert (said.speaker, said.params) == ("Ethan", Token2WavParams(seed=9))


def test_steps_for_which_token2wav_has_no_memory_are_refused(checkpoint: Path, runtime: Qwen2_5OmniRuntime) -> None:
    """It has memory for two utterances with the default of nine steps."""

    def spoken(num_steps: int) -> Planned:
        params = {"token2wav": Token2WavParams(num_steps=num_steps)}
        return runtime.plan(Rendered(prompt=PROMPT), options(params=params))

    assert utterance(spoken(19)).params.num_steps == 19
    with pytest.raises(RequestError, match="20 need more memory than token2wav has; use at most 19") as refused:
        spoken(20)
    assert refused.value.parameter == "token2wav.num_steps"
    with pytest.raises(ConfigError, match=r"stages.token2wav.params.num_steps: 20 need more"):
        made(checkpoint, token2wav={"num_steps": 20})


def test_only_the_first_part_has_the_utterance(runtime: Qwen2_5OmniRuntime) -> None:
    flow: Any = runtime.plan(Rendered(prompt=PROMPT), options(chunks={"frames": [1]})).flow
    parts = [flow._sound.take(np.array([[n]]), last=False, at=0.0) for n in range(3)]
    assert [isinstance(part, Submit) and part.payload is not None for part in parts] == [True, False, False]


def test_facts_count_all_weights(checkpoint: Path) -> None:
    from safetensors import safe_open

    config = AutoConfig.from_pretrained(checkpoint)
    found = facts(config, {})
    with safe_open(checkpoint / "model.safetensors", "pt") as stored:
        counts = {name: stored.get_tensor(name).numel() for name in stored.keys()}  # noqa: SIM118
    elements = {stage: sum(part.elements for part in each.weights) for stage, each in found.items()}
    of = {stage: sum(n for name, n in counts.items() if name.startswith(f"{stage}.")) for stage in elements}
    talker, text = config.talker_config, config.thinker_config.text_config
    tables = (talker.vocab_size + text.vocab_size) * talker.hidden_size - talker.vocab_size * talker.embedding_size
    assert elements == {**of, "talker": of["talker"] + tables}
    config.enable_audio_output = False
    with pytest.raises(ConfigError, match="no sound output"):
        facts(config, {})
