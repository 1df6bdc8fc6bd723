"""`vllm serve TINY --omni` as a process, with requests of the official client."""

from __future__ import annotations

import base64
import io
import json
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import av
import numpy as np
import openai
import psutil
import pytest
import soundfile

from examples.server import Server
from tests.processes.test_starved import NOT_OURS
from tests.support import media, readme
from vllm_omni_ext.cli import main as command

pytestmark = pytest.mark.engine

MODEL = "tiny"
RATE = 24_000
HELLO: list[Any] = [{"role": "user", "content": "Tell me about the blue cat in the moon"}]
PCM = {"voice": "ethan", "format": "pcm16"}
BODY: dict[str, Any] = {"ignore_eos": True, "talker": {"max_tokens": 24}}
SHORT = {"max_completion_tokens": 12, "temperature": 0, "seed": 3, "extra_body": BODY}
LONG = {"max_completion_tokens": 1500, "temperature": 0, "extra_body": {"ignore_eos": True}}
SETTLE_S = 60.0
NONE = (0.0, 0)
IDLE_S, IDLE_BY_S = 12.0, 60.0
MOST_CPU, MOST_CPU_OF_ALL, MOST_WAKE_UPS = 0.01, 0.02, 45.0
"""Of an idle server: CPU time as a share of one core, without `NOT_OURS` and with it, in one of the windows of `IDLE_S`
within `IDLE_BY_S`; wake-ups a second without `NOT_OURS` in each. A neighbour that empties the caches makes a window
cost more CPU time, not more wake-ups. 10 of the about 33 wake-ups are those of uvicorn."""

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server(plain_server: Server) -> Server:
    return plain_server


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0, timeout=120)


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    spoken = fields.get("modalities") != ["text"]
    body = {**(BODY if spoken else {"ignore_eos": True}), **fields.pop("extra_body", {})}
    return client.chat.completions.create(
        **{"model": MODEL, "messages": HELLO, **SHORT, **fields, "extra_body": body},
    )


def heard(reply: Any) -> np.ndarray:
    """The 16 bit samples of a WAV reply."""
    samples, rate = soundfile.read(io.BytesIO(base64.b64decode(reply.choices[0].message.audio.data)), dtype="int16")
    assert (rate, samples.ndim) == (RATE, 1)
    return samples


def alike(one: np.ndarray | bytes, other: np.ndarray | bytes) -> bool:
    """Whether 16 bit samples are equal up to rounding: in which pieces a sound is made is a matter of time."""
    a, b = (np.frombuffer(s, "<i2") if isinstance(s, bytes) else s for s in (one, other))
    return a.shape == b.shape and int(np.abs(a.astype(np.int32) - b).max()) <= 1


def pieces(chunks: list[Any]) -> int:
    """In how many pieces the sound of a stream came."""
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    return sum(bool(delta.audio and delta.audio.data) for delta in deltas)


def used(processes: list[psutil.Process]) -> dict[tuple[int, str, str], tuple[float, int]]:
    """CPU seconds and sleeps so far of each thread, by process, name and thread, as the scheduler counts them."""
    found = {}
    for process in processes:
        for thread in Path(f"/proc/{process.pid}/task").iterdir():
            sleeps = (thread / "status").read_text().partition("\nvoluntary_ctxt_switches:")[2].split()[0]
            seconds = int((thread / "schedstat").read_text().split()[0]) / 1e9
            found[process.pid, (thread / "comm").read_text().strip(), thread.name] = seconds, int(sleeps)
    return found


def test_an_idle_server_costs_nothing(server: Server, client: openai.OpenAI) -> None:
    ask(client, modalities=["text", "audio"])
    time.sleep(1)
    processes, deadline = server.processes(), time.monotonic() + IDLE_BY_S
    while True:
        before = used(processes)
        time.sleep(IDLE_S)
        costs = {
            thread: ((seconds - before.get(thread, NONE)[0]) / IDLE_S, (sleeps - before.get(thread, NONE)[1]) / IDLE_S)
            for thread, (seconds, sleeps) in used(processes).items()
        }
        ours = [cost for (_, name, _), cost in costs.items() if name != NOT_OURS]
        cpu, wake_ups = (sum(column) for column in zip(*ours, strict=True))
        most = sorted(costs.items(), key=lambda each: -each[1][0])[:10]
        assert wake_ups < MOST_WAKE_UPS, most
        if cpu < MOST_CPU and sum(cost for cost, _ in costs.values()) < MOST_CPU_OF_ALL:
            return
        assert time.monotonic() < deadline, most


