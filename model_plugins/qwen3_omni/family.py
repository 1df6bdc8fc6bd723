"""Describes Qwen3-Omni's stages: thinker (text) -> talker (codec frames) -> code2wav (sound). Pure data."""

from __future__ import annotations

from vllm_omni_ext.plugins.spec import API_VERSION, EdgeSpec, ModelFamily, PipelineSpec, StageSpec

_HERE = "vllm_omni_ext.model_plugins.qwen3_omni"

_STEP_TOKENS = 8192
"""Most tokens of a step on a CUDA machine: vLLM's own default for a server on an H100. It is fixed here, so that the
planner can compute the size of a step's activations on every device."""

THINKER = StageSpec(
    name="thinker",
    splittable=True,
    engine={
        "worker_cls": f"{_HERE}.thinker_worker.ThinkerWorker",
        "scheduler_cls": "vllm_omni_ext.engine.scheduler.export_scheduler",
        "pipeline_parallel_size": 1,  # one rank exports hidden states; their layer may be on another
    },
    cuda_defaults={"max_num_seqs": 128, "max_num_batched_tokens": _STEP_TOKENS},
    # In compiled code, M-RoPE is fused with the norms of queries and keys, and the different rounding changes the
    # sound. On a CPU both are the same code.
    custom_ops=("rotary_embedding",),
    cpu_kv_bytes=256 << 20,
    gpu_share=0.6,
)
# Sampling defaults are those of Transformers' `Qwen3OmniMoeForConditionalGeneration.generate`.
TALKER = StageSpec(
    name="talker",
    accepts="chunks",
    engine={
        "worker_cls": "vllm_omni_ext.engine.worker.StreamingInputWorker",
        "scheduler_cls": "vllm_omni_ext.engine.scheduler.streaming_input_scheduler",
        "hf_overrides": f"{_HERE}.hf_configs:talker",
        "skip_tokenizer_init": True,
        "enable_prompt_embeds": True,
        "async_scheduling": False,  # the code predictor needs the sampled token on the host
        "pipeline_parallel_size": 1,  # the last rank makes the frames, and the first one would need them
    },
    cuda_defaults={"max_num_seqs": 64, "max_num_batched_tokens": _STEP_TOKENS},
    engine_defaults={"enable_prefix_caching": True},
    models={"Qwen3OmniTalker": f"{_HERE}.talker:Qwen3OmniTalker"},
    cpu_kv_bytes=128 << 20,
    defaults={
        "temperature": 0.9,
        "top_k": 50,
        "top_p": 1.0,
        "repetition_penalty": 1.05,
        "max_tokens": 4096,
    },
    gpu_share=0.2,
)
CODE2WAV = StageSpec(
    name="code2wav",
    accepts="parts",
    engine={
        "runner": "pooling",
        "worker_cls": "vllm_omni_ext.engine.worker.StageWorker",
        "scheduler_cls": "vllm_omni_ext.engine.scheduler.due_first_scheduler",
        "hf_overrides": f"{_HERE}.hf_configs:code2wav",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "enforce_eager": True,
    },
    cuda_defaults={"max_num_seqs": 64},
    # The waveform has 16 bits, bfloat16 has 8: half precision is audible as noise, and is not faster.
    engine_defaults={"dtype": "float32", "scheduling_policy": "priority"},
    models={"Qwen3OmniCode2Wav": f"{_HERE}.code2wav:Qwen3OmniCode2Wav"},
    gpu_share=0.1,
)

QWEN3_OMNI = PipelineSpec(
    name="qwen3_omni",
    stages=(THINKER, TALKER, CODE2WAV),
    frontend="thinker",
    modalities=("text", "audio"),
    inputs=("text", "image", "video", "audio"),
    edges=(
        EdgeSpec("thinker", "talker", "tokens", name="text", chunks=(1,)),
        EdgeSpec("thinker", "talker", "tensors", name="hidden_states"),
        EdgeSpec("talker", "code2wav", "tokens", name="frames", chunks=(1, 2, 4, 8, 16, 25)),
    ),
)

FAMILY = ModelFamily(
    name="qwen3_omni",
    api_version=API_VERSION,
    architectures=("Qwen3OmniMoeForConditionalGeneration",),
    pipelines=(QWEN3_OMNI,),
    runtime=f"{_HERE}.runtime:Qwen3OmniRuntime",
    http=f"{_HERE}.http:Qwen3OmniHttp",
    facts=f"{_HERE}.facts:facts",
    stage_configs="vllm_omni_ext.stage_configs.qwen3_omni",
    seams=_HERE,
    tiny="vllm_omni_ext.model_plugins.qwen3_omni.tiny.qwen3_omni:write_qwen3_omni",
)
