"""What the family declares. Pure data."""

from __future__ import annotations

from vllm_omni_ext.plugins.spec import API_VERSION, ModelFamily, PipelineSpec, StageSpec

DENOISER = "denoiser"
ARCHITECTURE = "OneStageImage"

FAMILY = ModelFamily(
    name="onestage_image",
    api_version=API_VERSION,
    architectures=(ARCHITECTURE,),
    pipelines=(
        PipelineSpec(
            name="onestage_image",
            stages=(
                StageSpec(
                    name=DENOISER,
                    accepts="parts",
                    engine={
                        "scheduler_cls": "vllm_omni_ext.engine.plain_stage.PlainScheduler",
                        "worker_cls": "vllm_omni_ext.engine.plain_stage.PlainWorker",
                        "enable_prefix_caching": False,
                        "async_scheduling": False,
                        "enforce_eager": True,
                    },
                    engine_defaults={"dtype": "float32"},
                    models={ARCHITECTURE: "onestage_image.denoiser:Denoiser"},
                    params="onestage_image.payloads:DenoiseParams",
                    defaults={"steps": 4},
                    payloads=("onestage_image.payloads:Paint",),
                ),
            ),
            frontend=DENOISER,
            modalities=("image",),
        ),
    ),
    runtime="onestage_image.serving:Runtime",
    http="onestage_image.serving:Http",
    tiny="onestage_image.tiny:write",
)
