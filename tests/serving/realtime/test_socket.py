"""Sessions of the official client with the real server application, over a scripted engine."""

from __future__ import annotations

import asyncio
import base64
import copy
import io
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import pytest_asyncio
import soundfile
import uvicorn
import websockets
from fastapi import FastAPI
from PIL import Image

from tests.serving.conftest import MODEL
from tests.support.realtime import Checker, Speech, silence
from tests.support.scripted import ScriptedOmni, sound
from vllm_omni_ext.config import schema
from vllm_omni_ext.errors import PromptTooLong, StageUnavailable
from vllm_omni_ext.metrics import ERRORS
from vllm_omni_ext.modalities.sound import pcm16
from vllm_omni_ext.serving.limits import media
from vllm_omni_ext.serving.realtime import onnx
from vllm_omni_ext.serving.realtime.limits import Limits
from vllm_omni_ext.serving.realtime.socket import OmniServingRealtime
from vllm_omni_ext.serving.served import ServedModel

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]

KEY = "a-key"
MANUAL = {"type": "realtime", "audio": {"input": {"turn_detection": None}}}
TEXT_ONLY = {"output_modalities": ["text"]}
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'


@asynccontextmanager
async def listening(app: Any) -> AsyncIterator[str]:
    """Serve an application; yields its address."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="warning", timeout_graceful_shutdown=1))
        server.capture_signals = nullcontext  # type: ignore[method-assign]  # those of this process stay as they are
        task = asyncio.create_task(server.serve(sockets=[sock]))
        try:
            yield f"127.0.0.1:{sock.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def address(app: Any) -> AsyncIterator[str]:
    async with listening(app) as found:
        yield found


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def locked(server_parts: tuple[ScriptedOmni, Any]) -> AsyncIterator[str]:
    """A server with an API key."""
    from vllm_omni_ext.serving.app import make_app

    omni, args = copy.copy(server_parts[0]), copy.copy(server_parts[1])
    omni.at_stop = []
    args.api_key = [KEY, "another"]
    async with listening(await make_app(omni, args)) as found:
        yield found


class Client:
    """A connection of the official client, whose events are checked."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.checker = Checker()
        self.events: list[Any] = []

    async def send(self, kind: str, **fields: Any) -> None:
        await self.connection.send({"type": kind, **fields})

    async def until(self, kind: str) -> Any:
        """Receive events up to the next of a kind; returns it."""
        while True:
            data = await asyncio.wait_for(self.connection.recv_bytes(), timeout=20)
            self.checker.take(json.loads(data))
            event = self.connection.parse_event(data)
            self.events.append(event)
            if event.type == kind:
                return event
            assert event.type != "error", event

    def of(self, kind: str) -> list[Any]:
        return [event for event in self.events if event.type == kind]

    async def respond(self, **fields: Any) -> Any:
        """Create a response, and return it at its end."""
        await self.send("response.create", **({"response": fields} if fields else {}))
        return (await self.until("response.done")).response

    async def say(self, text: str) -> None:
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
        await self.send("conversation.item.create", item=item)
        await self.until("conversation.item.done")


@asynccontextmanager
async def connected(address: str, key: str = "none", **fields: Any) -> AsyncIterator[Client]:
    client = openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key=key, max_retries=0)
    async with client.realtime.connect(model=MODEL, **fields) as connection:
        made = Client(connection)
        await made.until("session.created")
        await made.say("Hello")
        yield made
    await client.close()


@asynccontextmanager
async def raw(address: str, **options: Any) -> AsyncIterator[Any]:
    """A WebSocket without the official client."""
    path = options.pop("path", "/v1/realtime")
    async with websockets.connect(f"ws://{address}{path}", proxy=None, **options) as connection:
        yield connection


async def status_of(address: str, **options: Any) -> int:
    """The HTTP status of a refused handshake; 101 if it is accepted."""
    try:
        async with raw(address, **options):
            return 101
    except websockets.InvalidStatus as error:
        return int(error.response.status_code)


def refused(engine: ScriptedOmni, kind: str = "RequestError") -> float:
    """The number of refusals that the metrics have counted."""
    return float(engine.observer.metrics.of(ERRORS, kind, "")._value.get())


def serving(app: Any) -> Any:
    return app.state.omni_serving_realtime


