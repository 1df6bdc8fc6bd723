"""Realtime sessions of the official client with `vllm serve TINY --omni`."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import os
import signal
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import openai
import psutil
import pytest
import soundfile
import websockets

from examples.server import Server
from tests.processes.test_http import alike
from tests.support.cluster import KEY, kill, overrides, status, until, wait_busy
from tests.support.hostile import events
from tests.support.realtime import Checker
from tests.support.spoken import of_espeak, with_pauses
from vllm_omni_ext.cli import main as command
from vllm_omni_ext.serving.realtime.pcm import PCMU, Decoder, Encoder, SoundFormat

pytestmark = pytest.mark.engine

MODEL, RATE, MS = "tiny", 24_000, 48
TELEPHONE = SoundFormat(PCMU, 8_000)
WORDS, FRAMES, LONG_FRAMES = 12, 24, 300
BLOCK = 32
"""Tokens in a block of the prefix caches."""

OVERRIDES = {
    "thinker": {
        "engine": {"block_size": BLOCK},
        "params": {"temperature": 0, "ignore_eos": True, "max_tokens": WORDS},
    },
    "talker": {"engine": {"block_size": BLOCK}, "params": {"temperature": 0, "max_tokens": FRAMES}},
}
"""Greedy answers of one length: a session has no field for them."""

MANUAL = {"type": "realtime", "audio": {"input": {"turn_detection": None}}}
LOOK = {
    "type": "function",
    "name": "look",
    "parameters": {"type": "object", "properties": {"at": {"enum": ["moon"]}}, "required": ["at"]},
}


@pytest.fixture(scope="module")
def server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ["--served-model-name", MODEL, "--max-model-len", "2048", "--stage-overrides", json.dumps(OVERRIDES)]
    flags += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    with Server(tiny, tmp_path_factory.mktemp("realtime") / "server.log", flags) as running:
        yield running


class Talk:
    """A session, and the same conversation as messages of a chat."""

    def __init__(self, connection: Any, client: openai.AsyncOpenAI) -> None:
        self.connection = connection
        self.client = client
        self.checker = Checker()
        self.events: list[Any] = []
        self.messages: list[Any] = []

    async def send(self, kind: str, **fields: Any) -> None:
        await self.connection.send({"type": kind, **fields})

    async def until(self, *kinds: str) -> Any:
        """Receive events up to the next of some kinds; returns it."""
        while True:
            data = await asyncio.wait_for(self.connection.recv_bytes(), timeout=120)
            self.checker.take(json.loads(data))
            event = self.connection.parse_event(data)
            self.events.append(event)
            if event.type in kinds:
                return event
            assert event.type != "error", event

    async def configure(self, **fields: Any) -> None:
        await self.send("session.update", session={**MANUAL, **fields})
        await self.until("session.updated")
        if fields.get("instructions"):
            self.messages.append({"role": "system", "content": fields["instructions"]})

    async def append(self, samples: np.ndarray) -> None:
        """Send sound in pieces of 20 ms."""
        data = samples.tobytes()
        for at in range(0, len(data), 20 * MS):
            audio = base64.b64encode(data[at : at + 20 * MS]).decode()
            await self.send("input_audio_buffer.append", audio=audio)

    async def say(self, samples: np.ndarray, sent: int = 0) -> None:
        """Send sound, of which `sent` samples were sent before, and commit it."""
        await self.append(samples[sent:])
        await self.send("input_audio_buffer.commit")
        await self.until("conversation.item.done")
        file = io.BytesIO()
        soundfile.write(file, samples, RATE, format="WAV", subtype="PCM_16")
        sound = {"data": base64.b64encode(file.getvalue()).decode(), "format": "wav"}
        self.messages.append({"role": "user", "content": [{"type": "input_audio", "input_audio": sound}]})

    async def write(self, text: str) -> None:
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
        await self.send("conversation.item.create", item=item)
        await self.until("conversation.item.done")
        self.messages.append({"role": "user", "content": [{"type": "text", "text": text}]})

    async def respond(self, **fields: Any) -> tuple[Any, np.ndarray]:
        """Create a response; returns it at its end, and its sound."""
        first = len(self.events)
        await self.send("response.create", **({"response": fields} if fields else {}))
        done = (await self.until("response.done")).response
        deltas = [each.delta for each in self.events[first:] if each.type == "response.output_audio.delta"]
        return done, np.frombuffer(b"".join(map(base64.b64decode, deltas)), "<i2")

    async def chat(self, **fields: Any) -> Any:
        """The answer of a chat with the same messages."""
        audio = {"voice": "ethan", "format": "wav"}
        return await self.client.chat.completions.create(
            model=MODEL, messages=self.messages, modalities=["text", "audio"], audio=audio, **fields
        )


@contextlib.asynccontextmanager
async def talking(server: Server, key: str = "none") -> AsyncIterator[Talk]:
    async with (
        openai.AsyncOpenAI(base_url=server.base_url, api_key=key, max_retries=0, timeout=120) as client,
        client.realtime.connect(model=MODEL) as connection,
    ):
        made = Talk(connection, client)
        await made.until("session.created")
        yield made


def tone(hz: float, seconds: float) -> np.ndarray:
    return (np.sin(2 * np.pi * hz * np.arange(round(seconds * RATE)) / RATE) * 8000).astype("<i2")


async def test_turns_of_sound_and_text_are_answered_as_a_chat_is(server: Server) -> None:
    async with talking(server) as talk:
        await talk.configure(instructions="You are a cat.")
        for turn in range(3):
            if turn == 1:
                await talk.write("Tell me about the moon")
            else:
                await talk.say(tone(300 + 100 * turn, 0.8))
            done, samples = await talk.respond()
            assert done.status == "completed" or done.status_details.reason == "max_output_tokens"
            (item,) = done.output
            expected = await talk.chat()
            message = expected.choices[0].message
            assert item.content[0].transcript == message.audio.transcript
            whole, _ = soundfile.read(io.BytesIO(base64.b64decode(message.audio.data)), dtype="int16")
            assert alike(samples, whole) and len(samples) > 0
            usage = expected.usage
            assert done.usage.input_tokens == usage.prompt_tokens
            assert done.usage.output_token_details.text_tokens == WORDS
            assert done.usage.output_token_details.audio_tokens == usage.completion_tokens_details.audio_tokens
            talk.messages.append({"role": "assistant", "content": message.audio.transcript})


async def test_a_turn_computes_nothing_of_earlier_turns(server: Server) -> None:
    """As a response and as a chat. Both answers are those without a cache, which a request with another salt has."""
    async with talking(server) as talk:
        await talk.configure()
        before = 0
        for turn in range(3):
            await talk.say(tone(500 + 100 * turn, 4.0))
            done, samples = await talk.respond()
            assert done.usage.input_token_details.cached_tokens >= before // BLOCK * BLOCK
            known = await talk.chat(extra_body={"return_stage_metrics": True})
            stages = known.model_extra["metrics"]["stages"]
            assert stages["talker"]["cached_tokens"] >= turn * BLOCK
            assert stages["thinker"]["cached_tokens"] >= before // BLOCK * BLOCK
            new = await talk.chat(extra_body={"return_stage_metrics": True, "cache_salt": str(turn)})
            stages = new.model_extra["metrics"]["stages"]
            assert stages["talker"]["cached_tokens"] == stages["thinker"]["cached_tokens"] == 0
            known_sound, new_sound = (
                soundfile.read(io.BytesIO(base64.b64decode(each.choices[0].message.audio.data)), dtype="int16")[0]
                for each in (known, new)
            )
            assert alike(samples, new_sound) and alike(known_sound, new_sound)
            text = new.choices[0].message.audio.transcript
            assert done.output[0].content[0].transcript == known.choices[0].message.audio.transcript == text
            talk.messages.append({"role": "assistant", "content": text})
            before = done.usage.input_tokens - 3  # without the header of the answer


async def test_sound_that_is_computed_while_it_is_sent_is_answered_as_a_chat_is(server: Server) -> None:
    samples = tone(300, 12.3)
    samples[: RATE // 2] *= 2  # the loudest part: later sound does not change the features of earlier sound
    sent = round(10.4 * RATE)
    other = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]}
    async with talking(server) as talk:
        await talk.configure(instructions="You are a cat.")
        await talk.append(samples[:sent])
        await talk.respond(conversation="none", input=[other])  # the engine gets it after five blocks of the sound
        await talk.say(samples, sent)
        done, sound = await talk.respond()
        assert done.usage.input_token_details.cached_tokens >= 4 * BLOCK
        message = (await talk.chat()).choices[0].message
    assert done.output[0].content[0].transcript == message.audio.transcript
    whole, _ = soundfile.read(io.BytesIO(base64.b64decode(message.audio.data)), dtype="int16")
    assert alike(sound, whole) and len(sound) > 0
    with urllib.request.urlopen(server.base_url.replace("/v1", "/metrics"), timeout=60) as page:
        lines = page.read().decode().splitlines()
    (line,) = [line for line in lines if line.startswith("vllm_omni_ext:realtime_ahead_tokens_total{")]
    assert float(line.rpartition(" ")[2]) > 0


async def test_a_response_without_a_turn_of_the_user(server: Server) -> None:
    async with talking(server) as talk:
        await talk.configure()
        done, samples = await talk.respond(instructions="Greet the user.")
        assert done.status in ("completed", "incomplete"), done.status_details
        assert len(samples) > 0


async def test_text_only_and_the_formats_of_telephones(server: Server) -> None:
    async with talking(server) as talk:
        pcmu = {"format": {"type": "audio/pcmu"}}
        await talk.configure(audio={"input": {**pcmu, "turn_detection": None}, "output": pcmu})
        await talk.send("input_audio_buffer.append", audio=base64.b64encode(bytes(range(256)) * 10).decode())
        await talk.send("input_audio_buffer.commit")
        await talk.until("conversation.item.done")
        done, _ = await talk.respond(output_modalities=["text"], max_output_tokens=5)
        assert (done.status, done.usage.output_tokens) == ("incomplete", 5)
        pcm = {"output": {"format": {"type": "audio/pcm", "rate": 24000}}}
        _, codes = await talk.respond(conversation="none")
        _, samples = await talk.respond(conversation="none", audio=pcm)
        expected = Encoder(TELEPHONE, RATE).write(samples / np.float32(2**15), last=True)
        levels, same = (Decoder(TELEPHONE, TELEPHONE.rate).write(each) for each in (codes.tobytes(), expected))
        assert len(levels) == len(same) == -(-len(samples) // 3) > 0
        assert np.corrcoef(levels, same)[0, 1] > 0.99


async def test_a_function_is_called_and_its_result_read(server: Server) -> None:
    async with talking(server) as talk:
        await talk.configure(tools=[LOOK], tool_choice={"type": "function", "name": "look"})
        await talk.write("Look at the moon")
        done, samples = await talk.respond(max_output_tokens=200)
        (item,) = done.output
        assert (item.type, item.name, len(samples)) == ("function_call", "look", 0)
        if item.status == "completed":
            assert json.loads(item.arguments) == {"at": "moon"}
        output = {"type": "function_call_output", "call_id": item.call_id, "output": "It is full."}
        await talk.send("conversation.item.create", item=output)
        await talk.until("conversation.item.done")
        done, _ = await talk.respond(tool_choice="none", output_modalities=["text"])
        assert done.output[0].content[0].text


async def test_a_cancelled_response_leaves_nothing_and_the_next_one_is_answered(server: Server) -> None:
    async with talking(server) as talk:
        await talk.configure()
        await talk.write("Tell me about the moon")
        await talk.send("response.create", response={"max_output_tokens": 1500})  # longer than any client takes
        await talk.until("response.output_audio.delta", "response.output_audio_transcript.delta")
        await talk.send("response.cancel")
        done = (await talk.until("response.done")).response
        assert (done.status, done.status_details.reason) == ("cancelled", "client_cancelled")
        done, samples = await talk.respond()
        assert done.output[0].status != "in_progress" and len(samples)


async def test_two_sessions_at_once_are_answered_as_alone(server: Server) -> None:
    async def alone(text: str) -> tuple[str, np.ndarray]:
        async with talking(server) as talk:
            await talk.configure()
            await talk.write(text)
            done, samples = await talk.respond()
            return done.output[0].content[0].transcript, samples

    texts = ("Tell me about the moon", "A blue cat")
    expected = [await alone(text) for text in texts]
    found = await asyncio.gather(*map(alone, texts))
    for (words, sound), (same_words, same_sound) in zip(expected, found, strict=True):
        assert words == same_words and alike(sound, same_sound)


async def test_wrong_events_end_no_session(server: Server) -> None:
    async with talking(server) as talk:
        await talk.configure()
        for kind, fields, param in (
            ("response.create", {"response": {"seed": 1}}, "response.seed"),
            ("session.update", {"session": {"type": "realtime", "prompt": {"id": "a"}}}, "session.prompt"),
            ("input_audio_buffer.append", {"audio": "?"}, "audio"),
            ("conversation.item.delete", {"item_id": "x"}, "item_id"),
        ):
            await talk.send(kind, event_id="mine", **fields)
            error = (await talk.until("error")).error
            assert (error.param, error.event_id) == (param, "mine")
        await talk.write("Hello")
        assert (await talk.respond(output_modalities=["text"]))[0].output


async def test_a_prompt_beyond_the_context_loses_its_oldest_items(server: Server) -> None:
    async with talking(server) as talk:
        await talk.configure(output_modalities=["text"])
        for _ in range(3):
            await talk.write("the moon is a cat " * 200)
        done, _ = await talk.respond()
        assert done.status in ("completed", "incomplete"), done.status_details
        assert done.usage.input_tokens < 2048


HOSTILE, EVENTS_EACH = 25, 800
MOST_GROWTH = 300 << 20
"""Bytes by which hostile sessions may increase the largest memory of an API server."""


def peak_bytes(pid: int) -> int:
    """Return the largest resident memory that a process has had, since `forget_peak` or its start."""
    (line,) = (each for each in Path(f"/proc/{pid}/status").read_text().splitlines() if each.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def forget_peak(pid: int) -> None:
    """Set the largest resident memory of a process to what it has now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


