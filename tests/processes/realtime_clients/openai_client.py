"""A conversation of the package `openai` alone: `openai_client.py URL FOLDER`."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from typing import Any

from openai import AsyncOpenAI
from talking import SOUND, Microphone, Seen

URL, FOLDER = sys.argv[1:]
AT = {"type": "object", "properties": {"at": {"type": "string", "enum": ["moon", "sky"]}}, "required": ["at"]}
LOOK = {"type": "function", "name": "look", "description": "Look.", "parameters": AT}
TRANSCRIPTION = {"model": "gpt-4o-mini-transcribe"}
AUDIO = {"input": {"transcription": TRANSCRIPTION, "turn_detection": {"type": "semantic_vad"}}}

seen = Seen()
interrupted: list[str] = []
errors: list[str] = []


async def receive(connection: Any) -> None:
    playing = ""
    async for event in connection:
        seen.take(event.model_dump(exclude_unset=True))
        if event.type == SOUND:
            playing = event.item_id
            seen.sound_ms += len(base64.b64decode(event.delta)) / 48
        elif event.type == "input_audio_buffer.speech_started" and playing and responding():
            interrupted.append(playing)
            await connection.conversation.item.truncate(item_id=playing, content_index=0, audio_end_ms=100)
        elif event.type == "response.function_call_arguments.done":
            seen.calls.append(json.loads(event.arguments)["at"])
            await choose(connection, "none")
            output = {"type": "function_call_output", "call_id": event.call_id, "output": "seven"}
            await connection.conversation.item.create(item=output)
        elif event.type == "response.done" and event.response.output[-1:] and called(event.response):
            await connection.response.create()
        elif event.type == "error":
            errors.append(event.error.message)


def responding() -> bool:
    return seen.count("response.created") > seen.count("response.done")


def called(response: Any) -> bool:
    return bool(response.output[-1].type == "function_call")


async def choose(connection: Any, tool_choice: str) -> None:
    await connection.session.update(session={"type": "realtime", "tools": [LOOK], "tool_choice": tool_choice})


async def main() -> None:
    base_url = URL.replace("ws://", "http://").partition("/realtime")[0]
    client = AsyncOpenAI(base_url=base_url, api_key="none")
    async with client.realtime.connect(model="tiny") as connection:
        receiving = asyncio.create_task(receive(connection))
        session = {"type": "realtime", "instructions": "Be brief.", "audio": AUDIO}
        await connection.session.update(session=session)

        async def send(data: bytes) -> None:
            await connection.input_audio_buffer.append(audio=base64.b64encode(data).decode())

        microphone = Microphone(send, FOLDER)
        await microphone.say("first")
        await microphone.silence(lambda: seen.count("response.done") == 1)
        await microphone.say("long")
        await microphone.silence(lambda: seen.events[-1]["type"] == SOUND)
        await microphone.say("second")
        await microphone.silence(lambda: seen.count("response.done") == 3)
        await choose(connection, "required")
        text = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "say seven"}]}
        await connection.conversation.item.create(item=text)
        await connection.response.create()
        await microphone.silence(lambda: seen.count("response.done") == 5)
        await microphone.say("first")
        await microphone.silence(lambda: seen.count("response.done") == 6)
        await microphone.turns(lambda: seen.count("response.done"))
        receiving.cancel()
    seen.print(interrupted=interrupted, errors=errors)


asyncio.run(main())
