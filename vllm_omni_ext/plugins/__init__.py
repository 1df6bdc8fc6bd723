"""The interfaces for model plugins: spec (data), flow (pure decisions), runtime and http (objects)."""
