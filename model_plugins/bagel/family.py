"""Describes BAGEL's stages: `ar` generates text from texts and pictures, `dit` generates pictures. Pure data.

`dit` computes the context (keys and values of the prompt) of a picture itself, so that no KV cache is sent between the
stages. `dit` needs the weights for text in any case: they compute the two marker tokens around a generated picture.
"""

from __future__ import annotations

from vllm_omni_ext.plugins.spec import API_VERSION, EdgeSpec, ModelFamily, PipelineSpec, StageSpec

_HERE = "vllm_omni_ext.model_plugins.bagel"
_ENGINE = {
    "scheduler_cls": f"{_HERE}.stages.scheduler.DitScheduler",
    "worker_cls": "vllm_omni_ext.engine.plain_stage.PlainWorker",
    "enable_prefix_caching": False,
    "async_scheduling": False,
    "enforce_eager": True,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "cpu_offload_gb": 0,
    "quantization": None,
}

_LIMITS = {"max_num_seqs": 4, "max_num_batched_tokens": 4 * 2 * (64 * 64 + 2)}
"""Most running requests, and most tokens of a denoise step: (latent tokens + 2) for each guidance branch of each
running picture. Four pictures of 1024 x 1024 with guidance by the text (two branches) fit into one step."""

_GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
"""Sampling defaults of texts: the reference's, in place of those in the checkpoint's `generation_config.json`."""

_TEXT = {"override_generation_config": _GREEDY}

AR = StageSpec(
    name="ar",
    splittable=True,
    engine={
        "hf_overrides": f"{_HERE}.stages.hf_configs:ar",
        # All tokens of a picture attend to each other, so they are in one step.
        "scheduler_cls": f"{_HERE}.stages.scheduler.picture_scheduler",
        "disable_chunked_mm_input": True,
        "long_prefill_token_threshold": 0,
    },
    engine_defaults=_TEXT,
    cuda_defaults={"max_num_seqs": 128, "max_num_batched_tokens": 8192},
    models={"BagelUnderstanding": f"{_HERE}.stages.understanding:BagelUnderstanding"},
    cpu_kv_bytes=256 << 20,
    gpu_share=0.35,
)
DIT = StageSpec(
    name="dit",
    accepts="parts",
    engine={"hf_overrides": f"{_HERE}.stages.hf_configs:dit", "skip_tokenizer_init": True, **_ENGINE},
    engine_defaults=_LIMITS,
    models={"BagelDit": f"{_HERE}.stages.dit:BagelDit"},
    params=f"{_HERE}.requests.payloads:DitParams",
    gpu_share=0.65,
)
ALL = StageSpec(
    name="dit",
    accepts="parts",
    engine={"hf_overrides": f"{_HERE}.stages.hf_configs:single", **_ENGINE},
    engine_defaults={**_LIMITS, **_TEXT},
    models={"BagelSingle": f"{_HERE}.stages.dit:BagelSingle"},
    params=f"{_HERE}.requests.payloads:DitParams",
)

FAMILY = ModelFamily(
    name="bagel",
    api_version=API_VERSION,
    architectures=("BagelForConditionalGeneration",),
    pipelines=(
        PipelineSpec(
            name="bagel",
            stages=(AR, DIT),
            frontend="ar",
            modalities=("text", "image"),
            inputs=("text", "image"),
            edges=(EdgeSpec("ar", "dit", "tokens"),),
        ),
        PipelineSpec(
            name="bagel_single", stages=(ALL,), frontend="dit", modalities=("text", "image"), inputs=("text", "image")
        ),
    ),
    runtime=f"{_HERE}.requests.runtime:BagelRuntime",
    http=f"{_HERE}.requests.http:BagelHttp",
    facts=f"{_HERE}.stages.facts:facts",
    stage_configs="vllm_omni_ext.stage_configs.bagel",
    chat_template=f"{_HERE}.requests:chat_template.jinja",
    modalities=(f"{_HERE}.requests.thought:THOUGHT",),
    seams=_HERE,
    tiny="vllm_omni_ext.model_plugins.bagel.tiny.bagel:write_bagel",
)
