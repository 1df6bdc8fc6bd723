"""Stage configs that come with the package: a folder a model family. Imported as `vllm_omni_ext.stage_configs`."""
