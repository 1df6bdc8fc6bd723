"""Applies patches of vLLM, and compares vLLM's code with the code that this package was tested with."""
