"""Writes chat answers that contain more than text in OpenAI's format, whole or as a stream of these chunks:

    role, content + audio.transcript ..., audio.data ..., audio.expires_at, finish_reason, [usage], [DONE]

vLLM's own handler writes the text. It reads from `ChatAnswer.text_of`, which removes the outputs of other modalities
and ends after the last of them. Thus the usage and `[DONE]` follow all outputs, and an error of any stage becomes
vLLM's error. Only the finish reason is moved to the end: many clients stop reading there. The field `modality` of each
chunk names the modality of its content, as in the project vllm-omni.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from vllm.entrypoints.generate.base.protocol import PerRequestMetrics
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse
from vllm.entrypoints.serve.engine.protocol import CompletionTokenUsageInfo, PromptTokenUsageInfo
from vllm.outputs import CompletionOutput, RequestOutput

from vllm_omni_ext.modalities.base import TEXT, Modality, ModalityStream, OutputChunk, ProgressChunk
from vllm_omni_ext.modalities.chunks import TextChunk
from vllm_omni_ext.observability.request_trace import RequestTrace, as_metrics
from vllm_omni_ext.plugins.runtime import RequestOptions
from vllm_omni_ext.serving.responses import DONE, read_event, with_vllm_errors, write_event

AUDIO_TOKENS = "audio_tokens"


class TextOutputs:
    """Converts the `TextChunk`s that a plugin's flow emits for a request to `RequestOutput`s for vLLM's handler.

    Args:
        delta: each `RequestOutput` has only the text of its chunk; False: all text since the start.
    """

    def __init__(self, request_id: str, *, delta: bool) -> None:
        self._request_id = request_id
        self._delta = delta
        self._text = ""
        self._tokens = 0

    def output(self, prompt: Sequence[int], chunk: TextChunk | None = None) -> RequestOutput:
        """Return the `RequestOutput` for a chunk.

        Args:
            prompt: token ids of the prompt.
            chunk: None: return the final output of a request without text.

        The chunks contain no token ids, so the output has as many zeros as the text has tokens.
        """
        if chunk is not None:
            self._text = chunk.text if self._delta else self._text + chunk.text
            self._tokens = chunk.tokens if self._delta else self._tokens + chunk.tokens
        finished = chunk is None or chunk.last
        reason = "stop" if finished else None
        completion = CompletionOutput(0, self._text, [0] * self._tokens, None, None, finish_reason=reason)
        return RequestOutput(
            request_id=self._request_id,
            prompt=None,
            prompt_token_ids=list(prompt),
            prompt_logprobs=None,
            outputs=[completion],
            finished=finished,
        )


@dataclass(kw_only=True)
class ChatAnswer:
    """Options of one chat request, and the outputs collected for its answer.

    Attributes:
        modalities: modalities of the answer other than text, by name.
        options: options of the request.
        encodings: how to encode each modality of the model, by name; from `Modality.read`.
        stream: the client has requested a stream.
        metrics: the answer contains `metrics`.
        text_fields: see `orchestrator.admission.Ticket`.
        may_call_tool: the request has tools and allows the model to call them.
        prompt: token ids; empty until the request has been rendered.
        parts: the stream yields the dicts and chunks of a `PartStream` instead of server-sent events.
        prompt_audio: number of the prompt's tokens that are sound.
        prompt_image: number of the prompt's tokens that are pictures.
        cached: number of the prompt's tokens that the frontend had in its prefix cache.
        chunks: chunks of other modalities than text, by modality; only filled if the answer is not streamed.
        trace: times of the request in each stage; None until the request starts.
    """

    options: RequestOptions
    modalities: Mapping[str, Modality]
    encodings: Mapping[str, Any]
    stream: bool
    metrics: bool = False
    text_fields: tuple[str, ...] = ()
    may_call_tool: bool = False
    parts: bool = False
    prompt: list[int] = field(default_factory=list)
    prompt_audio: int = 0
    prompt_image: int = 0
    cached: int = 0
    chunks: dict[str, list[OutputChunk]] = field(default_factory=dict)
    trace: RequestTrace | None = None

    def watch(self, trace: RequestTrace) -> None:
        """Store the request's trace for `metrics`. With `n` > 1, this is called for each answer; the last is kept."""
        self.trace = trace

    def stage_metrics(self) -> dict[str, Any]:
        """Return the answer's `metrics`: the times in each stage; empty if the request has not started."""
        return {} if self.trace is None else as_metrics(self.trace)

    async def text_of(
        self,
        source: AsyncGenerator[Any, None],
        request_id: str,
        stream: ChatStream | None = None,
        watch: Callable[[RequestOutput], Awaitable[None]] | None = None,
    ) -> AsyncGenerator[Any, None]:
        """Yield the text outputs of `source`, at least one, for vLLM's handler. Closes `source`.

        Args:
            source: `AsyncOmni.generate`: yields vLLM's `RequestOutput`s with text, and `OutputChunk`s.
            stream: receives the chunks of other modalities; None: the chunks are added to `chunks`.
            watch: called with each text output.

        Raises:
            VLLMError: converted from the error that `source` has raised.
        """
        outputs, has_output = TextOutputs(request_id, delta=self.stream), False
        async with aclosing(with_vllm_errors(source)) as items:
            async for item in items:
                if isinstance(item, TextChunk):
                    item = outputs.output(self.prompt, item)
                if not isinstance(item, OutputChunk):
                    has_output = True
                    self.cached = item.num_cached_tokens or 0
                    if watch is not None:
                        await watch(item)
                    yield item
                elif stream is not None:
                    await stream.take(item)
                else:
                    self.chunks.setdefault(item.modality, []).append(item)
        if not has_output:
            yield outputs.output(self.prompt)
        if stream is not None:
            await stream.end()

    async def complete(self, response: ChatCompletionResponse) -> None:
        """Add the outputs of other modalities, their usage, and `metrics` to vLLM's response, which has the text."""
        if self.metrics:
            stock = {} if response.metrics is None else response.metrics.model_dump(exclude_none=True)
            response.metrics = PerRequestMetrics(**stock, **self.stage_metrics())
        if self.modalities and not response.choices[0].message.tool_calls:  # tool calls have no sound
            await self._assemble(response)
        if self.prompt_audio:
            details = response.usage.prompt_tokens_details or PromptTokenUsageInfo()
            setattr(details, AUDIO_TOKENS, self.prompt_audio)  # the model allows extra fields
            response.usage.prompt_tokens_details = details

    async def _assemble(self, response: ChatCompletionResponse) -> None:
        choice = response.choices[0]
        text = choice.message.content or ""
        whole = [
            await modality.assemble(self.chunks.get(name, ()), self.encodings.get(name), text)
            for name, modality in self.modalities.items()
        ]
        if TEXT not in self.options.modalities and not any(each.keep_text for each in whole):
            choice.message.content = None
        details = response.usage.completion_tokens_details or CompletionTokenUsageInfo()
        for each in whole:
            message = dict(each.message)
            if choice.message.content and "content" in message:
                message["content"] = [{"type": "text", "text": choice.message.content}, *message["content"]]
            for target, values in ((choice.message, message), (choice, each.choice), (details, each.usage)):
                for name, value in values.items():
                    setattr(target, name, value)  # vLLM's models allow extra fields
        if any(each.usage for each in whole):
            response.usage.completion_tokens_details = details
        tokens = sum(tokens_in(each.usage) for each in whole)
        response.usage.completion_tokens = (response.usage.completion_tokens or 0) + tokens
        response.usage.total_tokens += tokens


