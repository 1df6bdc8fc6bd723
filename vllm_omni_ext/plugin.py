"""vLLM general plugin: makes our model classes known in every vLLM process. Imports nothing at its top."""


def register() -> None:
    """Register the stage models (idempotent; runs in API, EngineCore, Worker and inspection processes)."""
