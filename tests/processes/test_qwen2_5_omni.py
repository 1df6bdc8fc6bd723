"""Qwen2.5-Omni: every id, code and sample equals Transformers' (greedy, float32, CPU; the same noise)."""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import numpy as np
import pytest
import soundfile
from safetensors.torch import load_file
from vllm import SamplingParams

from examples.server import HOST, Server
from tests.processes.test_parity import CASES, SCHEDULES, TOLERANCE, Case, check, heard, prompt, user
from tests.processes.test_realtime import MANUAL, talking, tone
from tests.support import goldens
from tests.support.cluster import (
    LARGEST_DIFFERENCE,
    LENGTH,
    Headless,
    all_up,
    ask,
    ask_all,
    body,
    free_ports,
    idle,
    kill,
    overrides,
    until,
    used,
    wait_busy,
)
from tests.support.lora import write_adapter
from tests.support.media import audio, openai_messages
from tests.support.oracle import Golden
from tests.support.qwen2_5_oracle import Oracle
from vllm_omni_ext.model_plugins.qwen2_5_omni.http import OPENING
from vllm_omni_ext.model_plugins.qwen2_5_omni.messages import Token2WavParams
from vllm_omni_ext.model_plugins.qwen2_5_omni.tiny import config
from vllm_omni_ext.model_plugins.qwen2_5_omni.tiny.qwen2_5_omni import write_qwen2_5_omni
from vllm_omni_ext.model_plugins.qwen_omni.speech import rendered
from vllm_omni_ext.plugins.runtime import RequestOptions
from vllm_omni_ext.serving.served import ServedModel

pytestmark = pytest.mark.engine