async def closed(client: Client) -> tuple[int, str]:
    """Receive events until the server closes the connection; returns code and reason."""
    with pytest.raises(websockets.ConnectionClosed) as caught:
        while True:
            data = await asyncio.wait_for(client.connection.recv_bytes(), timeout=20)
            client.events.append(client.connection.parse_event(data))
    assert caught.value.rcvd is not None
    return caught.value.rcvd.code, caught.value.rcvd.reason


# -- answers ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_spoken_answer(address: str, engine: ScriptedOmni) -> None:
    engine.script = ["blue ", sound(2400, frames=2), "cat", sound(3600, frames=5, finished=True)]
    async with connected(address) as client:
        done = await client.respond()
    assert (done.status, done.output[0].content[0].transcript) == ("completed", "blue cat")
    data = b"".join(base64.b64decode(event.delta) for event in client.of("response.output_audio.delta"))
    expected = np.concatenate([sound(2400).samples, sound(3600).samples])
    assert data == pcm16(expected)
    assert (done.usage.output_token_details.text_tokens, done.usage.output_token_details.audio_tokens) == (2, 5)
    (call,) = engine.calls
    assert call.options is not None and call.options.modalities == ("text", "audio") and call.closed
    assert call.options.fields == {"voice": "ethan"}


async def test_the_prompt_has_the_sound_as_it_was_sent(address: str, engine: ScriptedOmni, monkeypatch: Any) -> None:
    bodies: list[Any] = []
    from vllm_omni_ext.serving.realtime import answering

    stock = answering.chat_body
    monkeypatch.setattr(answering, "chat_body", lambda *args: bodies.append(stock(*args)) or bodies[-1])
    samples = (np.sin(np.arange(4800) / 20) * 20000).astype("<i2")
    engine.script = ["yes"]
    async with connected(address) as client:
        await client.send("session.update", session={**MANUAL, "instructions": "Be brief.", "max_output_tokens": 7})
        await client.send("input_audio_buffer.append", audio=base64.b64encode(samples.tobytes()).decode())
        await client.send("input_audio_buffer.commit")
        done = await client.respond(**TEXT_ONLY)
    assert done.status == "completed", done.status_details
    system, _, user = bodies[0]["messages"]
    assert system == {"role": "system", "content": "Be brief."}
    data = base64.b64decode(user["content"][0]["input_audio"]["data"])
    found, rate = soundfile.read(io.BytesIO(data), dtype="int16")
    assert rate == 24_000 and np.array_equal(found, samples)
    assert bodies[0]["max_completion_tokens"] == 7 and engine.calls[0].params.max_tokens == 7
    assert done.usage.input_token_details.audio_tokens > 0
    assert done.output[0].content[0].text == "yes"


@pytest.mark.parametrize("leaves", [False, True])
async def test_sounds_of_earlier_turns_are_not_decoded_again(
    address: str, engine: ScriptedOmni, monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    """`leaves`: the media cache loses them after the request was made, and before vLLM reads it."""
    from vllm_omni_ext.serving.realtime import answering

    stock, bodies = answering.chat_body, list[Any]()

    def made(*args: Any) -> Any:
        bodies.append(stock(*args))
        if leaves:
            engine.renderer.clear_mm_cache()
        return bodies[-1]

    monkeypatch.setattr(answering, "chat_body", made)
    engine.renderer.clear_mm_cache()
    engine.script = ["yes"]
    async with connected(address) as client:
        await client.send("session.update", session=MANUAL)
        for turn in range(3):
            samples = (np.sin(np.arange(4800) / (20 + turn)) * 20000).astype("<i2")
            await client.send("input_audio_buffer.append", audio=base64.b64encode(samples.tobytes()).decode())
            await client.send("input_audio_buffer.commit")
            done = await client.respond(**TEXT_ONLY)
            assert done.status == "completed", done.status_details
    parts = [[part for message in body["messages"] for part in message["content"]] for body in bodies]
    sent = [[bool(part["input_audio"]["data"]) for part in each if "input_audio" in part] for each in parts]
    if leaves:
        assert sent == [[True], [False, True], [True, True], [False, False, True], [True, True, True]]
    else:
        assert sent == [[True], [False, True], [False, False, True]]


async def test_each_response_has_its_own_budget_of_pixels(
    address: str, engine: ScriptedOmni, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = replace(
        engine.plan, config=replace(engine.plan.config, limits=schema.Limits(max_request_pixels=64 * 64 + 100))
    )
    monkeypatch.setattr(engine, "plan", plan)
    file = io.BytesIO()
    Image.new("RGB", (64, 64)).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    picture = {"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": url}]}
    engine.script = ["yes"]
    with media.install(None):
        done = await answered_with_pictures(address, picture)
    assert "max_request_pixels" in done.status_details.error.message


