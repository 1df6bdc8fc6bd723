"""Describes Qwen2.5-Omni's stages: thinker (text) -> talker (codes) -> token2wav (sound). Pure data."""

from __future__ import annotations

from vllm_omni_ext.plugins.spec import API_VERSION, EdgeSpec, ModelFamily, PipelineSpec, StageSpec

_HERE = "vllm_omni_ext.model_plugins.qwen2_5_omni"

_STEP_TOKENS = 8192
"""Most tokens of a step on a CUDA machine, fixed so that the planner can compute the size of a step's activations."""

THINKER = StageSpec(
    name="thinker",
    engine={
        "worker_cls": f"{_HERE}.thinker_worker.ThinkerWorker",
        "scheduler_cls": "vllm_omni_ext.engine.scheduler.export_scheduler",
        "pipeline_parallel_size": 1,  # one rank exports hidden states
        # Each step exports the hidden states of its tokens, so none may be computed that is dropped later.
        "async_scheduling": False,
        "speculative_config": None,
    },
    cuda_defaults={"max_num_seqs": 128, "max_num_batched_tokens": _STEP_TOKENS},
    splittable=True,
    cpu_kv_bytes=256 << 20,
    gpu_share=0.6,
)
# Sampling defaults are those of Transformers' `Qwen2_5OmniForConditionalGeneration.generate`.
TALKER = StageSpec(
    name="talker",
    accepts="chunks",
    engine={
        "worker_cls": "vllm_omni_ext.engine.worker.StreamingInputWorker",
        "scheduler_cls": "vllm_omni_ext.engine.scheduler.streaming_input_scheduler",
        "hf_overrides": f"{_HERE}.hf_configs:talker",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "enable_prompt_embeds": True,
        "async_scheduling": False,  # the next input is made of the sampled code
        "pipeline_parallel_size": 1,
    },
    cuda_defaults={"max_num_seqs": 64, "max_num_batched_tokens": _STEP_TOKENS},
    models={"Qwen2_5OmniTalker": f"{_HERE}.talker:Qwen2_5OmniTalker"},
    cpu_kv_bytes=128 << 20,
    defaults={
        "temperature": 0.9,
        "top_k": 40,
        "top_p": 0.8,
        "repetition_penalty": 1.05,
        "max_tokens": 4096,
    },
    gpu_share=0.2,
)
TOKEN2WAV = StageSpec(
    name="token2wav",
    accepts="parts",
    engine={
        "runner": "pooling",
        "worker_cls": "vllm_omni_ext.engine.worker.StageWorker",
        "scheduler_cls": "vllm_omni_ext.engine.scheduler.due_first_scheduler",
        "hf_overrides": f"{_HERE}.hf_configs:token2wav",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "enforce_eager": True,
    },
    cuda_defaults={"max_num_seqs": 64},
    # As in Transformers, which never runs it in half precision.
    engine_defaults={"dtype": "float32", "scheduling_policy": "priority"},
    models={"Qwen2_5OmniToken2Wav": f"{_HERE}.token2wav_model:Qwen2_5OmniToken2Wav"},
    params=f"{_HERE}.messages:Token2WavParams",
    gpu_share=0.1,
)

QWEN2_5_OMNI = PipelineSpec(
    name="qwen2_5_omni",
    stages=(THINKER, TALKER, TOKEN2WAV),
    frontend="thinker",
    modalities=("text", "audio"),
    inputs=("text", "image", "video", "audio"),
    edges=(
        EdgeSpec("thinker", "talker", "tokens", name="text", chunks=(1,)),
        EdgeSpec("thinker", "talker", "tensors", name="hidden_states"),
        # A part of 48 codes are 4 blocks of the diffusion transformer.
        EdgeSpec("talker", "token2wav", "tokens", name="frames", chunks=(48,)),
    ),
)

FAMILY = ModelFamily(
    name="qwen2_5_omni",
    api_version=API_VERSION,
    architectures=("Qwen2_5OmniForConditionalGeneration", "Qwen2_5OmniModel"),
    pipelines=(QWEN2_5_OMNI,),
    runtime=f"{_HERE}.runtime:Qwen2_5OmniRuntime",
    http=f"{_HERE}.http:Qwen2_5OmniHttp",
    facts=f"{_HERE}.facts:facts",
    stage_configs="vllm_omni_ext.stage_configs.qwen2_5_omni",
    tiny=f"{_HERE}.tiny.qwen2_5_omni:write_qwen2_5_omni",
)
