"""Sampling, refusals and aborts of requests through `LLM`; closing it leaves nothing."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from vllm import SamplingParams

from examples.server import alive
from tests.processes.conftest import STEP_TOKENS
from tests.support.cluster import until
from tests.support.lora import write_adapter, write_dense
from tests.support.oracle import Oracle
from tests.support.pace import pace
from vllm_omni_ext.errors import OmniError, RequestError, RequestFailed
from vllm_omni_ext.plugins.runtime import RequestOptions

pytestmark = pytest.mark.engine

TOLERANCE = 1e-4
QUESTION = [{"role": "user", "content": "Tell me about the blue cat in the moon"}]
LONG = [{"role": "user", "content": "Tell me more about the moon. " * 40}]
OTHER = [{"role": "user", "content": "Say something nice."}]
TOO_LONG = [{"role": "user", "content": "word " * 4000}]


def sampled(seed: int) -> dict[str, SamplingParams]:
    """Random sampling in both stages, from one seed."""
    return {
        "thinker": SamplingParams(temperature=1.0, seed=seed, max_tokens=24, ignore_eos=True),
        "talker": SamplingParams(temperature=1.0, top_k=50, seed=seed, max_tokens=24),
    }


def greedy(text: int = 16, **thinker: Any) -> dict[str, SamplingParams]:
    return {
        "thinker": SamplingParams(temperature=0, max_tokens=text, ignore_eos=True, **thinker),
        "talker": SamplingParams(temperature=0, max_tokens=16),
    }


def ask(omni: Any, conversations: Any, sampling: Any, **options: Any) -> list[Any]:
    outputs = omni.chat(conversations, sampling, use_tqdm=False, **options)
    assert omni._omni.orchestrator.held() == 0
    return outputs


def said(output: Any) -> tuple[Any, ...]:
    """Ids and frames of an answer."""
    assert output.error is None
    return tuple(output.outputs[0].token_ids), output.frames.tolist(), output.audio.shape


def same(one: Any, other: Any) -> bool:
    """Whether ids and frames are equal, and sounds up to rounding, which depends on the batches of code2wav."""
    return said(one) == said(other) and bool(np.abs(one.audio - other.audio).max() <= TOLERANCE)


@pytest.mark.parametrize("asked", [QUESTION, LONG], ids=["one step", "several steps"])
def test_a_seed_repeats_an_answer_alone_and_among_others(omni: Any, asked: Any) -> None:
    """Also with a prompt of several steps: vLLM alone ends a CPU engine there."""
    (first,), (again,), (other,) = (ask(omni, [asked], sampled(seed)) for seed in (7, 7, 8))
    assert (len(first.prompt_token_ids) > 2 * STEP_TOKENS) == (asked is LONG)
    assert same(first, again)
    assert first.outputs[0].token_ids != other.outputs[0].token_ids
    assert first.frames.tolist() != other.frames.tolist()
    together = ask(omni, [asked, OTHER, asked], [sampled(7), sampled(9), sampled(7)])
    assert same(together[0], first) and same(together[2], first)


def test_the_talker_has_a_seed_of_its_own(omni: Any) -> None:
    outputs = [ask(omni, [QUESTION], {**greedy(), "talker": sampled(seed)["talker"]})[0] for seed in (7, 8)]
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
    assert outputs[0].frames.tolist() != outputs[1].frames.tolist()


def test_a_wrong_prompt_fails_alone(omni: Any, oracle: Oracle) -> None:
    """One without a speaker, and one that is too long."""
    prompts = [oracle.prompt(QUESTION), "nobody is asked to answer", oracle.prompt(TOO_LONG), oracle.prompt(OTHER)]
    good, mute, too_long, other = omni.generate(prompts, greedy(), use_tqdm=False)
    assert isinstance(mute.error, RequestError) and "assistant" in str(mute.error)
    assert isinstance(too_long.error, RequestError)
    assert mute.outputs[0].finish_reason == "error"
    assert same(good, ask(omni, [QUESTION], greedy())[0])
    assert same(other, ask(omni, [OTHER], greedy())[0])
    (text,) = omni.generate(prompts[1:2], greedy(), use_tqdm=False, modalities=["text"])
    assert text.error is None and text.audio is None


@pytest.mark.parametrize(
    ("options", "parameter"),
    [
        ({"voice": "nobody"}, "voice"),
        ({"modalities": ["smell"]}, "modalities"),
        ({"chunks": {"frames": [0]}}, "chunks.frames"),
    ],
)
def test_the_error_of_a_wrong_option_names_it(omni: Any, options: dict[str, Any], parameter: str) -> None:
    with pytest.raises(RequestError) as caught:
        omni.chat(QUESTION, use_tqdm=False, **options)
    assert caught.value.parameter == parameter


def test_a_stop_string_ends_the_text_and_not_the_sound(omni: Any) -> None:
    (whole,) = ask(omni, [QUESTION], greedy(text=24))
    text = whole.outputs[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    (output,) = ask(omni, [QUESTION], greedy(text=24, stop=[stop]))
    assert output.error is None
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].text == text[: text.index(stop)]
    assert len(output.frames) and output.audio.size


@pytest.mark.parametrize("modalities", [("text",), ("text", "audio")])
def test_leaving_a_stream_aborts_its_request(omni: Any, modalities: tuple[str, ...]) -> None:
    (expected,) = ask(omni, [QUESTION], greedy())
    prompt = omni._preprocess_chat_one(QUESTION)
    endless = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)

    async def leave() -> int:
        stream = omni._omni.generate(
            prompt, endless, "left", options=RequestOptions(modalities=modalities, streamed=True)
        )
        async with contextlib.aclosing(stream):
            async for _ in stream:
                return omni._omni.orchestrator.held()
        raise AssertionError("the stream was empty")

    assert omni._run(leave()) > 0
    assert omni._omni.orchestrator.held() == 0
    assert same(ask(omni, [QUESTION], greedy())[0], expected)


def run(script: Path, *arguments: Path, timeout_s: float, **variables: str) -> subprocess.CompletedProcess[str]:
    words, environment = [sys.executable, script, *arguments], {**os.environ, **variables}
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=timeout_s)


NEVER_CLOSED = """
import sys, weakref