def streamed(chunks: list[Any]) -> tuple[str, str, np.ndarray]:
    """Content, transcript and 16 bit samples of a stream."""
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    audios = [delta.audio for delta in deltas if delta.audio]
    data = b"".join(base64.b64decode(audio.data) for audio in audios if audio.data)
    transcript = "".join(audio.transcript or "" for audio in audios)
    return "".join(delta.content or "" for delta in deltas), transcript, np.frombuffer(data, "<i2")


def test_text_alone(client: openai.OpenAI) -> None:
    reply = ask(client, modalities=["text"])
    assert reply.choices[0].message.content
    assert reply.choices[0].message.audio is None
    assert reply.usage.completion_tokens == 12


def test_text_and_sound(client: openai.OpenAI) -> None:
    reply = ask(client, modalities=["text", "audio"])
    choice = reply.choices[0]
    samples = heard(reply)
    assert choice.message.content == ask(client, modalities=["text"]).choices[0].message.content
    assert choice.message.audio.transcript == choice.message.content
    assert len(set(samples)) > 1
    assert choice.audio_metadata["frame_count"] == len(samples)
    assert 0 < reply.usage.completion_tokens_details.audio_tokens <= 24
    assert choice.finish_reason == "length"


def test_sound_alone(client: openai.OpenAI) -> None:
    reply = ask(client, modalities=["audio"], audio=PCM)
    assert reply.choices[0].message.content is None
    data = base64.b64decode(reply.choices[0].message.audio.data)
    assert alike(data, heard(ask(client)))


def test_a_stream_has_the_same_answer(client: openai.OpenAI) -> None:
    whole = ask(client)
    chunks = list(ask(client, stream=True, audio=PCM, stream_options={"include_usage": True}))
    content, transcript, samples = streamed(chunks)
    assert content == transcript == whole.choices[0].message.content
    assert alike(samples, heard(whole))
    assert pieces(chunks) > 1
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].usage == whole.usage


@pytest.mark.parametrize(("frames", "least", "most"), [([1], 20, 25), ([8], 3, 4), ("all", 1, 1)], ids=str)
def test_the_pieces_of_a_stream(client: openai.OpenAI, frames: Any, least: int, most: int) -> None:
    body = {"talker": {"max_tokens": 24, "min_tokens": 24}, "chunks": {"frames": frames, "adaptive": False}}
    chunks = list(ask(client, stream=True, audio=PCM, extra_body=body))
    assert least <= pieces(chunks) <= most
    assert alike(streamed(chunks)[2], heard(ask(client, extra_body={**body, "chunks": {"text": "all"}})))


async def test_async_client(server: Server, client: openai.OpenAI) -> None:
    async with openai.AsyncOpenAI(base_url=server.base_url, api_key="none", max_retries=0) as asking:
        fields = {"model": MODEL, "messages": HELLO, **SHORT}
        reply = await asking.chat.completions.create(**fields)
        stream = await asking.chat.completions.create(**fields, stream=True, modalities=["audio"], audio=PCM)
        content, transcript, samples = streamed([chunk async for chunk in stream])
    assert content == ""
    assert transcript == reply.choices[0].message.content
    assert alike(samples, heard(reply))


PARTS: dict[str, list[dict[str, Any]]] = {
    "audio": [{"type": "audio", "audio": media.audio(1.25, seed=1)}],
    "image": [{"type": "image", "image": media.image(130, 100, seed=3)}],
    "video": [{"type": "video", "video": media.video(4, 96, 64, seed=4)}],
    "all": [
        {"type": "audio", "audio": media.audio(0.7, seed=2)},
        {"type": "image", "image": media.image(64, 64, seed=5)},
        {"type": "video", "video": media.video(2, 64, 64, seed=6)},
    ],
}


@pytest.mark.parametrize("kind", PARTS)
def test_media(client: openai.OpenAI, kind: str) -> None:
    question = [*PARTS[kind], {"type": "text", "text": "what is it"}]
    messages = media.openai_messages([{"role": "user", "content": question}])
    first, second = ask(client, messages=messages), ask(client, messages=messages)
    assert len(set(heard(first))) > 1
    assert alike(heard(first), heard(second))
    assert first.choices[0].message.content == second.choices[0].message.content


