"""Declarations of the family. Pure data."""

from __future__ import annotations

from vllm_omni_ext.plugins.spec import EdgeSpec, ModelFamily, PipelineSpec, StageSpec

AR, PAINTER = "ar", "painter"
ARCHITECTURE = "OptionalTextImage"
PAINTER_ARCHITECTURE = "OptionalTextImagePainter"

HIDDEN = 6
"""Of the painter."""

WEIGHTS = "painter/weights.safetensors"
"""The painter's, in the checkpoint, where vLLM's loader of the language model does not look."""

FAMILY = ModelFamily(
    name="optional_text_image",
    api_version=2,
    architectures=(ARCHITECTURE,),
    pipelines=(
        PipelineSpec(
            name="optional_text_image",
            stages=(
                StageSpec(
                    name=AR,
                    splittable=True,
                    engine={"hf_overrides": "optional_text_image.hf_configs:language_model"},
                    engine_defaults={"dtype": "float32"},
                    cpu_kv_bytes=64 << 20,
                ),
                StageSpec(
                    name=PAINTER,
                    accepts="parts",
                    engine={
                        "hf_overrides": "optional_text_image.hf_configs:painter",
                        "scheduler_cls": "optional_text_image.scheduler.OneAtATime",
                        "worker_cls": "optional_text_image.worker.PainterWorker",
                        "skip_tokenizer_init": True,
                        "enable_prefix_caching": False,
                        "async_scheduling": False,
                        "enforce_eager": True,
                    },
                    engine_defaults={"dtype": "float32"},
                    models={PAINTER_ARCHITECTURE: "optional_text_image.painter:Painter"},
                    params="optional_text_image.payloads:PaintParams",
                    defaults={"steps": 3, "contrast": 1.0},
                ),
            ),
            frontend=AR,
            modalities=("text", "image"),
            edges=(EdgeSpec(AR, PAINTER, "tokens"),),
        ),
    ),
    runtime="optional_text_image.serving:Runtime",
    http="optional_text_image.serving:Http",
    stage_configs="optional_text_image.stage_configs",
    tiny="optional_text_image.tiny:write",
)
