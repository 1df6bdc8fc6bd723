"""A conversation of openai-agents: `openai_agents.py URL FOLDER`."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import Any, Literal

from agents import function_tool
from agents.realtime import RealtimeAgent, RealtimeRunner, RealtimeSession
from agents.realtime.model_inputs import RealtimeModelSendSessionUpdate
from talking import Microphone, Seen

URL, FOLDER = sys.argv[1:]
SETTINGS: Any = {"model_name": "tiny"}

seen = Seen()
interrupted: list[str] = []
errors: list[str] = []
live: list[RealtimeSession] = []


async def choose(tool_choice: str) -> None:
    settings = {**SETTINGS, "instructions": "Be brief.", "tools": [look], "tool_choice": tool_choice}
    await live[0].model.send_event(RealtimeModelSendSessionUpdate(session_settings=settings))


@function_tool
async def look(at: Literal["moon", "sky"]) -> str:
    """Look at the moon or the sky."""
    seen.calls.append(at)
    await choose("none")
    return "seven"


async def receive(session: RealtimeSession) -> None:
    async for event in session:
        if event.type == "audio":
            seen.sound_ms += len(event.audio.data) / 48
        elif event.type == "audio_interrupted":
            interrupted.append(event.item_id)
        elif event.type == "error":
            errors.append(str(event.error))
        elif event.type == "raw_model_event" and event.data.type == "raw_server_event":
            seen.take(event.data.data)


async def main() -> None:
    agent = RealtimeAgent(name="tiny", instructions="Be brief.", tools=[look])
    runner = RealtimeRunner(agent, config={"model_settings": SETTINGS})
    async with await runner.run(model_config={"url": URL, "api_key": "none"}) as session:
        live.append(session)
        receiving = asyncio.create_task(receive(session))
        microphone = Microphone(session.send_audio, FOLDER)
        await microphone.say("first")
        await microphone.silence(lambda: seen.count("response.done") == 1)
        await microphone.say("long")
        await microphone.silence(lambda: seen.events[-1]["type"] == "response.output_audio.delta")
        await microphone.say("second")
        await microphone.silence(lambda: seen.count("response.done") == 3)
        await choose("required")
        await session.send_message("say seven")
        await microphone.silence(lambda: seen.count("response.done") == 5)
        await microphone.say("first")
        await microphone.silence(lambda: seen.count("response.done") == 6)
        await microphone.turns(lambda: seen.count("response.done"))
        receiving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await receiving
    seen.print(interrupted=interrupted, errors=errors)


asyncio.run(main())