def tokens_in(usage: Mapping[str, int]) -> int:
    """Return the sum of a usage's `*_tokens` fields. OpenAI includes the tokens of sound in `completion_tokens`."""
    return sum(count for name, count in usage.items() if name.endswith("_tokens"))


class ChatStream:
    """Writes the server-sent events of one streamed answer.

    Args:
        text_only: ends all outputs of the request except its text; called when the text is a tool call.
    """

    def __init__(
        self, answer: ChatAnswer, *, request_id: str, model: str, text_only: Callable[[], Awaitable[None]]
    ) -> None:
        self._answer = answer
        self._text_only = text_only
        self._tool_call: asyncio.Future[None] | None = None
        self._held: list[OutputChunk] | None = [] if answer.may_call_tool else None
        """Chunks held back until the first text, as the answer may be a tool call. None: chunks are sent on arrival."""
        self._request_id = request_id
        self._metrics_due = answer.metrics
        self._head = {"id": request_id, "object": "chat.completion.chunk", "created": int(time.time()), "model": model}
        self._streams: dict[str, ModalityStream] = {
            name: modality.stream(answer.encodings.get(name)) for name, modality in answer.modalities.items()
        }
        self._has_content = False
        self._sent = set[str]()
        self._finish: dict[str, Any] | None = None
        self._out: asyncio.Queue[Any] = asyncio.Queue()

    async def events(
        self, source: AsyncGenerator[Any, None], stock: Callable[[AsyncGenerator[Any, None]], AsyncGenerator[str, None]]
    ) -> AsyncGenerator[Any, None]:
        """Yield the answer's server-sent events; a `PartStream` yields dicts and chunks. Closes `source`.

        Args:
            source: text outputs of the frontend, and chunks of other modalities.
            stock: vLLM's stream generator: takes text outputs, yields vLLM's events.
        """
        text = self._answer.text_of(source, self._request_id, self)
        if not self._streams:  # only text is requested: rewrite vLLM's events
            async with aclosing(text), aclosing(stock(text)) as events:
                async for stock_event in events:
                    yield self._rewritten(stock_event)
            return
        task = asyncio.create_task(self._run(stock(text), text))
        try:
            while (event := await self._out.get()) is not None:
                yield event
            await task
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _run(self, stock: AsyncGenerator[str, None], text: AsyncGenerator[Any, None]) -> None:
        try:
            async with aclosing(text), aclosing(stock):
                async for event in stock:
                    self._out.put_nowait(self._rewritten(event))
                    if self._has_content and self._held is not None:
                        await self._release()
            if self._tool_call is not None:
                await self._tool_call
        finally:
            self._out.put_nowait(None)

    # -- other outputs ------------------------------------------------------------------------------------------

    async def take(self, chunk: OutputChunk) -> None:
        """Send a chunk of another modality than text. The chunk is dropped if the text is a tool call."""
        if self._tool_call is not None:
            return
        if self._held is not None:
            self._held.append(chunk)
            return
        await self._pass_on(chunk)

    async def _pass_on(self, chunk: OutputChunk) -> None:
        if isinstance(chunk, ProgressChunk):
            progress = {"stage": chunk.stage, "done": chunk.done, "total": chunk.total}
            choice = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": None}
            self._put({**self._head, "choices": [choice], "modality": chunk.modality, "progress": progress})
        elif (stream := self._streams.get(chunk.modality)) is not None:
            self._send(chunk.modality, await stream.chunk(chunk))

    async def end(self) -> None:
        """Send the last chunk of each modality, then the finish reason of the text; called after the last output."""
        await self._release()
        self._end_outputs()
        end = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
        self._put(self._finish or {**self._head, "choices": [end], "modality": TEXT})  # vLLM omits it for empty text

    def _end_outputs(self) -> None:
        for name, stream in self._streams.items():
            if self._tool_call is None or name in self._sent:
                self._send(name, stream.end())

    async def _release(self) -> None:
        """Send the chunks that were held back (`_held`); later chunks are sent on arrival."""
        held, self._held = self._held, None
        for chunk in held or ():
            await self.take(chunk)

    def _send(self, modality: str, choices: list[dict[str, Any]]) -> None:
        for choice in choices:
            self._sent.add(modality)
            self._put({**self._head, "choices": [choice], "modality": modality})

    def _put(self, chunk: dict[str, Any]) -> None:
        self._out.put_nowait(self._written(chunk))

    def _written(self, chunk: dict[str, Any]) -> Any:
        return write_event(chunk)

    # -- vLLM's events ------------------------------------------------------------------------------------------

    def _rewritten(self, event: str) -> Any:
        """Return one of vLLM's events with the fields that this class adds, moves or removes."""
        if event == DONE:
            return self._done()
        chunk = read_event(event)
        if "error" in chunk:
            return self._written(chunk)
        if self._streams:
            chunk["created"] = self._head["created"]
        if chunk["choices"]:
            chunk["modality"] = TEXT
            if self._streams:
                self._rewrite_choice(chunk, chunk["choices"][0])
        else:
            self._count(chunk)
        return self._written(chunk)

    def _done(self) -> Any:
        if not self._metrics_due:
            return DONE
        return write_event({**self._head, "choices": [], "metrics": self._answer.stage_metrics()}) + DONE

    def _count(self, chunk: dict[str, Any]) -> None:
        """Add the tokens of sound and pictures, and `metrics`, to vLLM's chunk with the usage, in place."""
        usage = chunk["usage"]
        if self._streams:
            details = usage.setdefault("completion_tokens_details", {"reasoning_tokens": 0})
            for stream in self._streams.values():
                details.update(stream.usage())
                tokens = tokens_in(stream.usage())
                usage["completion_tokens"] = usage.get("completion_tokens", 0) + tokens
                usage["total_tokens"] += tokens
        if self._answer.prompt_audio:
            details = usage.get("prompt_tokens_details") or {}
            usage["prompt_tokens_details"] = {**details, AUDIO_TOKENS: self._answer.prompt_audio}
        if self._metrics_due:
            chunk["metrics"] = {**(chunk.get("metrics") or {}), **self._answer.stage_metrics()}
            self._metrics_due = False

    def _rewrite_choice(self, chunk: dict[str, Any], choice: dict[str, Any]) -> None:
        delta = choice["delta"]
        if delta.get("tool_calls") and self._tool_call is None:
            self._tool_call = asyncio.ensure_future(self._text_only())
        self._has_content |= bool(delta.get("content"))
        for stream in self._streams.values():
            stream.text(delta)
        if TEXT not in self._answer.options.modalities:
            delta.pop("content", None)
        if choice.get("finish_reason") is not None:
            end = {"index": choice["index"], "delta": {}, "logprobs": None}
            end["finish_reason"], choice["finish_reason"] = choice["finish_reason"], None
            end["stop_reason"] = choice.pop("stop_reason", None)
            self._finish = {**chunk, "choices": [end]}


class PartStream(ChatStream):
    """Yields one streamed answer as Python objects (parts), for callers in this process.

    A part is a chunk of vLLM's stream as a dict (`choices`, `usage` or `error`), or an unchanged `OutputChunk`.
    Sound is neither encoded nor copied. The last part is the dict `{}`.
    """

    async def _pass_on(self, chunk: OutputChunk) -> None:
        self._out.put_nowait(chunk)

    def _end_outputs(self) -> None:
        """Do nothing: the last `OutputChunk` of a modality has `last` set."""

    def _written(self, chunk: dict[str, Any]) -> Any:
        return chunk

    def _done(self) -> Any:
        return {}

    def _count(self, chunk: dict[str, Any]) -> None:
        """Add the prompt's numbers of cached tokens, sound tokens and image tokens to the usage of a chunk."""
        answer = self._answer
        counts = {
            "cached_tokens": answer.cached,
            AUDIO_TOKENS: answer.prompt_audio,
            "image_tokens": answer.prompt_image,
        }
        chunk["usage"]["prompt_tokens_details"] = counts
