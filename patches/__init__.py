"""What this package changes in vLLM, in the order of application: one file a patch, all of them listed in ALL."""

from __future__ import annotations

from vllm_omni_ext.patches.llm_omni_keyword import PATCH as LLM_OMNI_KEYWORD
from vllm_omni_ext.patching.spec import Patch

ALL: tuple[Patch, ...] = (LLM_OMNI_KEYWORD,)
