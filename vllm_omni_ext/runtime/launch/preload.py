"""Modules, classes and caches that the head fills once, before it forks replicas and API servers."""

from __future__ import annotations

import importlib

from vllm.config import VllmConfig
from vllm.model_executor.models import ModelRegistry
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.plugins import load_general_plugins
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.utils.import_utils import resolve_obj_by_qualname

from vllm_omni_ext.plugins.registry import family_of, model_classes
from vllm_omni_ext.plugins.spec import resolve

LATE_IMPORTS = ("vllm.model_executor.layers.quantization.online.base",)
"""Modules that vLLM imports while it loads any model."""


def register_classes(family: str) -> None:
    """Register a family's models as classes. To inspect a name, vLLM would start a process that imports vLLM again."""
    load_general_plugins()  # first, because it registers the plugin's models by name
    for architecture, target in model_classes(family_of(family)).items():
        ModelRegistry.register_model(architecture, resolve(target))


def preload(config: VllmConfig) -> None:
    """Import the worker and fill vLLM's caches of tokenizer and processor once, for all forked processes."""
    resolve_obj_by_qualname(config.parallel_config.worker_cls)
    for name in LATE_IMPORTS:
        importlib.import_module(name)
    model = config.model_config
    if model.skip_tokenizer_init:
        return
    cached_tokenizer_from_config(model)
    if model.is_multimodal_model:
        MULTIMODAL_REGISTRY.create_processor(model).info.get_hf_processor()
