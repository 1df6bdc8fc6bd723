"""The patches of vLLM, by file; `compat.PATCHES` lists them. Without omni, vLLM imports `llm_omni_keyword` only."""
