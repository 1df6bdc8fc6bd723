"""Declarations of the family. Pure data."""

from __future__ import annotations

from vllm_omni_ext.plugins.spec import ModelFamily, PipelineSpec, StageSpec

VOICEBOX = "voicebox"
ARCHITECTURE = "PlainTts"

FAMILY = ModelFamily(
    name="plain_tts",
    api_version=2,
    architectures=(ARCHITECTURE,),
    pipelines=(
        PipelineSpec(
            name="plain_tts",
            stages=(
                StageSpec(
                    name=VOICEBOX,
                    accepts="parts",
                    engine={
                        "scheduler_cls": "vllm_omni_ext.engine.plain_stage.PlainScheduler",
                        "worker_cls": "vllm_omni_ext.engine.plain_stage.PlainWorker",
                        "enable_prefix_caching": False,
                        "async_scheduling": False,
                        "enforce_eager": True,
                    },
                    engine_defaults={"dtype": "float32"},
                    models={ARCHITECTURE: "plain_tts.voicebox:Voicebox"},
                    params="plain_tts.payloads:ToneParams",
                ),
            ),
            frontend=VOICEBOX,
            modalities=("audio",),
        ),
    ),
    runtime="plain_tts.serving:Runtime",
    http="plain_tts.serving:Http",
    tiny="plain_tts.tiny:write",
)
