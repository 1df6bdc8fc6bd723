"""Stage configs that come with Qwen3-Omni."""