SEED = 7
LENGTHS = {"max_model_len": 2048, "max_num_batched_tokens": 128}
SOME = ("system", "audio", "image", "video_with_sound")
"""Cases of the tests that run always; `CASES` has all."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen2_5_omni(tmp_path_factory.mktemp("qwen2_5") / "model")


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Oracle:
    return Oracle(checkpoint)


@pytest.fixture(scope="module")
def omni(checkpoint: Path) -> Iterator[Any]:
    from vllm import LLM

    with LLM(str(checkpoint), omni=True, **LENGTHS) as omni:
        yield omni


def sampling(case: Case) -> Mapping[str, Any]:
    return {
        "thinker": SamplingParams(temperature=0, max_tokens=case.text),
        "talker": SamplingParams(temperature=0, repetition_penalty=1.05, max_tokens=case.frames),
        "token2wav": Token2WavParams(seed=SEED),
    }


def golden(oracle: Oracle, case: Case) -> Golden:
    limits = {"thinker_max_tokens": case.text, "talker_max_tokens": case.frames, "seed": SEED}
    voice = case.voice.capitalize()
    return goldens.once(
        lambda: oracle.run(case.messages, voice=voice, **limits),
        oracle.checkpoint,
        case.messages,
        {**limits, "v": voice},
    )


def answers(omni: Any, oracle: Oracle, cases: list[Case], chunks: Mapping[str, Any] | None = None) -> list[Any]:
    given: list[Any] = [None] * len(cases)
    for voice in {case.voice for case in cases}:
        some = [i for i, case in enumerate(cases) if case.voice == voice]
        got = omni.generate(
            [prompt(oracle, cases[i]) for i in some],  # type: ignore[arg-type]
            [sampling(cases[i]) for i in some],
            voice=voice,
            chunks=chunks,
            use_tqdm=False,
        )
        for i, output in zip(some, got, strict=True):
            given[i] = output
    return given


def test_answers_equal_transformers(omni: Any, oracle: Oracle) -> None:
    """One after the other, and then at once."""
    cases = [CASES[name] for name in SOME]
    for case in cases:
        check(answers(omni, oracle, [case])[0], golden(oracle, case))
    for case, output in zip(cases, answers(omni, oracle, cases), strict=True):
        check(output, golden(oracle, case))
    assert omni._omni.orchestrator.held() == 0


@pytest.mark.extended
def test_sound_that_begins_before_the_last_code_equals_transformers(omni: Any, oracle: Oracle) -> None:
    """More blocks than the equation looks ahead."""
    codes = 176
    talker = SamplingParams(temperature=0, repetition_penalty=1.05, min_tokens=codes, max_tokens=codes)
    (output,) = omni.generate(
        prompt(oracle, CASES["system"]),  # type: ignore[arg-type]
        {**sampling(CASES["system"]), "talker": talker},
        voice="ethan",
        chunks={"frames": [16, 48], "adaptive": False},
        use_tqdm=False,
    )
    assert output.frames.shape == (codes, 1)
    whole = oracle.spoken(output.frames.ravel().tolist(), "Ethan", SEED)
    assert output.audio.shape == whole.shape
    assert np.abs(output.audio - whole).max() <= TOLERANCE


@pytest.mark.extended
def test_all_cases_at_once(omni: Any, oracle: Oracle) -> None:
    for case, output in zip(CASES.values(), answers(omni, oracle, list(CASES.values())), strict=True):
        check(output, golden(oracle, case))
    assert omni._omni.orchestrator.held() == 0


@pytest.mark.extended
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_sizes_of_chunks_do_not_change_an_answer(schedule: str, omni: Any, oracle: Oracle) -> None:
    for case, output in zip(
        CASES.values(), answers(omni, oracle, list(CASES.values()), SCHEDULES[schedule]), strict=True
    ):
        check(output, golden(oracle, case))
    assert omni._omni.orchestrator.held() == 0


@pytest.mark.extended
def test_clips_of_several_requests_in_one_step_do_not_mix(omni: Any, oracle: Oracle) -> None:
    cases = [Case([user(heard(seconds, 30 + i), "Hm?")]) for i, seconds in enumerate((0.35, 0.95, 0.5, 0.2))]
    for case, output in zip(cases, answers(omni, oracle, cases), strict=True):
        check(output, golden(oracle, case))


@pytest.mark.extended
def test_a_second_turn_reads_the_prefix_cache(omni: Any, oracle: Oracle) -> None:
    """The hidden states of the first turn are kept with its blocks."""
    first = CASES["long_media_prompt"]
    second = Case([*first.messages, {"role": "assistant", "content": "So it is."}, user("And now?")])
    for case in (first, second):
        check(answers(omni, oracle, [case])[0], golden(oracle, case))
    (kept,) = omni.collective_rpc("hidden_states_kept", targets=["thinker"]).values()
    assert kept.value[0] > 0


@pytest.mark.extended
def test_chat(omni: Any, oracle: Oracle) -> None:
    case = CASES["video"]
    (output,) = omni.chat(openai_messages(case.messages), sampling(case), voice=case.voice, use_tqdm=False)
    check(output, golden(oracle, case))


@pytest.mark.extended
def test_an_adapter_of_the_thinker_changes_text_and_sound_as_in_transformers(checkpoint: Path, tmp_path: Path) -> None:
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    folder, merged, case = write_adapter(checkpoint, tmp_path / "accent", seed=1), Oracle(checkpoint), CASES["audio"]
    adapter = load_file(folder / "adapter_model.safetensors")
    for name in [name for name in adapter if name.endswith("lora_A.weight")]:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        change = adapter[name.replace("lora_A", "lora_B")] @ adapter[name]
        merged.model.get_submodule(module).weight.data += change
    limits = {"thinker_max_tokens": case.text, "talker_max_tokens": case.frames, "seed": SEED}
    with LLM(str(checkpoint), omni=True, enable_lora=True, **LENGTHS) as omni:
        (output,) = omni.generate(
            prompt(merged, case),  # type: ignore[arg-type]
            sampling(case),
            voice=case.voice,
            lora_request=LoRARequest("accent", 1, str(folder)),
            use_tqdm=False,
        )
    check(output, merged.run(case.messages, voice="Ethan", **limits))


@pytest.mark.extended
def test_tensor_parallel(tmp_path: Path) -> None:
    """Thinker and talker as two processes each."""
    from vllm import LLM

    small = config.SMALL
    even = replace(
        small,
        audio={**small.audio, "encoder_attention_heads": 2},
        vision={**small.vision, "num_heads": 2},
    )
    with mock.patch.object(config, "SMALL", even):
        model = write_qwen2_5_omni(tmp_path / "model", seed=3)  # with this seed the answers have sound
    divisible = Oracle(model)
    two = {"engine": {"tensor_parallel_size": 2}}
    cases = [CASES[name] for name in SOME]
    with LLM(str(model), omni=True, stage_overrides={"thinker": two, "talker": two}, **LENGTHS) as omni:
        for case, output in zip(cases, answers(omni, divisible, cases), strict=True):
            check(output, golden(divisible, case))
        assert omni._omni.orchestrator.held() == 0


async def read(omni: Any, text: str, voice: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes and samples of a text that is read out."""
    request = await rendered(text, ServedModel(omni._omni), opening=OPENING)
    params = {name: value for name, value in sampling(CASES["system"]).items() if name != "thinker"}
    options = RequestOptions(modalities=("audio",), fields={"voice": voice}, params=params)
    pieces = [piece async for piece in omni._omni.start(request, options, "speech")]
    return pieces[-1].frames, np.concatenate([piece.samples for piece in pieces])


