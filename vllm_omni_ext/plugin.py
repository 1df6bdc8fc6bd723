"""vLLM general plugin: registers the stages' model classes in every vLLM process. Imports nothing at its top."""


def register() -> None:
    """Register the model classes of all families (idempotent).

    vLLM calls this in API, EngineCore, Worker and inspection processes. A module is imported only where a stage of that
    architecture runs. vLLM's own classes are never replaced.
    """
    from vllm.model_executor.models import ModelRegistry

    from vllm_omni_ext.plugins.registry import families, model_classes

    known = ModelRegistry.get_supported_archs()
    for family in families():
        for architecture, target in model_classes(family).items():
            if architecture not in known:
                ModelRegistry.register_model(architecture, target)