class Thing:
    pass

thing = Thing()
weakref.finalize(thing, id, 0)  # as some libraries do: hooks of `weakref` then run after those of `multiprocessing`
from vllm import LLM
from vllm.lora.request import LoRARequest

if __name__ == "__main__":
    model, folder = sys.argv[1:]
    llm = LLM(model, omni=True, max_model_len=512, enable_lora=True)
    adapter = LoRARequest("accent", 1, folder)
    said = []
    for adapters in ([None, None], adapter, [adapter, adapter], None):
        answers = llm.generate(
            ["hello"] * 2, {"thinker": {"max_tokens": 8, "temperature": 0}}, modalities=["text"], use_tqdm=False,
            lora_request=adapters, priority=0,
        )
        said.append({tuple(answer.outputs[0].token_ids) for answer in answers})
    assert said[0] == said[3] != said[1] == said[2] and all(len(each) == 1 for each in said), said
    assert llm.llm_engine.model_config.max_model_len == 512
    try:
        llm.llm_engine.step
    except NotImplementedError as error:
        print("FACTS", error)
"""


@pytest.mark.extended
def test_a_program_that_never_closes_ends_silently(tmp_path: Path) -> None:
    """It also uses adapters by prompt, and `llm_engine.model_config`."""
    script, model = tmp_path / "never_closed.py", write_dense(tmp_path / "model")
    script.write_text(NEVER_CLOSED)
    done = run(script, model, write_adapter(model, tmp_path / "accent", seed=1), timeout_s=300 * pace())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FACTS llm_engine.step is not available with omni=True" in done.stdout
    assert "is gone" not in done.stderr


PROGRAM = """
import json, os, sys, tempfile, threading
import psutil
from vllm import LLM

