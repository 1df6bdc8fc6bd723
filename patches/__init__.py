"""The patches of vLLM, by file; `compat.PATCHES` lists them. Plain vLLM runs import `llm_omni_keyword` only."""