def test_input_audio(client: openai.OpenAI) -> None:
    url = media.audio_url(PARTS["audio"][0]["audio"])
    part = {"type": "input_audio", "input_audio": {"data": url.partition(",")[2], "format": "wav"}}
    same = {"type": "audio_url", "audio_url": {"url": url}}
    replies = [ask(client, messages=[{"role": "user", "content": [p]}]) for p in (part, same)]
    assert alike(heard(replies[0]), heard(replies[1]))


LOOK = {"name": "look", "parameters": {"type": "object", "properties": {"at": {"enum": ["moon"]}}, "required": ["at"]}}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}], ids=["any", "one"])
def test_a_tool_call_is_not_spoken(client: openai.OpenAI, server: Server, choice: Any) -> None:
    asked = {"tools": [{"type": "function", "function": LOOK}], "tool_choice": choice, "modalities": ["text", "audio"]}
    asked |= {"max_completion_tokens": 200, "extra_body": {"ignore_eos": False, "return_stage_metrics": True}}
    reply = ask(client, **asked)
    message = reply.choices[0].message
    assert message.audio is None
    assert choice == "required" or message.tool_calls[0].function.name == "look"  # its list may be too long
    assert list(reply.metrics["stages"]) == ["thinker"]
    chunks = list(ask(client, **asked, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert choice == "required" or any(delta.tool_calls for delta in deltas)
    assert not any(getattr(delta, "audio", None) for delta in deltas)


def test_a_streamed_answer_that_turns_out_to_be_a_tool_call_is_not_spoken(client: openai.OpenAI) -> None:
    call = '<tool_call>{"name": "look", "arguments": {"at": "moon"}}</tool_call>'
    fields = {"ignore_eos": False, "structured_outputs": {"choice": [call]}}
    asked = {"tools": [{"type": "function", "function": LOOK}], "modalities": ["text", "audio"], "audio": PCM}
    chunks = list(ask(client, **asked, max_completion_tokens=200, extra_body=fields, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(c.function.arguments or "" for d in deltas for c in d.tool_calls or ()) == '{"at": "moon"}'
    assert not any(getattr(delta, "audio", None) for delta in deltas)


def test_the_talker_ends_when_a_whole_answer_turns_out_to_be_a_tool_call(client: openai.OpenAI) -> None:
    call = '<tool_call>{"name": "look", "arguments": {"at": "moon"}}</tool_call>'
    fields = {"ignore_eos": False, "structured_outputs": {"choice": [call]}, "return_stage_metrics": True}
    fields["talker"] = {"temperature": 0, "min_tokens": 1500, "max_tokens": 1500}
    asked = {"tools": [{"type": "function", "function": LOOK}], "modalities": ["text", "audio"]}
    reply = ask(client, **asked, max_completion_tokens=200, extra_body=fields)
    message = reply.choices[0].message
    assert (message.tool_calls[0].function.arguments, message.audio) == ('{"at": "moon"}', None)
    assert reply.metrics["stages"].get("talker", {"tokens": 0})["tokens"] < 1000


def test_the_python_examples_of_the_readme(server: Server, tmp_path: Path) -> None:
    written = [block for block in readme.blocks("python") if "import LLM" not in block]
    code = readme.at(server.port, "\n".join(written))
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=120)
    assert {file.name: len(soundfile.read(file)[0]) > 0 for file in tmp_path.iterdir()} == {
        "reply.wav": True,
        "sky.mp3": True,
    }


@pytest.mark.parametrize("words", [each for each in readme.commands("curl") if "audio" in each[1]], ids=lambda w: w[1])
def test_the_curl_examples_of_the_readme(words: list[str], server: Server, tmp_path: Path) -> None:
    there = [readme.at(server.port, word) for word in words]
    done = subprocess.run([*there, "--fail"], cwd=tmp_path, check=True, timeout=120, capture_output=True)
    if files := list(tmp_path.iterdir()):
        assert len(soundfile.read(files[0])[0]) > 0
    else:
        assert "ethan" in json.loads(done.stdout)["voices"]


@pytest.mark.parametrize(
    "words", [each for each in readme.commands("python") if each[1] != "examples/offline.py"], ids=lambda w: w[1]
)
def test_the_clients_of_the_readme(words: list[str], server: Server, tmp_path: Path) -> None:
    program = [sys.executable, str(REPOSITORY / words[1]), *words[2:], "--url", server.base_url]
    subprocess.run(program, cwd=tmp_path, check=True, timeout=120)
    (file,) = tmp_path.iterdir()
    assert len(soundfile.read(file)[0]) > 0


RELEASED = "Qwen/Qwen3-Omni-30B-A3B-Instruct"


@pytest.mark.extended
def test_the_examples_without_a_server_of_the_readme(tiny: Path, tmp_path: Path) -> None:
    (code,) = (block for block in readme.blocks("python") if "import LLM" in block)
    done = subprocess.run(
        [sys.executable, "-c", code.replace(RELEASED, str(tiny))],
        cwd=tmp_path,
        check=True,
        timeout=300,
        capture_output=True,
        text=True,
    )
    assert any(line.endswith(f",) {RATE}") for line in done.stdout.splitlines()), done.stdout
    (words,) = (each for each in readme.commands("python") if each[1] == "examples/offline.py")
    there = [word.replace(RELEASED, str(tiny)) for word in words[2:]]
    subprocess.run([sys.executable, str(REPOSITORY / words[1]), *there], cwd=tmp_path, check=True, timeout=300)
    assert len(soundfile.read(tmp_path / "sky.wav")[0]) > 0


def file_of(reply: bytes, container: str, codec: str, rate: int) -> bytes:
    """Return a file of FFmpeg with the sound of a WAV file."""
    data = io.BytesIO()
    with av.open(io.BytesIO(reply)) as source, av.open(data, "w", format=container) as file:
        stream = file.add_stream(codec, rate=rate, layout="mono")
        resampled = av.AudioResampler(format="s16", layout="mono", rate=rate)
        for frame in source.decode(audio=0):
            for each in resampled.resample(frame):
                file.mux(stream.encode(each))
        file.mux(stream.encode(None))
    return data.getvalue()


OTHERS = {"m4a": ("ipod", "aac", RATE), "mp4": ("mp4", "aac", RATE), "webm": ("webm", "libopus", 48_000)}
OTHERS["ogg"] = ("ogg", "libopus", 48_000)


@pytest.mark.parametrize("name", ["wav", "flac", "mp3", "opus", "aac", *OTHERS])
def test_the_model_gets_its_own_reply_as_sound(client: openai.OpenAI, name: str) -> None:
    """The reply has 24 kHz, the encoder 16 kHz."""
    asked = {"audio": {"voice": "ethan", "format": "wav" if name in OTHERS else name}}
    data = base64.b64decode(ask(client, **asked).choices[0].message.audio.data)
    if name in OTHERS:
        data = file_of(data, *OTHERS[name])
    part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": name}}
    usage = ask(client, messages=[{"role": "user", "content": [part]}], modalities=["text"]).usage
    assert usage.prompt_tokens_details.audio_tokens > 0
    file = (f"reply.{name}", data)
    client.audio.transcriptions.create(model=MODEL, file=file, extra_body={"max_completion_tokens": 4})


def test_turns(client: openai.OpenAI) -> None:
    first = ask(client, modalities=["audio"]).choices[0].message
    reply = ask(client, messages=[*HELLO, first, {"role": "user", "content": "Why?"}])
    written = [*HELLO, {"role": "assistant", "content": first.audio.transcript}, {"role": "user", "content": "Why?"}]
    assert alike(heard(reply), heard(ask(client, messages=written)))


def test_voices_differ(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, audio={"voice": "nobody", "format": "wav"})
    voices = caught.value.body["message"].partition("use one of ")[2].split(", ")
    assert len(voices) >= 2
    sounds = [heard(ask(client, audio={"voice": voice, "format": "wav"})).tobytes() for voice in voices[:2]]
    assert sounds[0] != sounds[1]


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"modalities": ["smell"]}, "modalities"),
        ({"audio": {"voice": "ethan", "format": "au"}}, "audio.format"),
        ({"n": 2}, "n"),
        ({"extra_body": {"talker": {"heat": 1}}}, "talker.heat"),
        ({"modalities": ["text"], "extra_body": {"talker": {"temperature": 0}}}, "talker"),
        ({"messages": [*HELLO, {"role": "assistant", "audio": {"id": "audio-1"}}, *HELLO]}, "messages[1].audio"),
        ({"messages": HELLO, "extra_body": {"add_generation_prompt": False}}, "prompt"),
    ],
)
def test_refusals(client: openai.OpenAI, fields: dict[str, Any], parameter: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **fields)
    assert caught.value.param == parameter