async def hostile(server: Server, messages: list[str | bytes]) -> None:
    """Send malformed and hostile events; the session goes on after them."""
    url = server.base_url.replace("http", "ws", 1) + f"/realtime?model={MODEL}"
    async with websockets.connect(url, max_size=None, compression=None, open_timeout=120) as socket:

        async def send() -> None:
            for message in messages:
                await socket.send(message)
            await socket.send(json.dumps({"type": "conversation.item.delete", "item_id": "the end"}))

        sending = asyncio.create_task(send())
        async for text in socket:
            if "'the end'" in text:
                break
        else:
            raise AssertionError(f"closed: {socket.close_code} {socket.close_reason}")
        await sending


async def closed_after(server: Server, messages: list[str]) -> int | None:
    """Send messages to a new session; returns the code with which the server closes the connection."""
    url = server.base_url.replace("http", "ws", 1) + f"/realtime?model={MODEL}"
    async with websockets.connect(url, max_size=None, compression=None, open_timeout=120) as socket:
        with contextlib.suppress(websockets.ConnectionClosed):
            for message in messages:
                await socket.send(message)
        with contextlib.suppress(websockets.ConnectionClosed):
            async for _ in socket:
                pass
    return socket.close_code


async def test_20000_hostile_events_change_no_other_session(server: Server) -> None:
    async def conversation(number: int) -> list[tuple[str, np.ndarray]]:
        answers = []
        async with talking(server) as talk:
            await talk.configure(instructions=f"You are cat {number}.")
            for turn in range(2):
                await talk.write(f"Tell me about moon {turn}")
                done, samples = await talk.respond()
                answers.append((done.output[0].content[0].transcript, samples))
        return answers

    attacks = [events(Random(seed), EVENTS_EACH) for seed in range(HOSTILE)]
    expected = await asyncio.gather(*(conversation(number) for number in range(3)))
    log, (api_server,) = len(server.log.read_text()), status(server)["api_servers"]
    forget_peak(api_server["pid"])
    before = peak_bytes(api_server["pid"])
    began = time.monotonic()
    attack = asyncio.gather(*(hostile(server, messages) for messages in attacks))
    found = await asyncio.gather(*(conversation(number) for number in range(3)))
    await attack
    clear = json.dumps({"type": "input_audio_buffer.clear"})
    assert await closed_after(server, [clear] * 5000) == 1008
    assert await closed_after(server, ["x" * (17 << 20)]) == 1009
    for answers, alone in zip(found, expected, strict=True):
        for (words, sound), (same_words, same_sound) in zip(answers, alone, strict=True):
            assert words == same_words and alike(sound, same_sound)
    growth = peak_bytes(api_server["pid"]) - before
    print(f"{HOSTILE * EVENTS_EACH} events, {time.monotonic() - began:.1f} s, memory {growth / 2**20:+.0f} MiB")
    assert growth < MOST_GROWTH
    text = server.log.read_text()[log:]
    assert "Traceback" not in text and "ERROR" not in text, text[-3000:]


