"""vLLM general plugin: registers the stages' model classes in every vLLM process. Imports nothing at its top."""


def register() -> None:
    """Register the model classes of all families; repeated calls do nothing.

    vLLM calls this in API server, EngineCore, worker and model inspection processes. A model's module is imported only
    in a process that runs the model. vLLM's own classes are not replaced.
    """
    from vllm.model_executor.models import ModelRegistry

    from vllm_omni_ext.plugins.registry import families, model_classes

    known = ModelRegistry.get_supported_archs()
    for family in families():
        for architecture, target in model_classes(family).items():
            if architecture not in known:
                ModelRegistry.register_model(architecture, target)