def test_seed(client: openai.OpenAI) -> None:
    def sound(request: int, **talker: int) -> np.ndarray:
        return heard(ask(client, seed=request, extra_body={"talker": {**BODY["talker"], **talker}}))

    assert alike(sound(11), sound(11))
    assert not alike(sound(11), sound(12))
    assert alike(sound(11), sound(12, seed=11))


def test_too_short_to_speak(client: openai.OpenAI) -> None:
    choice = ask(client, max_completion_tokens=1).choices[0]
    assert choice.message.audio is None
    assert "fewer than two tokens" in choice.audio_metadata["note"]


def test_other_endpoints(client: openai.OpenAI, server: Server) -> None:
    assert client.models.list().data[0].id == MODEL
    assert client.completions.create(model=MODEL, prompt="hello", max_tokens=4).usage.completion_tokens == 4
    assert server.healthy()


SAY: dict[str, Any] = {
    "model": MODEL,
    "voice": "ethan",
    "input": "The sky is blue.",
    "extra_body": {"seed": 5, "max_new_tokens": 30},
}


def spoken(data: bytes) -> np.ndarray:
    samples, rate = soundfile.read(io.BytesIO(data), dtype="int16")
    assert rate == RATE
    return samples


def test_speech(client: openai.OpenAI) -> None:
    whole = spoken(client.audio.speech.create(**SAY, response_format="wav").content)
    assert len(set(whole)) > 1
    assert alike(spoken(client.audio.speech.create(**SAY, response_format="flac").content), whole)
    for name in ("mp3", "opus"):
        assert len(spoken(client.audio.speech.create(**SAY, response_format=name).content)) == len(whole)
    say: dict[str, Any] = {**SAY, "extra_body": {**SAY["extra_body"], "stream": True}}
    for name in ("pcm", "flac"):
        with client.audio.speech.with_streaming_response.create(**say, response_format=name) as response:
            data = b"".join(response.iter_bytes())
        if name == "flac":
            with av.open(io.BytesIO(data)) as file:
                data = np.concatenate([frame.to_ndarray()[0] for frame in file.decode(audio=0)]).tobytes()
        assert alike(data, whole)
    other = client.audio.speech.create(**{**SAY, "model": "tts-1"}, response_format="pcm").content
    assert alike(other, whole)
    with pytest.raises(openai.BadRequestError) as caught:
        client.audio.speech.create(**SAY, speed=2.0)
    assert caught.value.param == "speed"


