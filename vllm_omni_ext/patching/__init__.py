"""Declare, check, apply and list what we change in vLLM, and what we rely on. Imports no vLLM itself."""
