"""Declares, checks, applies and lists patches of vLLM, and the vLLM code that this package relies on."""