def here():
    return set(os.listdir("/dev/shm")), set(os.listdir(tempfile.gettempdir()))

if __name__ == "__main__":
    before = here()
    llm = LLM(sys.argv[1], omni=True, max_model_len=512)
    (output,) = llm.chat([{"role": "user", "content": "hello"}], use_tqdm=False)
    running = len(psutil.Process().children(recursive=True))
    llm.close()
    llm.close()
    after = here()
    left = [process.name() for process in psutil.Process().children(recursive=True)]
    facts = {"error": str(output.error or ""), "running": running, "left": left,
             "shared": sorted(after[0] - before[0]), "temporary": sorted(after[1] - before[1])}
    print("FACTS", json.dumps(facts), flush=True)
    made = []
    maker = threading.Thread(target=lambda: made.append(LLM(sys.argv[1], omni=True, max_model_len=512)))
    maker.start()
    maker.join()
    [answer] = made[0].generate("hello", max_tokens=2, modalities=["text"], use_tqdm=False)
    print("PIDS", *(process.pid for process in made[0]._deployment.processes().values()), flush=True)
    threading.Event().wait()
"""


def test_closing_leaves_no_process_and_no_file_and_replicas_end_with_a_killed_program(
    tiny: Path, tmp_path: Path
) -> None:
    """One program for both: importing vLLM takes seconds. The replicas outlive the thread that started them."""
    (tmp_path / "program.py").write_text(PROGRAM)
    with tempfile.TemporaryDirectory() as folder:  # short: sockets have their paths in it
        words, environment = [sys.executable, tmp_path / "program.py", tiny], {**os.environ, "TMPDIR": folder}
        with subprocess.Popen(
            words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as program:
            lines = iter(program.stdout or ())
            facts = json.loads(next(line for line in lines if line.startswith("FACTS")).removeprefix("FACTS"))
            assert facts.pop("running") >= 3
            assert facts == {"error": "", "left": [], "shared": [], "temporary": []}
            line = next(line for line in lines if line.startswith("PIDS"))
            replicas = [psutil.Process(int(pid)) for pid in line.split()[1:]]
            assert len(replicas) == 3 and all(map(alive, replicas))
            program.kill()
        assert until(lambda: not any(map(alive, replicas)), 10)


def test_request_fields_are_keywords(omni: Any) -> None:
    question = [{"role": "user", "content": "Tell me about the moon"}]
    given = {"max_tokens": 8, "ignore_eos": True, "temperature": 1, "talker": {"min_tokens": 6, "max_tokens": 6}}
    [one], [same], [other] = (
        omni.chat(question, voice="ethan", seed=seed, use_tqdm=False, **given) for seed in (7, 7, 8)
    )
    assert len(one.outputs[0].token_ids) == 8 and len(one.frames) == 5
    assert one.outputs[0].token_ids == same.outputs[0].token_ids and one.frames.tolist() == same.frames.tolist()
    assert one.frames.tolist() != other.frames.tolist()
    for call in (omni.chat, omni.generate):
        with pytest.raises(TypeError, match=r"unexpected keyword argument 'voise'; did you mean 'voice'\?"):
            call("hello" if call == omni.generate else question, voise="ethan")


def test_failed_prompts_are_reported_once_or_raised(omni: Any, caplog: pytest.LogCaptureFixture) -> None:
    prompts = ["hello", "word " * 5000, "hello", "word " * 5000]
    outputs = omni.generate(prompts, max_tokens=2, modalities=["text"], use_tqdm=False)
    assert [output.error is None for output in outputs] == [True, False, True, False]
    [line] = [record.getMessage() for record in caplog.records if " failed: " in record.getMessage()]
    assert line.startswith("2 of 4 failed: ") and line.endswith(str(outputs[1].error))
    with pytest.raises(RequestFailed, match=r"^1 of 2 failed: ") as caught:
        omni.generate(prompts[:2], max_tokens=2, modalities=["text"], raise_on_error=True, use_tqdm=False)
    assert isinstance(caught.value.__cause__, OmniError)