def test_speech_example(server: Server, tmp_path: Path) -> None:
    words = [REPOSITORY / "examples" / "speech.py", "hello", "--url", server.base_url, "--file", tmp_path / "a.flac"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert soundfile.info(tmp_path / "a.flac").format == "FLAC"


async def test_speech_async(server: Server, client: openai.OpenAI) -> None:
    whole = spoken(client.audio.speech.create(**SAY, response_format="wav").content)
    async with (
        openai.AsyncOpenAI(base_url=server.base_url, api_key="none", max_retries=0) as asking,
        asking.audio.speech.with_streaming_response.create(**SAY, response_format="pcm") as response,
    ):
        assert alike(b"".join([piece async for piece in response.iter_bytes()]), whole)


def test_the_card_of_the_model(client: openai.OpenAI) -> None:
    card = client.models.list().data[0]
    assert card.modalities == ["text", "audio"] and "ethan" in card.voices


def test_curl(server: Server, client: openai.OpenAI) -> None:
    def curl(path: str, body: dict[str, Any] | None = None) -> bytes:
        words = ["curl", "--silent", "--fail-with-body", "--no-buffer", f"{server.base_url}{path}"]
        if body is not None:
            words += ["-H", "content-type: application/json", "-d", json.dumps(body)]
        return subprocess.run(words, check=True, capture_output=True, timeout=60).stdout

    say = {"input": SAY["input"], "voice": "ethan", **SAY["extra_body"]}
    whole = spoken(curl("/audio/speech", say))
    assert alike(whole, spoken(client.audio.speech.create(**SAY, response_format="wav").content))
    events = curl("/audio/speech", {**say, "stream_format": "sse", "response_format": "pcm"}).decode().split("\n\n")
    deltas = [json.loads(event.splitlines()[1].removeprefix("data: ")) for event in events[:-1]]
    assert alike(b"".join(base64.b64decode(delta["audio"]) for delta in deltas[:-1]), whole)
    assert deltas[-1]["usage"]["output_tokens"] > 0
    assert "ethan" in json.loads(curl("/audio/voices"))["voices"]
    lines = curl("/chat/completions", {"messages": HELLO, "max_tokens": 4, "stream": True}).decode().splitlines()
    assert lines[-2] == "data: [DONE]"


@pytest.mark.parametrize("backend", ["openai-chat", pytest.param("openai", marks=pytest.mark.extended)])
def test_stock_benchmark(server: Server, tiny: Path, tmp_path: Path, backend: str) -> None:
    path = "/v1/chat/completions" if backend == "openai-chat" else "/v1/completions"
    words = f"bench serve --backend {backend} --endpoint {path} --model {MODEL} --port {server.port} --num-prompts 4"
    words += " --dataset-name random --random-input-len 16 --random-output-len 8 --save-result --result-filename r.json"
    words += f" --host 127.0.0.1 --tokenizer {tiny} --result-dir {tmp_path}"
    done = subprocess.run(
        [sys.executable, "-m", "vllm_omni_ext", *words.split()], capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["completed"], result["failed"]) == (4, 0)


@pytest.mark.parametrize("api", ["chat", "speech"])
def test_load_of_spoken_answers(client: openai.OpenAI, server: Server, tmp_path: Path, api: str) -> None:
    file, length = tmp_path / "out.json", {"ignore_eos": True, "talker": {"min_tokens": 24, "max_tokens": 24}}
    words = ["bench", "speech", "--api", api, "--url", server.base_url, "--rate", "10", "--requests", "6"]
    words += ["--prompt", "Tell me about the moon", "--voice", "chelsie", "--json", str(file)]
    words += ["--extra-body", json.dumps(length if api == "chat" else {"talker": length["talker"]})]
    words += ["--max-tokens", "12"] if api == "chat" else []
    assert command.main(words) == 0
    document = json.loads(file.read_bytes())
    assert document["settings"]["model"] == MODEL
    assert document["figures"]["answered"] == 6
    say = {**SAY, "extra_body": {"talker": length["talker"]}}
    samples = spoken(client.audio.speech.create(**say, response_format="wav").content)
    for answer in document["answers"]:
        assert answer["sound_s"] == pytest.approx(len(samples) / RATE)
        assert 0 < answer["first_sound_s"] < answer["whole_s"]
        assert (answer["first_text_s"] is not None) == (api == "chat")


@pytest.mark.parametrize("modalities", [["text"], ["text", "audio"]])
def test_leaving_a_stream_frees_everything(client: openai.OpenAI, server: Server, modalities: list[str]) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=HELLO, modalities=modalities, audio=PCM, stream=True, **LONG
    )
    for _, _chunk in zip(range(5), stream, strict=False):
        pass
    assert _running(server) == 1
    stream.close()
    _wait_idle(server)
    assert heard(ask(client)).size