async def answered_with_pictures(address: str, picture: dict[str, Any]) -> Any:
    """Two responses to one picture, then the response to two, which is returned."""
    async with connected(address) as client:
        await client.send("conversation.item.create", item=picture)
        for _ in range(2):
            done = await client.respond(**TEXT_ONLY)
            assert done.status == "completed" and done.usage.input_token_details.image_tokens > 0
        await client.send("conversation.item.create", item=picture)
        return await client.respond(**TEXT_ONLY)


async def test_a_tool_call_is_not_spoken(address: str, engine: ScriptedOmni) -> None:
    engine.script = [*(CALL[at : at + 7] for at in range(0, len(CALL), 7)), sound(2400, finished=True)]
    async with connected(address) as client:
        await client.send("session.update", session={"type": "realtime", "tools": [WEATHER]})
        await client.say("How is the weather?")
        done = await client.respond()
        (item,) = done.output
        assert (item.type, item.name, json.loads(item.arguments)) == ("function_call", "weather", {"city": "Bern"})
        assert not client.of("response.output_audio.delta") and engine.calls[-1].text_only
        output = {"type": "function_call_output", "call_id": item.call_id, "output": "rain"}
        await client.send("conversation.item.create", item=output)
        engine.script = ["It rains."]
        done = await client.respond(**TEXT_ONLY)
    assert done.output[0].content[0].text == "It rains."
    prompt = engine.calls[-1].prompt["prompt_token_ids"]
    assert len(prompt) > len(engine.calls[0].prompt["prompt_token_ids"])


async def test_a_spoken_sentence_that_a_tool_call_cuts_off_is_kept_as_far_as_it_was_sent(
    address: str, engine: ScriptedOmni
) -> None:
    call = [CALL[at : at + 9] for at in range(0, len(CALL), 9)]
    engine.script = ["Let me look that up.", sound(7200, frames=1), *call, sound(24000, frames=20, finished=True)]
    async with connected(address) as client:
        await client.send("session.update", session={**MANUAL, "tools": [WEATHER]})
        done = await client.respond()
        assert (done.status, [each.type for each in done.output]) == ("completed", ["message", "function_call"])
        await client.send("conversation.item.retrieve", item_id=done.output[0].id)
        found = (await client.until("conversation.item.retrieved")).item
        assert found.content[0].transcript == "Let me", "the sound of 300 ms was sent"


async def test_a_cancelled_answer_is_aborted(address: str, engine: ScriptedOmni) -> None:
    engine.script = ["once ", asyncio.Event().wait, "upon"]
    async with connected(address) as client:
        await client.send("response.create", response=TEXT_ONLY)
        await client.until("response.output_text.delta")
        await client.send("response.cancel")
        done = (await client.until("response.done")).response
        assert done.status_details.reason == "client_cancelled"
        engine.script = ["new"]
        assert (await client.respond(**TEXT_ONLY)).status == "completed"
        assert engine.calls[0].closed


async def test_a_client_that_leaves_aborts_its_answers(app: Any, address: str, engine: ScriptedOmni) -> None:
    left = asyncio.Event()
    engine.script = ["once ", asyncio.Event().wait, "upon"]
    async with connected(address) as client:
        await client.send("response.create", response=TEXT_ONLY)
        await client.until("response.output_text.delta")
        (connection,) = serving(app)._connections
        stop = connection._answers.close

        async def stopped() -> None:
            await stop()
            left.set()

        connection._answers.close = stopped
    await asyncio.wait_for(left.wait(), timeout=10)
    assert engine.calls[0].closed


@pytest.mark.parametrize(
    ("error", "code"),
    [(StageUnavailable("no replica"), "server_unavailable"), (RuntimeError("odd"), "engine_error")],
)
async def test_an_error_of_the_engine_fails_the_response_and_the_session_goes_on(
    address: str, engine: ScriptedOmni, error: Exception, code: str
) -> None:
    engine.script = ["once ", error]
    async with connected(address) as client:
        done = await client.respond(**TEXT_ONLY)
        assert (done.status, done.status_details.error.code) == ("failed", code)
        engine.script = ["yes"]
        assert (await client.respond(**TEXT_ONLY)).status == "completed"


