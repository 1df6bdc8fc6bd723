"""A conversation of pipecat's OpenAIRealtimeLLMService: `pipecat_service.py URL FOLDER`."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from pipecat.adapters.llm.schemas.function_schema import FunctionSchema
from pipecat.adapters.llm.schemas.tools_schema import ToolsSchema
from pipecat.frames.frames import (
    ErrorFrame,
    Frame,
    InputAudioRawFrame,
    InterruptionFrame,
    LLMRunFrame,
    LLMUpdateSettingsFrame,
    TTSAudioRawFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.openai.realtime import events
from pipecat.services.openai.realtime.llm import OpenAIRealtimeLLMService
from pipecat.workers.runner import WorkerRunner
from talking import Microphone, Seen

URL, FOLDER = sys.argv[1:]
Settings = OpenAIRealtimeLLMService.Settings

seen = Seen()
interrupted: list[str] = []
errors: list[str] = []


def properties(tool_choice: Any) -> events.SessionProperties:
    detection = events.SemanticTurnDetection()
    transcription = events.InputAudioTranscription(model="gpt-4o-mini-transcribe")
    audio = events.AudioConfiguration(input=events.AudioInput(transcription=transcription, turn_detection=detection))
    return events.SessionProperties(audio=audio, tool_choice=tool_choice)


class Frames(FrameProcessor):
    """Counts frames after the service."""

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if isinstance(frame, TTSAudioRawFrame):
            seen.sound_ms += len(frame.audio) / 48
        elif isinstance(frame, InterruptionFrame):
            interrupted.append(frame.name)
        elif isinstance(frame, ErrorFrame):
            errors.append(frame.error)
        await self.push_frame(frame, direction)


async def main() -> None:
    first = Settings(model="tiny", system_instruction="Be brief.", session_properties=properties("auto"))
    service = OpenAIRealtimeLLMService(api_key="none", base_url=URL.partition("?")[0], settings=first)
    read = events.parse_server_event
    events.parse_server_event = lambda text: seen.take(json.loads(text)) or read(text)  # records them

    async def choose(tool_choice: str) -> None:
        delta = Settings(session_properties=properties(tool_choice))
        await service.queue_frame(LLMUpdateSettingsFrame(delta=delta))

    async def look(params: Any) -> None:
        seen.calls.append(params.arguments["at"])
        updated = seen.count("session.updated")
        await choose("none")
        while seen.count("session.updated") == updated:
            await asyncio.sleep(0.01)
        await params.result_callback("seven")

    service.register_function("look", look)
    at = {"at": {"type": "string", "enum": ["moon", "sky"]}}
    tools = ToolsSchema(standard_tools=[FunctionSchema("look", "Look.", at, ["at"])])
    context = LLMContext([{"role": "user", "content": "say seven"}], tools)
    pair = LLMContextAggregatorPair(context)
    rates = PipelineParams(audio_in_sample_rate=24_000, audio_out_sample_rate=24_000)
    pipeline = Pipeline([pair.user(), service, Frames(), pair.assistant()])
    worker = PipelineWorker(pipeline, params=rates, idle_timeout_secs=None)
    runner = WorkerRunner(handle_sigint=False)
    await runner.add_workers(worker)
    running = asyncio.create_task(runner.run())

    async def send(data: bytes) -> None:
        await worker.queue_frame(InputAudioRawFrame(audio=data, sample_rate=24_000, num_channels=1))

    microphone = Microphone(send, FOLDER)
    await microphone.silence(lambda: seen.count("session.updated") == 1)
    await worker.queue_frame(LLMRunFrame())
    await microphone.silence(lambda: seen.count("response.done") == 1)
    await microphone.say("long")
    await microphone.silence(lambda: seen.events[-1]["type"] == "response.output_audio.delta")
    await microphone.say("second")
    await microphone.silence(lambda: seen.count("response.done") == 3)
    await choose("required")
    await microphone.say("first")
    await microphone.silence(lambda: seen.count("response.done") == 5)
    await microphone.say("first")
    await microphone.silence(lambda: seen.count("response.done") == 6)
    await microphone.turns(lambda: seen.count("response.done"))
    await worker.cancel()
    await running
    seen.print(interrupted=interrupted, errors=errors)


asyncio.run(main())
