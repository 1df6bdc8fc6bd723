"""Checks BAGEL requests and creates their flows."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any

import msgspec
from vllm.sampling_params import SamplingParams

from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.modalities.base import IMAGE, TEXT
from vllm_omni_ext.model_plugins.bagel.parameters import ImageParameters
from vllm_omni_ext.model_plugins.bagel.prompts import THINK_THEN_ANSWER, THINK_THEN_DRAW
from vllm_omni_ext.model_plugins.bagel.requests import payloads
from vllm_omni_ext.model_plugins.bagel.requests.fields import (
    AUTO,
    LATENTS,
    PREVIEWS,
    SEED,
    THINK,
    THOUGHT_TOKENS,
    Fields,
    RequestedParameters,
    requested_parameters,
)
from vllm_omni_ext.model_plugins.bagel.requests.flow import DrawFlow, ThinkFlow
from vllm_omni_ext.model_plugins.bagel.requests.parts import (
    picture_part,
    split_prompt,
    text_ids,
    text_part,
)
from vllm_omni_ext.model_plugins.bagel.requests.payloads import AR, DIT, Draw, Part, last_size
from vllm_omni_ext.model_plugins.bagel.requests.thought import NAME as THOUGHT
from vllm_omni_ext.model_plugins.bagel.sizes import BagelSizes
from vllm_omni_ext.model_plugins.bagel.stages.files import checkpoint_directory, model_sizes
from vllm_omni_ext.model_plugins.bagel.tokens import Tokens
from vllm_omni_ext.plugins.flow import ForwardFlow
from vllm_omni_ext.plugins.runtime import Capabilities, Planned, Rendered, RequestOptions, RuntimeContext

EDIT = "edit"
SEED_BITS = 63


class BagelRuntime:
    """`plugins.runtime.ModelRuntime` of BAGEL: checks requests in an API server, and creates their flows."""

    fields = Fields

    def __init__(self, context: RuntimeContext) -> None:
        self._context = context
        self._separate = context.frontend == AR

    @cached_property
    def sizes(self) -> BagelSizes:
        """Sizes of the checkpoint."""
        return model_sizes(self._context.model_config)

    @cached_property
    def tokens(self) -> Tokens:
        """The checkpoint's tokenizer."""
        return Tokens.from_directory(checkpoint_directory(self._context.model_config))

    def capabilities(self) -> Capabilities:
        """Return the output modalities, text and pictures, and the stages of each type of request."""
        draw = frozenset((DIT,))
        text, think = (frozenset((AR,)), ThinkFlow.stages) if self._separate else (draw, draw)
        routes = {TEXT: text, IMAGE: draw, THINK: think, EDIT: draw}
        return Capabilities(modalities=(TEXT, IMAGE), default_modalities=(TEXT,), routes=routes)

    def validate(self, options: RequestOptions) -> None:
        """Check all options that do not depend on the prompt; RequestError contains the field's name."""
        for modality in options.modalities:
            if modality not in (TEXT, IMAGE, THOUGHT):
                raise RequestError(
                    f"modalities: '{modality}' is not available; use {TEXT}, {IMAGE}", parameter="modalities"
                )
        requested = self._requested(options)
        if IMAGE not in options.modalities:
            _refuse_fields_of_pictures(options)
            return
        parameters = requested.parameters(edit=False)
        requested.checked(lambda: parameters.image_size(self.sizes, None))
        if TEXT in options.modalities and requested.values.get(THINK) is False:
            message = "with text and image, the text is what the model thinks; leave it out, or ask for one of them"
            raise requested.error(THINK, message)

    def plan(self, request: Rendered, options: RequestOptions) -> Planned:
        """Return the flow of a request.

        Raises:
            RequestError: the prompt is empty or too long, or the pipeline does not support a thought with pictures.
        """
        if IMAGE not in options.modalities:
            return Planned(flow=ForwardFlow(self._context.frontend))
        parts = request.data
        if parts is None:
            parts = split_prompt(request.prompt, request.features, self.tokens)
        self._check_prompt(parts)
        return self._draw(parts, self._requested(options), options)

    def parts(self, pictures: Sequence[Any], ids: Sequence[int]) -> list[Part]:
        """Return the parts of a prompt: pictures, then a text. It resizes the pictures, so it is called in a thread.

        Args:
            pictures: PIL images.
            ids: token ids of the text.
        """
        rule = self.sizes.vae_resize
        return [*(picture_part(picture, rule) for picture in pictures), text_part(ids, self.tokens)]

    def decode(self, stage: str, tensor: Any) -> Any:
        """Return the answer of `dit`, decoded from its output tensor."""
        return msgspec.msgpack.decode(tensor.numpy().tobytes(), type=payloads.DitAnswer)

    def _requested(self, options: RequestOptions) -> RequestedParameters:
        configured = self._context.defaults.get(DIT, {})
        return requested_parameters(options.fields, options.params.get(DIT), configured)

    def _check_prompt(self, parts: Sequence[Part]) -> None:
        ids = text_ids(parts)
        if all(id_ in (self.tokens.start, self.tokens.end) for id_ in ids) and last_size(parts) is None:
            raise RequestError("prompt: must not be empty", parameter="prompt")
        most = self._context.limits.get(DIT)
        if most is not None and len(ids) > most:
            raise RequestError(f"prompt: at most {most} tokens fit, got {len(ids)}", parameter="prompt")

    def _draw(self, parts: list[Part], requested: RequestedParameters, options: RequestOptions) -> Planned:
        size = last_size(parts)
        parameters = requested.parameters(edit=size is not None)
        if size is not None:
            requested.refuse_other_size(size)
        text = TEXT in options.modalities
        thinks = parameters.think or text
        if thinks and size is not None and self._separate:
            raise requested.error(
                THINK,
                "the model cannot think about pictures in this pipeline, because only 'dit' sees all of a picture; "
                "serve with --stage-config bagel_single",
            )
        draw = Draw(
            parts=parts,
            parameters=self._parameters(parameters, requested, size, thinks),
            previews=options.fields.get(PREVIEWS, 0),
            latent=bool(options.fields.get(LATENTS)),
        )
        if not (thinks and self._separate):
            return Planned(flow=DrawFlow(draw, pixels=self.sizes.token_pixels, text=text))
        return self._think(draw, requested, text=text)

    def _parameters(
        self, found: ImageParameters, requested: RequestedParameters, picture: tuple[int, int] | None, thinks: bool
    ) -> payloads.DitParams:
        height, width = requested.checked(lambda: found.image_size(self.sizes, picture))
        seed = found.seed if SEED in requested.values else secrets.randbits(SEED_BITS)
        values = {**asdict(found), "think": thinks, "seed": seed, "height": height, "width": width}
        return payloads.DitParams(**values)

    def _think(self, draw: Draw, requested: RequestedParameters, *, text: bool) -> Planned:
        """Return the flow of a picture whose thought `ar` generates."""
        tokens, pixels = self.tokens, self.sizes.token_pixels
        prompt = [*tokens.text(THINK_THEN_DRAW), *text_ids(draw.parts), tokens.start]
        most = (draw.parameters.max_think_token_n or 1) - 1
        room = self._context.limits.get(AR, len(prompt) + most) - len(prompt)
        if room < 1:
            raise RequestError(f"prompt: {len(prompt)} tokens leave no room to think", parameter="prompt")
        if most > room and THOUGHT_TOKENS in requested.values:
            raise requested.error(THOUGHT_TOKENS, f"after this prompt there is room for {room + 1}")
        if not most:
            return Planned(flow=DrawFlow(msgspec.structs.replace(draw, thought=[]), pixels=pixels, text=text))
        params = SamplingParams(temperature=0.0, max_tokens=min(most, room))
        flow = ThinkFlow(draw, prompt=prompt, end=tokens.end, params=params, pixels=pixels, text=text)
        return Planned(flow=flow)


def _refuse_fields_of_pictures(options: RequestOptions) -> None:
    """Raise RequestError for a field of picture requests in a request for text; `seed` is allowed in both."""
    if options.fields.get(THINK):
        message = f'{THINK}: is for pictures; for a text, begin with a system message "{THINK_THEN_ANSWER}"'
        raise RequestError(message, parameter=THINK)
    for name, value in options.fields.items():
        if value and name not in (SEED, THINK) and value != AUTO:
            raise RequestError(f'{name}: is for pictures; ask for modalities ["image"]', parameter=name)
