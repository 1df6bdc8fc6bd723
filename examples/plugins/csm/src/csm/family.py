"""The declaration of the model family, its pipeline and its stages. Pure data."""

from csm.payloads import BACKBONE, CODEC
from vllm_omni_ext.plugins.spec import EdgeSpec, ModelFamily, PipelineSpec, StageSpec

BACKBONE_STAGE = StageSpec(
    name=BACKBONE,
    accepts="chunks",
    engine={
        "worker_cls": "vllm_omni_ext.engine.worker.StreamingInputWorker",
        "scheduler_cls": "vllm_omni_ext.engine.scheduler.streaming_input_scheduler",
        "hf_overrides": "csm.hf_configs:backbone",
        "enable_prompt_embeds": True,  # the runner asks the model for rows, also where it has token ids
        "enable_prefix_caching": False,  # the token ids of a prompt are all 0
        "async_scheduling": False,  # the next input needs the frame on the host
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
    },
    engine_defaults={"enforce_eager": True},
    cuda_defaults={"max_num_seqs": 64},
    models={"CsmBackbone": "csm.backbone:CsmBackbone"},
    defaults={"temperature": 0.96, "top_k": 50, "max_tokens": 750},  # 12.5 frames are a second
    cpu_kv_bytes=128 << 20,
    gpu_share=0.7,
)
CODEC_STAGE = StageSpec(
    name=CODEC,
    accepts="parts",
    engine={
        "worker_cls": "vllm_omni_ext.engine.plain_stage.PlainWorker",
        "scheduler_cls": "vllm_omni_ext.engine.plain_stage.PlainScheduler",
        "hf_overrides": "csm.hf_configs:codec",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "enforce_eager": True,
    },
    engine_defaults={"dtype": "float32", "max_num_seqs": 16},
    models={"CsmCodec": "csm.codec:CsmCodec"},
    params="csm.payloads:CodecParams",
    gpu_share=0.2,
)
PIPELINE = PipelineSpec(
    name="csm",
    stages=(BACKBONE_STAGE, CODEC_STAGE),
    frontend=BACKBONE,
    modalities=("audio",),
    edges=(EdgeSpec(BACKBONE, CODEC, "tokens", name="frames", chunks=(1, 2, 4, 8, 16, 25)),),
)
FAMILY = ModelFamily(
    name="csm",
    api_version=2,
    architectures=("CsmForConditionalGeneration",),
    pipelines=(PIPELINE,),
    runtime="csm.runtime:Runtime",
    http="csm.runtime:Http",
    facts="csm.facts:facts",
    chat_template="csm:chat.jinja",
    tiny="csm.tiny:write",
)