async def test_a_prompt_that_is_too_long_is_shortened_unless_truncation_is_off(
    address: str, engine: ScriptedOmni
) -> None:
    engine.script = ["yes"]
    async with connected(address) as client:
        for _ in range(4):
            await client.say("word " * engine.model_config.max_model_len)
        await client.say("Hello")
        assert (await client.respond(**TEXT_ONLY)).status == "completed"
        for _ in range(4):
            await client.say("word " * engine.model_config.max_model_len)
        await client.send("session.update", session={"type": "realtime", "truncation": "disabled"})
        done = await client.respond(**TEXT_ONLY)
    assert (done.status, done.status_details.error.code) == ("failed", "invalid_prompt")


async def test_a_prompt_that_is_too_long_for_another_stage_is_shortened_too(
    address: str, engine: ScriptedOmni, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, lengths = engine.generate, list[int]()

    def generate(prompt: Any, *args: Any, **kwargs: Any) -> Any:
        lengths.append(len(prompt["prompt_token_ids"]))
        if len(lengths) == 1:
            raise PromptTooLong("messages: too long for a stage", parameter="messages")
        return stock(prompt, *args, **kwargs)

    monkeypatch.setattr(engine, "generate", generate)
    engine.script = ["yes"]
    async with connected(address) as client:
        await client.say("How are you?")
        assert (await client.respond(**TEXT_ONLY)).status == "completed"
    assert len(lengths) == 2 and lengths[1] < lengths[0]


async def test_sessions_and_responses_outside_of_the_conversation_run_at_once(
    address: str, engine: ScriptedOmni
) -> None:
    go = asyncio.Event()
    engine.script = ["one ", go.wait, "two"]
    async with connected(address) as first, connected(address) as second:
        for client in (first, second):
            await client.send("response.create", response=TEXT_ONLY)
            await client.until("response.output_text.delta")
        await first.send("response.create", response={**TEXT_ONLY, "conversation": "none", "metadata": {"a": "b"}})
        await first.until("response.created")
        go.set()
        for client, count in ((first, 2), (second, 1)):
            for _ in range(count):
                assert (await client.until("response.done")).response.output[0].content[0].text == "one two"


async def test_committed_sound_is_transcribed(address: str, engine: ScriptedOmni) -> None:
    engine.script = ["good ", "day"]
    async with connected(address) as client:
        audio = {"input": {"turn_detection": None, "transcription": {"model": "whisper-1", "language": "en"}}}
        await client.send("session.update", session={"type": "realtime", "audio": audio})
        await client.send("input_audio_buffer.append", audio=silence(200))
        await client.send("input_audio_buffer.commit")
        completed = await client.until("conversation.item.input_audio_transcription.completed")
    assert completed.transcript == "good day"
    assert engine.calls[0].params.temperature == 0
    assert len(client.of("conversation.item.input_audio_transcription.delta")) == 2


async def test_four_transcriptions_of_a_session_run_at_once(address: str, engine: ScriptedOmni) -> None:
    go, four, begun = asyncio.Event(), asyncio.Event(), 0

    async def wait() -> None:
        nonlocal begun
        begun += 1
        if begun == 4:
            four.set()
        await go.wait()

    engine.script = [wait, "good day"]
    async with connected(address) as client:
        audio = {"input": {"turn_detection": None, "transcription": {}}}
        await client.send("session.update", session={"type": "realtime", "audio": audio})
        for _ in range(6):
            await client.send("input_audio_buffer.append", audio=silence(200))
            await client.send("input_audio_buffer.commit")
        await asyncio.wait_for(four.wait(), timeout=20)
        engine.script = ["yes"]
        assert (await client.respond(**TEXT_ONLY)).status == "completed"  # a request that begins after all of them
        assert begun == 4
        go.set()
        for _ in range(6):
            await client.until("conversation.item.input_audio_transcription.completed")


async def test_sessions_are_traced_if_the_server_exports_spans(
    address: str, engine: ScriptedOmni, monkeypatch: pytest.MonkeyPatch
) -> None:
    for endpoint, expected in ((None, None), ("grpc://localhost:4317", "auto")):
        monkeypatch.setattr(engine.vllm_config.observability_config, "otlp_traces_endpoint", endpoint)
        async with connected(address) as session:
            assert session.events[0].session.tracing == expected


async def test_a_session_that_requests_it_gets_the_times_of_each_stage(address: str, engine: ScriptedOmni) -> None:
    async def hang() -> None:
        await asyncio.Event().wait()

    async def metrics_of(path: str, script: list[Any], until: str = "") -> Any:
        """The metrics of a response, which is cancelled after an event `until`."""
        engine.script = script
        async with raw(address, path=path) as connection:
            item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]}
            await connection.send(json.dumps({"type": "conversation.item.create", "item": item}))
            await connection.send(json.dumps({"type": "response.create", "response": TEXT_ONLY}))
            async with asyncio.timeout(20):
                async for data in connection:
                    event = json.loads(data)
                    if event["type"] == "response.done":
                        return event["response"].get("metrics")
                    if event["type"] == until:
                        await connection.send(json.dumps({"type": "response.cancel"}))

    asked = "/v1/realtime?return_stage_metrics=true"
    assert await metrics_of("/v1/realtime", ["yes"]) is None
    for script, until in ((["yes"], ""), (["yes", hang, "no"], "response.output_text.delta")):
        metrics = await metrics_of(asked, script, until)
        assert metrics["stages"] == {
            "thinker": {
                "replica": "thinker/0",
                "queued_s": 0.0,
                "waited_s": None,
                "first_output_s": 0.25,
                "last_output_s": 0.5,
                "tokens": 1,
                "cached_tokens": None,
            }
        }
    assert await status_of(address, path="/v1/realtime?return_stage_metrics=1") == 400