@pytest.mark.parametrize("modalities", [["text"], ["text", "audio"]])
def test_leaving_an_answer_frees_everything(client: openai.OpenAI, server: Server, modalities: list[str]) -> None:
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.5).chat.completions.create(
            model=MODEL, messages=HELLO, modalities=modalities, **LONG
        )
    _wait_idle(server)
    assert heard(ask(client)).size


def _running(server: Server) -> float:
    """Requests in the text stage, as vLLM counts them."""
    with urllib.request.urlopen(f"{server.base_url.removesuffix('/v1')}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(
        float(line.rpartition(" ")[2]) for line in lines if line.startswith('vllm:num_requests_running{engine="0"')
    )


def _wait_idle(server: Server) -> None:
    deadline = time.monotonic() + SETTLE_S
    while _running(server):
        assert time.monotonic() < deadline, "the request is still running"
        time.sleep(0.1)


def test_ctrl_c_ends_everything(client: openai.OpenAI, server: Server) -> None:
    """Last: the server is gone afterwards, in the middle of a request."""
    shared = set(Path("/dev/shm").iterdir())
    stream = client.chat.completions.create(model=MODEL, messages=HELLO, audio=PCM, stream=True, **LONG)
    next(stream)
    started = time.monotonic()
    assert server.stop(signal.SIGINT) == []
    assert time.monotonic() - started < SETTLE_S
    assert set(Path("/dev/shm").iterdir()) <= shared


def test_demo(tmp_path: Path) -> None:
    """The demonstration works from any folder, and leaves a sound."""
    demo = REPOSITORY / "examples" / "demo.py"
    done = subprocess.run([sys.executable, demo], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert soundfile.info(tmp_path / "demo" / "reply.wav").samplerate == RATE
