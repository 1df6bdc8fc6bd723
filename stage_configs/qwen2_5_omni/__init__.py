"""Stage configs that come with Qwen2.5-Omni."""
