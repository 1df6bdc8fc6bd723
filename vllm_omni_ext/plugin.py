"""vLLM general plugin: makes our model classes known in every vLLM process. Imports nothing at its top."""

_QWEN3_OMNI = "vllm_omni_ext.model_plugins.qwen3_omni"
MODELS = {
    "Qwen3OmniTalker": f"{_QWEN3_OMNI}.talker:Qwen3OmniTalker",
    "Qwen3OmniCode2Wav": f"{_QWEN3_OMNI}.code2wav:Qwen3OmniCode2Wav",
}
"""Architecture -> "module:class"; a module is imported only where a stage of that architecture runs."""


def register() -> None:
    """Register the stage models (idempotent; runs in API, EngineCore, Worker and inspection processes)."""
    from vllm.model_executor.models import ModelRegistry

    for architecture, target in MODELS.items():
        ModelRegistry.register_model(architecture, target)