@pytest.mark.needs("library onnxruntime", "library silero_vad")
async def test_turns_of_speech_are_found_and_answered(server: Server) -> None:
    soxr = pytest.importorskip("soxr")
    sound, places = with_pauses(of_espeak()[:2], (0.5, 1.5, 1.5))
    samples = (soxr.resample(sound, 16_000, RATE) * 32767).astype("<i2")
    detection = {"type": "server_vad", "interrupt_response": False, "create_response": False}
    async with talking(server) as talk:
        await talk.configure(audio={"input": {"turn_detection": detection}}, output_modalities=["text"])
        for at in range(0, len(samples), RATE // 10):
            audio = base64.b64encode(samples[at : at + RATE // 10].tobytes()).decode()
            await talk.send("input_audio_buffer.append", audio=audio)
        for begin, end in places:
            started = await talk.until("input_audio_buffer.speech_started")
            stopped = await talk.until("input_audio_buffer.speech_stopped")
            assert started.audio_start_ms == pytest.approx(begin - 300, abs=200)
            assert stopped.audio_end_ms == pytest.approx(end + 500, abs=200)
            await talk.until("conversation.item.done")
        done, _ = await talk.respond()
        assert done.usage.input_token_details.audio_tokens > 20


def test_load_of_spoken_turns(server: Server, tmp_path: Path) -> None:
    question, file = tmp_path / "question.wav", tmp_path / "out.json"
    soundfile.write(question, tone(300, 0.8), RATE)
    words = ["bench", "speech", "--api", "realtime", "--url", server.base_url, "--rate", "10", "--requests", "6"]
    words += ["--audio", str(question), "--realtime-input-speed", "0", "--voice", "chelsie", "--json", str(file)]
    assert command.main(words) == 0
    document = json.loads(file.read_bytes())
    assert document["settings"]["model"] == MODEL
    assert document["figures"]["answered"] == 6
    length = document["answers"][0]["sound_s"]
    for answer in document["answers"]:
        assert answer["sound_s"] == pytest.approx(length)
        assert 0 < answer["first_sound_s"] < answer["whole_s"]
        assert answer["first_text_s"] is not None
        assert answer["whole_s"] > length - 0.5, "the sound is sent as it is played"


# -- two API servers --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two API servers and two talkers; answers of 2.3 s."""
    talker = {"replicas": 2, "params": {"temperature": 0, "min_tokens": LONG_FRAMES, "max_tokens": LONG_FRAMES}}
    flags = ["--served-model-name", MODEL, "--max-model-len", "2048", "--api-server-count", "2", "--api-key", KEY]
    flags += ["--shutdown-timeout", "120"]
    flags += overrides(thinker=OVERRIDES["thinker"], talker=talker)
    with Server(tiny, tmp_path_factory.mktemp("two") / "server.log", flags) as running:
        yield running


async def test_every_api_server_accepts_a_client_secret(two: Server) -> None:
    async with openai.AsyncOpenAI(base_url=two.base_url, api_key=KEY, max_retries=0) as client:
        made = await client.realtime.client_secrets.create(session={"type": "realtime", "instructions": "Be brief."})
    async with contextlib.AsyncExitStack() as sessions:
        for _ in range(4):  # the server with the fewest connections takes the next
            browser = openai.AsyncOpenAI(base_url=two.base_url, api_key=made.value, max_retries=0)
            await sessions.enter_async_context(browser)
            connection = await sessions.enter_async_context(browser.realtime.connect(model=MODEL))
            created = await asyncio.wait_for(connection.recv(), timeout=60)
            assert created.session.instructions == "Be brief."
        with urllib.request.urlopen(two.base_url.replace("/v1", "/metrics"), timeout=60) as page:
            text = page.read().decode()
    lines = [line for line in text.splitlines() if line.startswith("vllm_omni_ext:realtime_sessions{")]
    servers = [line for line in lines if float(line.rpartition(" ")[2]) == 4]
    assert len(servers) == 1, lines


async def test_a_response_goes_on_when_a_stage_is_killed(two: Server) -> None:
    async with talking(two, KEY) as talk:
        await talk.configure()
        await talk.write("Tell me about the moon")
        done, expected = await talk.respond(conversation="none")
        await talk.send("response.create", response={"conversation": "none"})
        first = len(talk.events)
        await talk.until("response.output_audio.delta")
        name = await asyncio.to_thread(wait_busy, two, "talker")
        kill(two, name)
        again = (await talk.until("response.done")).response
    deltas = [each.delta for each in talk.events[first:] if each.type == "response.output_audio.delta"]
    sound = np.frombuffer(b"".join(map(base64.b64decode, deltas)), "<i2")
    assert again.output[0].content[0].transcript == done.output[0].content[0].transcript
    assert again.status == done.status and alike(sound, expected)


async def test_a_client_of_a_killed_api_server_restores_its_items_in_a_new_session(two: Server) -> None:
    """Two sessions, one on each API server, with equal conversations; one server is killed."""
    settings = {"instructions": "You are a cat.", "output_modalities": ["text"]}
    async with contextlib.AsyncExitStack() as sessions, talking(two, KEY) as kept:
        for _ in range(10):  # the server with the fewest connections takes the next, unless both are idle
            lost = await sessions.enter_async_context(talking(two, KEY))
            if (pid := pid_of(two, lost)) != pid_of(two, kept):
                break
        for talk in (kept, lost):
            await talk.configure(**settings)
            await talk.say(tone(300, 0.8))
            await talk.write("Tell me about the moon")
            await talk.respond()
        items = []
        for item_id in lost.checker.items:
            await lost.send("conversation.item.retrieve", item_id=item_id)
            items.append((await lost.until("conversation.item.retrieved")).item.model_dump(exclude_none=True))
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(websockets.ConnectionClosed):
            await lost.until("session.updated")
        restored = await sessions.enter_async_context(talking(two, KEY))
        await restored.configure(**settings)
        for item in items:
            await restored.send("conversation.item.create", item=item)
            await restored.until("conversation.item.done")
        answers = []
        for talk in (kept, restored):
            await talk.write("And about the sun?")
            done, _ = await talk.respond()
            answers.append((done.output[0].content[0].text, done.usage.input_tokens))
    assert answers[0] == answers[1] and answers[0][0]


def pid_of(server: Server, talk: Talk) -> int:
    """Return the process id of the API server that has a session."""
    address = tuple(talk.connection._connection.local_address[:2])
    for each in status(server)["api_servers"]:
        if any(found.raddr == address for found in psutil.Process(each["pid"]).net_connections("tcp")):
            return int(each["pid"])
    raise AssertionError(address)


async def test_a_shutdown_ends_sessions_with_a_reason_after_their_running_responses(two: Server) -> None:
    assert await asyncio.to_thread(until, lambda: all(each["state"] == "UP" for each in status(two)["api_servers"]))
    async with talking(two, KEY) as idle, talking(two, KEY) as busy:
        for talk in (idle, busy):
            await talk.configure()
            await talk.write("Tell me about the moon")
        await busy.send("response.create")
        await busy.until("response.output_audio.delta")
        stopping = asyncio.create_task(asyncio.to_thread(two.stop, signal.SIGINT))
        for talk in (idle, busy):
            assert (await talk.until("error")).error.code == "server_shutting_down"
            with pytest.raises(websockets.ConnectionClosed) as caught:
                await talk.until("session.updated")
            assert caught.value.rcvd is not None
            assert (caught.value.rcvd.code, caught.value.rcvd.reason) == (1001, "server_shutting_down")
        assert await stopping == []
    (done,) = (each.response for each in busy.events if each.type == "response.done")
    assert done.status in ("completed", "incomplete") and done.output[0].content[0].transcript
    deltas = [each.delta for each in busy.events if each.type == "response.output_audio.delta"]
    assert sum(map(len, deltas)) * 3 / 4 / MS > 1800, "all of the sound"
