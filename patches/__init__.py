"""The patches of vLLM, one file each; `compat.PATCHES` lists them. A plain vLLM run imports `llm_omni_keyword` only."""
