"""Qwen3-Omni: thinker (text) -> talker (codec frames) -> code2wav (sound). Pure data."""

from __future__ import annotations

from vllm_omni_ext.model_plugins.registry import EdgeSpec, PipelineSpec, StageSpec

_HERE = "vllm_omni_ext.model_plugins.qwen3_omni"

_STEP_TOKENS = 8192
"""Tokens of a step on a CUDA machine: vLLM's own default for a server on an H100. It is written down so that the plan
knows the size of a step's activations on every device."""

THINKER = StageSpec(
    name="thinker",
    text_stage=True,
    engine={
        "worker_cls": "vllm_omni_ext.engine.worker.ExportWorker",
        "scheduler_cls": "vllm_omni_ext.engine.unheard.export_scheduler",
        "pipeline_parallel_size": 1,  # rows leave from one rank, and their layer may be on another
    },
    cuda_defaults={"max_num_seqs": 128, "max_num_batched_tokens": _STEP_TOKENS},
    # Compiled from its operators, M-RoPE is fused with the norms of queries and keys, and rounds so differently that
    # the sound changes. On a CPU both are the same code.
    custom_ops=("rotary_embedding",),
    cpu_kv_bytes=256 << 20,
    gpu_share=0.6,
)
# Sampling defaults are those of Transformers' `Qwen3OmniMoeForConditionalGeneration.generate`.
TALKER = StageSpec(
    name="talker",
    engine={
        "worker_cls": "vllm_omni_ext.engine.worker.FeedWorker",
        "scheduler_cls": "vllm_omni_ext.engine.scheduler.feed_scheduler",
        "hf_overrides": f"{_HERE}.hf_configs:talker",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "enable_prompt_embeds": True,
        "async_scheduling": False,  # the code predictor needs the sampled token on the host
        "pipeline_parallel_size": 1,  # the last rank makes the frames, and the first one would have to read them
    },
    cuda_defaults={"max_num_seqs": 64, "max_num_batched_tokens": _STEP_TOKENS},
    cpu_kv_bytes=128 << 20,
    sampling={
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
    engine={
        "runner": "pooling",
        "worker_cls": "vllm_omni_ext.engine.worker.LeanWorker",
        "hf_overrides": f"{_HERE}.hf_configs:code2wav",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "enforce_eager": True,
    },
    cuda_defaults={"max_num_seqs": 64},
    # The waveform has 16 bits, bfloat16 8: half precision is audible as noise, and costs as much time.
    engine_defaults={"dtype": "float32"},
    gpu_share=0.1,
)

QWEN3_OMNI = PipelineSpec(
    name="qwen3_omni",
    architectures=("Qwen3OmniMoeForConditionalGeneration",),
    stages=(THINKER, TALKER, CODE2WAV),
    edges=(
        EdgeSpec("thinker", "talker", "tokens", name="text", chunks=(1,)),
        EdgeSpec("thinker", "talker", "tensors", name="rows"),
        EdgeSpec("talker", "code2wav", "tokens", name="frames", chunks=(1, 2, 4, 8, 16, 25)),
    ),
    output_modalities=("text", "audio"),
    request_plugin=f"{_HERE}.requests:Qwen3OmniRequests",
    facts=f"{_HERE}.facts:facts",
    memory=f"{_HERE}.memory:memory",
)
