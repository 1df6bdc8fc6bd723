"""Collects the output items of one response, and returns their events in the protocol's order."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_omni_ext.modalities.base import AUDIO
from vllm_omni_ext.serving.realtime.conversation import (
    COMPLETED,
    IN_PROGRESS,
    INCOMPLETE,
    Item,
    Part,
    is_json,
    is_json_object,
)
from vllm_omni_ext.serving.realtime.events import Event, event
from vllm_omni_ext.serving.realtime.settings import Settings

CANCELLED, FAILED = "cancelled", "failed"

NO_ARGUMENTS = "null"
"""Arguments, besides empty ones, of a function call without arguments; clients and later prompts get {} for both."""

LENGTH = "length"
"""vLLM's finish reason of an answer that a token limit has ended."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Token counts of a response.

    Attributes:
        prompt: all tokens of the prompt.
        prompt_audio: tokens of sound in the prompt.
        prompt_image: tokens of pictures in the prompt.
        cached: tokens of the prompt that were in the prefix cache.
        text: generated tokens of text.
        audio: generated tokens of sound.
    """

    prompt: int = 0
    prompt_audio: int = 0
    prompt_image: int = 0
    cached: int = 0
    text: int = 0
    audio: int = 0

    def public(self) -> dict[str, Any]:
        """Return the `usage` object of the API."""
        return {
            "total_tokens": self.prompt + self.text + self.audio,
            "input_tokens": self.prompt,
            "output_tokens": self.text + self.audio,
            "input_token_details": {
                "text_tokens": self.prompt - self.prompt_audio - self.prompt_image,
                "audio_tokens": self.prompt_audio,
                "image_tokens": self.prompt_image,
                "cached_tokens": self.cached,
            },
            "output_token_details": {"text_tokens": self.text, "audio_tokens": self.audio},
        }


@dataclass(kw_only=True)
class Output:
    """An output item of a response.

    Attributes:
        index: position of the item in the response's `output`.
        open: the last event of the item has not been returned yet.
        held: arguments of a function call that are not in the item yet, as they may become `NO_ARGUMENTS`.
    """

    item: Item
    index: int
    open: bool = True
    held: str = ""


class Response:
    """One response of a session. Its methods add output, and return the events for the client.

    Args:
        settings: settings of the session, overridden by those of the response.
        conversation_id: id of the conversation to which the output items are added; None: they are not added to one.
        context: the conversation items of the prompt.
        of_conversation: `context` is the conversation; False: it is the response's own `input`.
        opened: adds an item to the conversation, and returns the event about it.
        closed: returns the event about the completion of an item in the conversation.
    """

    def __init__(
        self,
        response_id: str,
        settings: Settings,
        *,
        conversation_id: str | None,
        context: list[Item],
        of_conversation: bool,
        metadata: dict[str, str] | None,
        new_id: Callable[[str], str],
        opened: Callable[[Item], Event],
        closed: Callable[[Item], Event],
    ) -> None:
        self.id = response_id
        self.settings = settings
        self.conversation_id = conversation_id
        self.context = context
        self.of_conversation = of_conversation
        self.usage: Usage | None = None
        self.finish_reason = ""
        self._metadata = metadata
        self._new_id = new_id
        self._opened = opened
        self._closed = closed
        self._outputs: list[Output] = []
        self._message: Output | None = None
        self._content_part = Part(type="output_audio" if self.speaks else "output_text", text="")
        self._calls: dict[int, Output] = {}
        self._status = IN_PROGRESS
        self._details: dict[str, Any] | None = None

    @property
    def speaks(self) -> bool:
        """Whether the output is sound."""
        return bool(self.settings["output_modalities"] == [AUDIO])

    @property
    def spoken(self) -> tuple[Item, Part] | None:
        """The output item with sound, and its content part; None: the response has no sound."""
        if self._message is None or not self.speaks:
            return None
        return self._message.item, self._message.item.content[0]

    @property
    def calls_function(self) -> bool:
        """Whether the output has a function call."""
        return bool(self._calls)

    @property
    def cut_off(self) -> bool:
        """Whether the output is incomplete: the token limit ended it, or a function call's arguments are not JSON."""
        calls = (each.item.arguments + each.held for each in self._calls.values())
        return self.finish_reason == LENGTH or not all(map(is_json, calls))

    def public(self) -> dict[str, Any]:
        """Return the response in the format of the API."""
        output = self.settings["audio"]["output"]
        sound = {"output": {"format": output["format"], "voice": output["voice"]}} if self.speaks else {}
        return {
            "object": "realtime.response",
            "id": self.id,
            "status": self._status,
            "status_details": self._details,
            "output": [each.item.public() for each in self._outputs],
            "conversation_id": self.conversation_id,
            "output_modalities": self.settings["output_modalities"],
            "max_output_tokens": self.settings["max_output_tokens"],
            "audio": sound,
            "usage": None if self.usage is None else self.usage.public(),
            "metadata": self._metadata,
        }

    def begin(self) -> list[Event]:
        """Return the events `response.created` and `rate_limits.updated`; this server has no rate limits of tokens."""
        return [event("response.created", response=self.public()), event("rate_limits.updated", rate_limits=[])]

    def text(self, delta: str) -> list[Event]:
        """Add generated text (with sound: a piece of the transcript), and return its events."""
        if not delta:
            return []
        events, output = self._begun_message()
        part = output.item.content[0]
        part.text = (part.text or "") + delta
        kind = "response.output_audio_transcript.delta" if self.speaks else "response.output_text.delta"
        return [*events, event(kind, **self._content(output), delta=delta)]

    def made(self, ms: float, *, last: bool) -> None:
        """Add to the length of the generated sound, which is sent later; `last`: the model has generated all sound."""
        self._content_part.made_ms += ms
        self._content_part.whole = self._content_part.whole or last

    def sound(self, data: bytes, ms: float) -> list[Event]:
        """Add sound of `ms` milliseconds, encoded in the response's format, and return its events."""
        events, output = self._begun_message()
        output.item.content[0].sent_ms += ms
        delta = base64.b64encode(data).decode("ascii")
        return [*events, event("response.output_audio.delta", **self._content(output), delta=delta)]

    def call(self, index: int, name: str | None, arguments: str) -> list[Event]:
        """Add a piece of a function call, and return its events.

        Args:
            index: number of the function call in the response.
            name: name of the function, in the first piece of each function call.
            arguments: the next piece of the arguments.
        """
        events: list[Event] = []
        if index not in self._calls:
            events += [*self._fill_calls(), *self._close_calls()]
            item = Item(
                id=self._new_id("item"),
                type="function_call",
                status=IN_PROGRESS,
                name=name or "",
                call_id=self._new_id("call"),
            )
            self._calls[index] = self._output(item, events)
        output = self._calls[index]
        output.held += arguments
        if output.held and (output.item.arguments or not NO_ARGUMENTS.startswith(output.held.strip())):
            events.append(self._add_arguments(output))
        return events

    def generated(self, finish_reason: str, usage: Usage) -> list[Event]:
        """Record that the model has finished. Return the last events of function calls, except at the token limit.

        Generated sound may still be unsent. Function calls are closed without a wait for the sound.
        """
        self.finish_reason, self.usage = finish_reason, usage
        events = [] if finish_reason == LENGTH else self._fill_calls()
        return events if self.cut_off else [*events, *self._close_calls()]

    def end(self, status: str, details: dict[str, Any] | None = None) -> list[Event]:
        """End the response; return the last events of its open items, and `response.done`.

        Args:
            status: "completed", "cancelled", "failed" or "incomplete".
            details: `status_details` without `type`; None: the response has no `status_details`.
        """
        events = []
        for output in self._outputs:
            if output.open:
                events += self._close(output, COMPLETED if status == COMPLETED else INCOMPLETE)
        self._status = status
        self._details = None if details is None else {"type": status, **details}
        return [*events, event("response.done", response=self.public())]

    # -- output items -------------------------------------------------------------------------------------------

    def _begun_message(self) -> tuple[list[Event], Output]:
        if self._message is not None:
            return [], self._message
        events: list[Event] = []
        item = Item(id=self._new_id("item"), type="message", role="assistant", status=IN_PROGRESS)
        self._message = self._output(item, events)
        item.content.append(self._content_part)
        part = self._part(self._content_part)
        events.append(event("response.content_part.added", **self._content(self._message), part=part))
        return events, self._message

    def _output(self, item: Item, events: list[Event]) -> Output:
        """Append `item` to the response's output, and append the events about it to `events`."""
        output = Output(item=item, index=len(self._outputs))
        self._outputs.append(output)
        events.append(
            event("response.output_item.added", response_id=self.id, output_index=output.index, item=item.public())
        )
        if self.conversation_id is not None:
            events.append(self._opened(item))
        return output

    def _add_arguments(self, output: Output) -> Event:
        arguments, output.held = output.held, ""
        output.item.arguments += arguments
        kind = "response.function_call_arguments.delta"
        return event(kind, **self._place(output), call_id=output.item.call_id, delta=arguments)

    def _fill_calls(self) -> list[Event]:
        """Add the arguments {} to calls that the model has finished without arguments, and return their events."""
        events = []
        for each in self._calls.values():
            if each.open and not each.item.arguments and each.held.strip() in ("", NO_ARGUMENTS):
                each.held = "{}"
                events.append(self._add_arguments(each))
        return events

    def _close_calls(self) -> list[Event]:
        events = []
        for output in self._calls.values():
            if output.open:
                events += self._close(output, COMPLETED)
        return events

    def _close(self, output: Output, status: str) -> list[Event]:
        output.open = False
        item, events = output.item, list[Event]()
        if item.type == "function_call":
            if output.held:
                events.append(self._add_arguments(output))
            status = status if is_json_object(item.arguments) else INCOMPLETE
            events.append(
                event(
                    "response.function_call_arguments.done",
                    **self._place(output),
                    call_id=item.call_id,
                    name=item.name,
                    arguments=item.arguments,
                )
            )
        else:
            part, content = item.content[0], self._content(output)
            if self.speaks:
                events.append(event("response.output_audio.done", **content))
                events.append(event("response.output_audio_transcript.done", **content, transcript=part.text))
            else:
                events.append(event("response.output_text.done", **content, text=part.text))
            events.append(event("response.content_part.done", **content, part=self._part(part)))
        item.status = status
        if self.conversation_id is not None:
            events.append(self._closed(item))
        events.append(
            event("response.output_item.done", response_id=self.id, output_index=output.index, item=item.public())
        )
        return events

    def _place(self, output: Output) -> dict[str, Any]:
        return {"response_id": self.id, "item_id": output.item.id, "output_index": output.index}

    def _content(self, output: Output) -> dict[str, Any]:
        return {**self._place(output), "content_index": 0}

    def _part(self, part: Part) -> dict[str, Any]:
        return {"type": "audio", "transcript": part.text} if self.speaks else {"type": "text", "text": part.text}
