"""Tiny random checkpoints of Qwen2.5-Omni."""
