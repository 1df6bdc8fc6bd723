"""Patches of vLLM, and the comparison of vLLM's code with the code that this package was written against."""