async def test_wrong_events_get_errors_with_their_ids(address: str, engine: ScriptedOmni) -> None:
    engine.script, before = ["yes"], refused(engine)
    async with connected(address) as client:
        connection = client.connection
        for text in ("{", '{"type": "response.create", "event_id": "e1", "response": {"temperature": 1}}'):
            await connection._connection.send(text)
        await connection._connection.send(b"\0")
        errors = [json.loads(await connection.recv_bytes())["error"] for _ in range(3)]
        assert [each["code"] for each in errors] == ["invalid_json", "unknown_parameter", "invalid_type"]
        assert [each["event_id"] for each in errors] == [None, "e1", None]
        assert refused(engine) == before + 3
        assert (await client.respond(**TEXT_ONLY)).status == "completed"


# -- turns ------------------------------------------------------------------------------------------------------


@pytest.fixture
def detecting(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving(app), "detectors", ("server_vad",))
    monkeypatch.setattr(serving(app), "speech", Speech)


LOUD = base64.b64encode(b"\x20" * 48 * 200).decode()


@pytest.mark.usefixtures("detecting")
async def test_turns_are_answered_and_interrupt_the_answer(address: str, engine: ScriptedOmni) -> None:
    engine.script = ["one two three four", sound(24_000, frames=9), asyncio.Event().wait]
    async with connected(address) as client:
        assert client.events[0].session.audio.input.turn_detection.type == "server_vad"
        await client.send("input_audio_buffer.append", audio=LOUD)
        await client.send("input_audio_buffer.append", audio=silence(600))
        await client.until("response.output_audio.delta")
        engine.script = ["new", sound(2400, frames=9, finished=True)]
        await client.send("input_audio_buffer.append", audio=LOUD)
        done = (await client.until("response.done")).response
        assert done.status_details.reason == "turn_detected"
        truncated = await client.until("conversation.item.truncated")
        assert truncated.audio_end_ms < 500
        await client.send("input_audio_buffer.append", audio=silence(600))
        done = (await client.until("response.done")).response
    assert done.status == "completed" and done.output[0].content[0].transcript == "new"
    assert engine.calls[0].closed
    kinds = [event.type for event in client.events]
    assert kinds.count("input_audio_buffer.speech_started") == kinds.count("input_audio_buffer.committed") == 2


