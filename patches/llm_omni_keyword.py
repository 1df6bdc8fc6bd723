"""Adds the keyword `omni` to vLLM's offline class: `LLM(model, omni=True)`.

The constructor is wrapped, not the class: `isinstance(x, LLM)`, subclasses, pickling and `inspect.signature` stay as
they are. Without the keyword, the original receives exactly the given arguments. With the keyword, the instance becomes
an `OmniLLM` (a subclass of `LLM`) before vLLM's constructor runs.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm_omni_ext.patching.patch import Patch

KEYWORD = "omni"


def wrap(original: Any) -> Any:
    """Return a replacement of `LLM.__init__` that accepts the keyword `omni`.

    Args:
        original: vLLM's `LLM.__init__`.
    """

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.pop(KEYWORD, False):
            _become_omni(self, *args, **kwargs)
        else:
            original(self, *args, **kwargs)

    return __init__


def _become_omni(self: Any, *args: Any, **kwargs: Any) -> None:
    # Imported here, because a plain LLM(model) must not load this package.
    from vllm.entrypoints.llm import LLM

    from vllm_omni_ext.compat import activate

    activate()
    from vllm_omni_ext.llm import OmniLLM

    if type(self) is LLM:
        self.__class__ = OmniLLM
    elif not isinstance(self, OmniLLM):
        raise TypeError(f"{type(self).__name__}: omni=True works on LLM itself; derive from vllm_omni_ext.llm.OmniLLM")
    OmniLLM.__init__(self, *args, **kwargs)


PATCH = Patch(
    name="llm_omni_keyword",
    target="vllm.entrypoints.llm:LLM.__init__",
    when="as soon as vLLM imports the module, in plain runs too, where it changes nothing",
    why="LLM(model, omni=True): EngineArgs rejects an unknown keyword before vLLM loads any plugin.",
    upstream="none: vLLM has no hook for constructor keywords",
    remove_when="vLLM delegates LLM(omni=True) to a plugin, as it does for `vllm serve --omni`",
    wrap=wrap,
)
