"""The parts of vLLM that the stages rely on, and the parts that they replace."""

from __future__ import annotations

from vllm_omni_ext.patching.spec import Override, seams_in

SEAMS = (
    *seams_in(
        "vllm.model_executor.models.bagel",
        ("BagelForConditionalGeneration", "990a9fff6c1e", "base class: text, ViT, connector, loading"),
    ),
    *seams_in(
        "vllm.model_executor.models.siglip",
        ("SiglipVisionTransformer.__init__", "7c52b54c832a", "its parts are called one by one"),
        ("SiglipVisionEmbeddings.__init__", "a7555eb4321d", "its parts are called one by one"),
        ("SiglipEncoder.forward", "0078399fb889", "called"),
    ),
    *seams_in(
        "vllm.model_executor.models.interfaces",
        ("SupportsMRoPE", "3351e170f9e3", "base class: positions of a prompt"),
    ),
    *seams_in(
        "vllm.transformers_utils.configs.bagel",
        ("BagelConfig", "a58cf489cfb4", "its sizes are corrected in place"),
    ),
    *seams_in(
        "vllm.transformers_utils.model_arch_config_convertor",
        (
            "ModelArchConfigConvertorBase.is_mm_prefix_lm",
            "fac1e9547fb1",
            "a BAGEL config has full attention in pictures",
        ),
    ),
    *seams_in(
        "vllm.model_executor.layers.attention.attention",
        ("Attention.get_attn_backend", "39dad8ec8ec3", "returns the attribute that is replaced on a CPU"),
        ("Attention.get_kv_cache_spec", "44cd47bb00fa", "reads the attribute that is replaced on a CPU"),
    ),
    *seams_in(
        "vllm.v1.attention.backend",
        ("CommonAttentionMetadata", "718125fc973e", "read and replaced: a step divided at the borders of pictures"),
    ),
    *seams_in(
        "vllm.v1.attention.backends.cpu_attn",
        ("CPUAttentionBackend", "0fe2d9ff5c69", "base class"),
        ("CPUAttentionMetadataBuilder.build", "6692e60cc1b1", "overridden, calls the original"),
        (
            "CPUAttentionBackendImpl.forward",
            "1f5b8fc903f4",
            "takes one causal flag for each sequence; keys are written",
        ),
    ),
    *seams_in(
        "vllm.v1.worker.gpu_model_runner",
        ("GPUModelRunner._build_attention_metadata", "687a17261100", "says which ranges of a prompt are pictures"),
        ("GPUModelRunner.initialize_attn_backend", "75d862bbe55b", "asks each layer for its backend"),
    ),
    *seams_in(
        "vllm.v1.core.sched.scheduler",
        ("Scheduler._try_schedule_encoder_inputs", "516ddc11c8ca", "overridden, calls the original with fewer tokens"),
    ),
    *seams_in(
        "vllm.multimodal.processing.processor",
        ("BaseMultiModalProcessor.apply", "e0ea1484dc17", "overridden, calls the original"),
        ("BaseMultiModalProcessor._call_hf_processor", "f350b9d89b19", "overridden"),
        ("BaseMultiModalProcessor._get_hf_mm_inputs", "b1573a820bdc", "makes the argument of what is overridden"),
    ),
    *seams_in(
        "vllm.multimodal.processing.context",
        ("BaseProcessingInfo.get_data_parser", "8e7c4dd02e5c", "overridden"),
    ),
    *seams_in(
        "vllm.multimodal.processing.dummy_inputs",
        ("BaseDummyInputsBuilder._get_dummy_images", "c89b75928461", "called"),
    ),
    *seams_in(
        "vllm.multimodal.parse",
        ("MultiModalDataParser._parse_image_data", "8c2a2429dda9", "overridden, calls the original"),
        ("ProcessorBatchItems.get_processor_data", "d47b8d715a8d", "makes the argument of what is overridden"),
    ),
    *seams_in("vllm.multimodal.image", ("normalize_image", "cc3805fd28ce", "called: turns a photo upright")),
    *seams_in(
        "vllm.v1.sample.ops.topk_topp_sampler",
        ("apply_top_k_top_p", "ebe989629d96", "called by the stage that makes pictures, for its texts"),
    ),
    *seams_in(
        "vllm.model_executor.layers.utils",
        ("apply_penalties", "9e4869c1ab3a", "called by the stage that makes pictures, for its texts"),
    ),
    *seams_in(
        "vllm.v1.attention.backends.fa_utils",
        ("get_flash_attn_version", "dcb11279cf87", "called on CUDA"),
        ("is_flash_attn_varlen_func_available", "41f33edf45fc", "called on CUDA"),
    ),
    *seams_in(
        "vllm.vllm_flash_attn.flash_attn_interface",
        ("flash_attn_varlen_func", "660da80685b0", "called on CUDA, without a paged cache"),
    ),
)

OVERRIDES = (
    Override(
        target="vllm.model_executor.layers.attention.attention:Attention.attn_backend (of each layer)",
        where="model_plugins/bagel/stages/understanding.py",
        scope="replicas of the stage ar on a CPU",
        why="On a CPU, tokens of a picture would not attend to later ones; vLLM gives no warning.",
        remove_when="vLLM's backend for CPUs supports ranges with full attention in a prompt",
    ),
)
