"""What this package changes in vLLM, in the order of application: one file a patch, all of them listed in ALL."""

from __future__ import annotations

from vllm_omni_ext.patches.engine_input_sockets import PATCH as ENGINE_INPUT_SOCKETS
from vllm_omni_ext.patches.engine_output_sockets import PATCH as ENGINE_OUTPUT_SOCKETS
from vllm_omni_ext.patches.llm_omni_keyword import PATCH as LLM_OMNI_KEYWORD
from vllm_omni_ext.patching.spec import Patch

ALL: tuple[Patch, ...] = (LLM_OMNI_KEYWORD, ENGINE_INPUT_SOCKETS, ENGINE_OUTPUT_SOCKETS)
