"""The parts of vLLM that the talker, the vocoder and the thinker's worker rely on, and the parts they replace."""

from __future__ import annotations

from vllm_omni_ext.patching.spec import Override, seams_in

SEAMS = (
    *seams_in(
        "vllm.model_executor.models.qwen3_omni_moe_thinker",
        ("Qwen3MoeLLMForCausalLM", "df9eefbcc6b2", "the talker's decoder"),
        (
            "Qwen3OmniMoeThinkerForConditionalGeneration._clear_deepstack_input_embeds",
            "bd332670c07e",
            "called after steps that export: a replayed CUDA graph does not",
        ),
        (
            "Qwen3OmniMoeThinkerForConditionalGeneration.get_mrope_input_positions",
            "ba71ba89d280",
            "called without the model's layers: reads its config only",
        ),
    ),
    *seams_in(
        "vllm._custom_ops",
        ("rms_norm", "373e9525f24d", "called by the code predictor and the talker's layers; reads rows without a gap"),
        ("fused_add_rms_norm", "410d1ef85b47", "called: writes the sum into the residual and the norm into the input"),
        ("rotary_embedding", "127c1ee8a4b1", "called: rotates in place; rows may have gaps"),
        ("cpu_fused_moe", "f28f4e083396", "called by the talker's layers on a CPU"),
    ),
    *seams_in(
        "vllm.model_executor.layers.utils",
        ("cpu_unquantized_gemm", "c66dfe9047d0", "imitated: a layer's cpu_linear is called"),
    ),
    *seams_in(
        "vllm.model_executor.models.qwen3_moe",
        ("Qwen3MoeMLP.forward", "319f1d73f1d9", "imitated on a CPU without compilation"),
        ("Qwen3MoeAttention.forward", "a3ac9b284cee", "imitated on a CPU without compilation"),
        ("Qwen3MoeDecoderLayer.forward", "78d5dccaf6cb", "imitated on a CPU without compilation"),
        ("Qwen3MoeSparseMoeBlock.forward", "d7fc67a68479", "imitated on a CPU without compilation"),
    ),
    *seams_in(
        "vllm.model_executor.layers.fused_moe.router.cpu_router",
        ("_softmax_topk", "b7f1b9428dbc", "imitated on a CPU without compilation"),
    ),
    *seams_in(
        "vllm.model_executor.layers.fused_moe.experts.cpu_moe",
        ("CPUUnquantizedExperts.apply", "15f731d44241", "imitated on a CPU without compilation"),
    ),
    *seams_in(
        "vllm.model_executor.layers.rotary_embedding.mrope",
        ("apply_interleaved_rope", "962c89e6d0ed", "imitated on a CPU without compilation"),
        ("MRotaryEmbedding.forward_native", "cdea1d22a786", "imitated on a CPU without compilation"),
    ),
)

OVERRIDES = (
    Override(
        target="vllm.v1.worker.gpu_model_runner:GPUModelRunner._execute_mm_encoder (one object)",
        where="model_plugins/qwen3_omni/thinker_worker.py",
        scope="replicas of a stage with an audio encoder that pads, Model Runner V1",
        why="The encoder pads clips to the longest clip of a call, so the answer would depend on other requests.",
        remove_when="vLLM encodes the clips of each request in a call of its own, or masks the padding",
    ),
    Override(
        target="vllm.v1.worker.gpu.model_states:ModelState.execute_mm_encoder (one object)",
        where="model_plugins/qwen3_omni/thinker_worker.py",
        scope="replicas of a stage with an audio encoder that pads, Model Runner V2",
        why="The same on Model Runner V2.",
        remove_when="vLLM encodes the clips of each request in a call of its own, or masks the padding",
    ),
)
