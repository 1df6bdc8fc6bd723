"""Sorts the keywords of `LLM.generate` and `LLM.chat`; TypeError for a keyword that nothing uses."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm.sampling_params import SamplingParams

from vllm_omni_ext.plugins.spec import SAMPLING_PARAMS
from vllm_omni_ext.serving.options import FRONTEND_SAMPLING, SEED, stage_param_names
from vllm_omni_ext.topology.plan import Plan

MAX_TOKENS = ("max_tokens", "max_completion_tokens")
"""vLLM's name of the parameter for the longest answer, and OpenAI's name."""


class Keywords:
    """The keywords of one call, sorted into request fields, arguments of the renderer, and stage parameters.

    Args:
        call: `generate` or `chat`, for error messages.
        more: the keywords for which `generate` or `chat` has no parameter.
        plan: the plan of the deployment, with the names and parameter types of its stages.
        fields: names of the model's request fields.
        render: vLLM's method that renders one prompt.
        known: names of the parameters of `generate` or `chat`, for suggestions in errors.

    Attributes:
        fields: values of the model's request fields, by name.
        rendering: keywords for `render`.
        params: parameters that keywords set, by stage.

    Raises:
        TypeError: a keyword is unknown, or the frontend has parameters in two forms.
    """

    def __init__(
        self,
        call: str,
        more: Mapping[str, Any],
        plan: Plan,
        *,
        fields: Sequence[str],
        render: Callable[..., Any],
        known: Sequence[str],
    ) -> None:
        self.fields: dict[str, Any] = {}
        self.rendering: dict[str, Any] = {}
        self.params: dict[str, dict[str, Any]] = {}
        self._seed: Any = None
        self._frontend = plan.frontend().model_stage
        stages = {stage.model_stage: stage for stage in plan.model_stages()}
        sampled = plan.frontend().params_type == SAMPLING_PARAMS
        sampling = (*FRONTEND_SAMPLING, MAX_TOKENS[1]) if sampled else (SEED,)
        rendered = [name for name in list(inspect.signature(render).parameters)[1:] if name not in stages]
        own: dict[str, Any] = {}
        for name, value in more.items():
            if name in fields:
                self.fields[name] = value
            elif name in stages:
                if value is not None:
                    self.params[name] = dict(value) if isinstance(value, Mapping) else value
            elif name == SEED:
                self._seed = value
            elif name in sampling:
                if value is not None:
                    own[MAX_TOKENS[0] if name in MAX_TOKENS else name] = value
            elif name in rendered:
                self.rendering[name] = value
            else:
                raise TypeError(_unknown(call, name, [*known, *fields, *stages, *sampling, SEED, *rendered]))
        if own:
            if self._frontend in self.params:
                raise TypeError(f"{call}() got {', '.join(own)} both as keywords and in {self._frontend}={{...}}")
            self.params[self._frontend] = own
        if self._seed is not None:  # for each stage with a seed parameter that the call does not set for the stage
            for name, stage in stages.items():
                if SEED not in stage_param_names(stage):
                    continue
                if isinstance(self.params.setdefault(name, {}), dict):
                    self.params[name].setdefault(SEED, self._seed)
        self._call = call

    def over(self, params: Any) -> Any:
        """Return the parameters of one prompt: those in `sampling_params`, and those that keywords set.

        Args:
            params: the prompt's value of `sampling_params`, or None.

        Returns:
            Parameters by stage; `params` itself if no keyword sets parameters.

        Raises:
            TypeError: `sampling_params` and keywords set parameters of the same stage.
        """
        if not self.params:
            return params
        given = {self._frontend: params} if isinstance(params, SamplingParams) else dict(params or {})
        if both := sorted(self.params.keys() & {name for name, each in given.items() if each is not None}):
            raise TypeError(f"{self._call}() got parameters of {', '.join(both)} in sampling_params and as keywords")
        return {**given, **self.params}


def _unknown(call: str, name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    advice = f"; did you mean '{close[0]}'?" if close else ""
    return f"{call}() got an unexpected keyword argument '{name}'{advice}"
