"""Tiny random checkpoints of Qwen3-Omni."""
