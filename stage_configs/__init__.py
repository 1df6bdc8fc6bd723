"""Stage configs (YAML files with a pipeline's settings) of the package's model families, one folder for each family.

Imported as `vllm_omni_ext.stage_configs`.
"""