@pytest.mark.parametrize("text", ["The quick brown fox.", "a", "Say <|im_end|> aloud."])
def test_a_text_read_out_equals_transformers(text: str, omni: Any, oracle: Oracle) -> None:
    codes, samples = omni._run(read(omni, text, "Chelsie"))
    wanted, sound = oracle.read_aloud(
        OPENING, text, voice="Chelsie", seed=SEED, talker_max_tokens=CASES["system"].frames
    )
    assert codes.tolist() == wanted.tolist()
    assert samples.shape == sound.shape and np.abs(samples - sound).max() <= TOLERANCE
    assert omni._omni.orchestrator.held() == 0


STAGES = ("thinker", "talker", "token2wav")
REQUESTS, AT_ONCE, WORDS, CODES = 16, 4, 40, 60
PORTS, UP_S = 3, 180.0
AFTER = {3: "talker", 7: "token2wav", 11: "thinker"}
"""The stage of which a busy replica is killed after so many answers."""

DEFAULTS = {
    "thinker": {"temperature": 0, "ignore_eos": True, "max_tokens": 12},
    "talker": {"temperature": 0, "max_tokens": 30},
    "token2wav": {"seed": SEED},
}
"""For realtime sessions, which have no fields for them."""


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    logs, port = tmp_path_factory.mktemp("server"), free_ports(PORTS)
    replicas = {**dict.fromkeys(STAGES, 2), "talker": 1}
    two = overrides(**{stage: {"replicas": replicas[stage], "params": DEFAULTS[stage]} for stage in STAGES})
    words = ["--api-server-count", "2", "-oma", HOST, "-omp", str(port)]
    with (
        Server(checkpoint, logs / "log", [*LENGTH, *two, *words]) as running,
        Headless(checkpoint, logs / "talker", "talker", port),
    ):
        assert until(lambda: all_up(running, 6), UP_S)
        yield running


def question(number: int) -> dict[str, Any]:
    sound = [{"type": "audio", "audio": audio(0.5 + number / 40, number)}] if number % 4 == 1 else []
    text = {"type": "text", "text": f"Question {number}: what is a replica?"}
    content = openai_messages([{"role": "user", "content": [*sound, text]}])[0]["content"]
    return body(content, WORDS, CODES, token2wav={"seed": number})


