"""Parts that the families Qwen3-Omni and Qwen2.5-Omni share."""