@pytest.mark.parametrize(("index", "replaced"), [(0, None), (1, None), (0, {})])
async def test_the_first_api_server_logs_why_a_type_of_turn_detection_is_not_available(
    index: int,
    replaced: Any,
    server_parts: tuple[ScriptedOmni, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    omni, find = copy.copy(server_parts[0]), onnx.find_spec
    omni.connections = SimpleNamespace(**{**vars(omni.connections), "client_index": index, "ready_responses": replaced})
    monkeypatch.setattr(omni, "at_stop", [])
    monkeypatch.setattr(onnx, "find_spec", lambda name: None if name == "pipecat" else find(name))
    made = OmniServingRealtime(FastAPI(), ServedModel(omni), None, [])
    assert made.detectors == ("server_vad",)
    reason = "semantic_vad: Smart Turn is not installed; install it with: pip install --no-deps pipecat-ai==1.14.0"
    first = [f"/v1/realtime: turn detection is not available: {reason}"]
    assert [each.getMessage() for each in caplog.records] == (first if (index, replaced) == (0, None) else [])


# -- keys, limits and the end -----------------------------------------------------------------------------------


async def test_a_key_is_needed_in_a_header_or_a_subprotocol(locked: str, caplog: pytest.LogCaptureFixture) -> None:
    async with connected(locked, key="another") as client:
        assert client.events[0].session.model == MODEL
    browser = ["realtime", f"openai-insecure-api-key.{KEY}", "openai-beta.realtime-v1"]
    async with raw(locked, subprotocols=browser) as connection:
        assert connection.subprotocol == "realtime"
    for options in (
        {},
        {"additional_headers": {"Authorization": "Bearer wrong"}},
        {"subprotocols": ["realtime", "openai-insecure-api-key.wrong"]},
        {"subprotocols": ["realtime", "openai-insecure-api-key.ek_AAAA.AAAA"]},
    ):
        assert await status_of(locked, **options) == 401
    assert not caplog.records, "refusals are no errors of the server"
    assert (
        await status_of(locked, path="/v1/realtime?model=x", additional_headers={"Authorization": f"Bearer {KEY}"})
        == 404
    )


async def test_a_client_secret_opens_sessions_with_its_settings(locked: str, engine: ScriptedOmni) -> None:
    client = openai.AsyncOpenAI(base_url=f"http://{locked}/v1", api_key=KEY, max_retries=0)
    secret = await client.realtime.client_secrets.create(
        expires_after={"anchor": "created_at", "seconds": 60},
        session={"type": "realtime", "instructions": "Be brief.", "output_modalities": ["text"]},
    )
    assert secret.session.type == "realtime" and secret.session.instructions == "Be brief."
    async with connected(locked, key=secret.value) as session:
        assert session.events[0].session.output_modalities == ["text"]
    protocols = ["realtime", f"openai-insecure-api-key.{secret.value}"]
    async with raw(locked, subprotocols=protocols) as connection:
        assert json.loads(await connection.recv())["session"]["instructions"] == "Be brief."
    with pytest.raises(openai.BadRequestError) as refused:
        await client.realtime.client_secrets.create(session={"type": "realtime", "prompt": {"id": "a"}})
    assert refused.value.param == "session.prompt"
    async with httpx.AsyncClient() as http:
        tool = {"type": "function", "name": "x", "parameters": {"a": float("inf")}}
        for fields, param in (
            ({"instructions": "\ud800"}, "session.instructions"),
            ({"tools": [tool]}, "session.tools[0].parameters.a"),
            ({"\ud800": 1}, r"session.\ud800"),
        ):
            content = json.dumps({"session": {"type": "realtime", **fields}}).replace("Infinity", "1e999")
            headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
            answer = await http.post(f"http://{locked}/v1/realtime/client_secrets", content=content, headers=headers)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        for key in ("wrong", secret.value):  # a secret makes no other secrets
            headers = {"Authorization": f"Bearer {key}"}
            answer = await http.post(f"http://{locked}/v1/realtime/client_secrets", json={}, headers=headers)
            assert answer.status_code == 401
    await client.close()


@asynccontextmanager
async def limited(app: Any, **limits: Any) -> AsyncIterator[None]:
    found, before = serving(app), serving(app).limits
    found.limits = replace(before, **limits)
    try:
        yield
    finally:
        found.limits = before


async def test_sessions_beyond_the_limit_are_refused(app: Any, address: str, engine: ScriptedOmni) -> None:
    before = refused(engine, "StageUnavailable")
    async with limited(app, sessions=1), connected(address):
        assert await status_of(address) == 503
    assert refused(engine, "StageUnavailable") == before + 1


async def test_a_refused_handshake_is_counted(address: str, engine: ScriptedOmni) -> None:
    before = refused(engine)
    for query, status in (("model=x", 404), ("return_stage_metrics=1", 400)):
        assert await status_of(address, path=f"/v1/realtime?{query}") == status
    assert refused(engine) == before + 2


@pytest.mark.parametrize("name", ["call_id", "intent", "voice"])
async def test_a_query_parameter_that_has_no_effect_is_refused_by_name(address: str, name: str) -> None:
    with pytest.raises(websockets.InvalidStatus) as caught:
        async with raw(address, path=f"/v1/realtime?model={MODEL}&{name}=x"):
            pass
    assert caught.value.response.status_code == 400
    error = json.loads(caught.value.response.body)["error"]
    assert error["param"] == name and error["message"].startswith(f"{name}: ")


async def test_limits_are_those_of_the_configuration(app: Any) -> None:
    assert serving(app).limits == Limits() == Limits.of(schema.Limits())
    configured = schema.Limits(
        realtime_sessions=2,
        realtime_length_s=3.0,
        realtime_idle_s=4.0,
        realtime_events=5,
        realtime_buffer_mib=6,
        realtime_sound_mib=7,
    )
    found = Limits.of(configured)
    assert (found.sessions, found.session_s, found.idle_s) == (2, 3.0, 4.0)
    assert (found.events_per_s, found.burst_events) == (5, 50)
    assert (found.buffer_bytes, found.sound_bytes) == (6 << 20, 7 << 20)


@pytest.mark.parametrize(
    ("limits", "code", "reason"),
    [
        ({"session_s": 0.05}, 1000, "session_expired"),
        ({"idle_s": 0.05}, 1008, "session_idle"),
        ({"burst_events": 3, "events_per_s": 0.001}, 1008, "rate_limit_exceeded"),
    ],
)
async def test_a_session_beyond_a_limit_gets_the_reason(
    app: Any, address: str, engine: ScriptedOmni, limits: dict[str, Any], code: int, reason: str
) -> None:
    before = refused(engine)
    async with limited(app, **limits):
        client = openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key="none")
        async with client.realtime.connect(model=MODEL) as connection:
            for _ in range(4 if "burst_events" in limits else 0):
                await connection.send({"type": "input_audio_buffer.clear"})
            found = Client(connection)
            assert await closed(found) == (code, reason)
        await client.close()
    assert [each.error.code for each in found.of("error")] == [reason]
    assert refused(engine) == before + (reason == "rate_limit_exceeded")


async def test_an_event_that_is_larger_than_the_unsent_bytes_is_sent(app: Any, address: str) -> None:
    async with limited(app, unsent_bytes=10_000), connected(address) as client:
        await client.send("session.update", session=MANUAL)
        await client.until("session.updated")
        await client.send("input_audio_buffer.append", audio=silence(1000))
        await client.send("input_audio_buffer.commit")
        added = await client.until("conversation.item.done")
        await client.send("conversation.item.retrieve", item_id=added.item.id)
        assert len((await client.until("conversation.item.retrieved")).item.content[0].audio) > 10_000


async def test_a_large_event_counts_as_several(app: Any, address: str) -> None:
    async with limited(app, burst_events=20, events_per_s=0.001), connected(address) as client:
        await client.send("input_audio_buffer.append", audio=silence(20_000))
        assert await closed(client) == (1008, "rate_limit_exceeded")


async def test_a_shutdown_ends_sessions_after_their_running_responses(
    app: Any, address: str, engine: ScriptedOmni
) -> None:
    go = asyncio.Event()
    engine.script = ["one ", go.wait, "two"]
    async with connected(address) as idle, connected(address) as busy:
        await busy.send("response.create", response=TEXT_ONLY)
        await busy.until("response.output_text.delta")
        serving(app).drain()
        ended = asyncio.create_task(engine.outlasting())
        assert await closed(idle) == (1001, "server_shutting_down")
        assert [each.error.code for each in idle.of("error")] == ["server_shutting_down"]
        assert not ended.done()
        go.set()
        assert await closed(busy) == (1001, "server_shutting_down")
        await asyncio.wait_for(ended, timeout=10)
        assert busy.of("response.done")[0].response.status == "completed"