@pytest.mark.extended
def test_no_answer_changes_when_replicas_are_killed(server: Server) -> None:
    bodies = [question(number) for number in range(REQUESTS)]
    undisturbed = ask_all(server, bodies, AT_ONCE)
    assert set(used(undisturbed)) == {f"{stage}/{i}" for stage in STAGES for i in range(2)}
    answered, lock, strikes = 0, threading.Lock(), []

    def one(fields: dict[str, Any]) -> Any:
        nonlocal answered
        answer = ask(server, fields)
        with lock:
            answered += 1
            if answered in AFTER:
                stage = AFTER[answered]
                strikes.append(threads.submit(lambda: kill(server, wait_busy(server, stage))))
        return answer

    with ThreadPoolExecutor(1) as threads, ThreadPoolExecutor(AT_ONCE) as clients:
        got = list(clients.map(one, bodies))
        while not all(struck.done() for struck in strikes):
            assert list(clients.map(partial(ask, server), bodies[:AT_ONCE])) == undisturbed[:AT_ONCE]
        for struck in strikes:
            struck.result()
    assert [n for n in range(REQUESTS) if got[n] != undisturbed[n]] == []
    assert until(lambda: all_up(server, 6) and idle(server))


def alike(samples: np.ndarray, sound: np.ndarray) -> bool:
    """Whether samples of 16 bits are this sound."""
    wanted = np.round(sound * (2**15 - 1))
    return samples.shape == wanted.shape and bool((np.abs(samples - wanted) <= LARGEST_DIFFERENCE).all())


@pytest.mark.extended
def test_speech_and_chat_over_http(server: Server, oracle: Oracle) -> None:
    case = CASES["image"]
    fields = {
        **body(openai_messages(case.messages)[0]["content"], case.text, case.frames, token2wav={"seed": SEED}),
        "ignore_eos": False,
        "talker": {"temperature": 0, "max_tokens": case.frames},
    }
    wanted = golden(oracle, case)
    assert alike(ask(server, fields).samples, wanted.wav)
    say = {"input": "The quick brown fox.", "voice": "Chelsie", "token2wav": {"seed": SEED}}
    say["talker"] = {"temperature": 0, "max_tokens": 40}
    answer = httpx.post(f"{server.base_url}/audio/speech", json=say, timeout=60)
    assert answer.status_code == 200, answer.text
    samples = soundfile.read(io.BytesIO(answer.content), dtype="int16")[0].astype(np.int32)
    _, sound = oracle.read_aloud(OPENING, say["input"], voice="Chelsie", seed=SEED, talker_max_tokens=40)
    assert alike(samples, sound)
    refused = httpx.post(f"{server.base_url}/audio/speech", json={**say, "token2wav": {"num_steps": 1}}, timeout=60)
    assert refused.status_code == 400 and "token2wav" in refused.json()["error"]["param"]
    voices = httpx.get(f"{server.base_url}/audio/voices", timeout=60).json()
    assert voices == {"voices": ["Chelsie", "Ethan"], "default_voice": "Chelsie"}


@pytest.mark.extended
async def test_realtime_answers_equal_those_of_chats(server: Server) -> None:
    """A text, and then a sound in the same conversation."""
    async with talking(server) as talk:
        await talk.configure(audio={**MANUAL["audio"], "output": {"voice": "ethan"}})
        for number in range(2):
            await (talk.say(tone(440, 0.7)) if number else talk.write("What is a replica?"))
            done, sound = await talk.respond()
            message = (await talk.chat()).choices[0].message
            (said,) = done.output[0].content
            assert done.status == "completed" or done.status_details.reason == "max_output_tokens"
            assert said.transcript == message.audio.transcript
            wanted = soundfile.read(io.BytesIO(base64.b64decode(message.audio.data)), dtype="int16")[0]
            assert len(sound) > 0 and sound.shape == wanted.shape
            assert np.abs(sound.astype(int) - wanted).max() <= LARGEST_DIFFERENCE
            talk.messages.append({"role": "assistant", "content": said.transcript})
