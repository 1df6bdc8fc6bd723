"""Sizes of the checkpoints that this package can write; every number has a name here.

`RELEASED` repeats the numbers of the public `config.json` of Qwen/Qwen3-Omni-30B-A3B-Instruct. `SMALL` and `REAL_VOCAB`
are smaller versions of the same structure. Lower limits: vLLM has no CPU attention kernel for head sizes below 32, and
the hidden and expert sizes of every mixture-of-experts stage must be multiples of 32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

CODEC_SPECIALS = 1024
"""The last 1024 ids of the talker vocabulary are never codes: begin, end, padding, speakers, ..."""


@dataclass(frozen=True, slots=True)
class AudioSizes:
    """The audio tower (mel frames at 100 Hz in, thinker embeddings at 13 Hz out)."""

    d_model: int
    encoder_layers: int
    encoder_attention_heads: int
    encoder_ffn_dim: int
    downsample_hidden_size: int
    n_window_infer: int
    max_source_positions: int = 1500


@dataclass(frozen=True, slots=True)
class VisionSizes:
    """The vision tower. `image_size` (pixels) only sizes the table of position embeddings."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    image_size: int
    deepstack_visual_indexes: tuple[int, ...]
    patch_size: int = 16
    spatial_merge_size: int = 2
    temporal_patch_size: int = 2


@dataclass(frozen=True, slots=True)
class DecoderSizes:
    """A Qwen3 decoder. Expert fields stay 0 for the dense code predictor."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    mrope_section: tuple[int, int, int] | None = None
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0


@dataclass(frozen=True, slots=True)
class VocoderSizes:
    """code2wav: codes in, 24 kHz samples out."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    decoder_dim: int
    sliding_window: int
    upsample_rates: tuple[int, ...]
    upsampling_ratios: tuple[int, ...]
    layer_scale_initial_scale: float
    max_position_embeddings: int = 8000


@dataclass(frozen=True, slots=True)
class Sizes:
    """One complete Qwen3-Omni model.

    `text_vocab_size` counts rows of the thinker's embedding table; 0 means "as many as the tokenizer needs,
    rounded up to a multiple of 64". `codebook_size` is the number of codes in each of `num_code_groups` books.
    """

    name: str
    text_vocab_size: int
    num_code_groups: int
    codebook_size: int
    accept_hidden_layer: int
    audio: AudioSizes
    vision: VisionSizes
    thinker: DecoderSizes
    talker: DecoderSizes
    predictor: DecoderSizes
    code2wav: VocoderSizes
    dtype: str = "float32"

    @property
    def talker_vocab_size(self) -> int:
        """Codes of the first group, then `CODEC_SPECIALS` special ids."""
        return self.codebook_size + CODEC_SPECIALS


_TINY_AUDIO = AudioSizes(
    d_model=32,
    encoder_layers=2,
    encoder_attention_heads=1,
    encoder_ffn_dim=64,
    downsample_hidden_size=8,
    n_window_infer=200,
)
_TINY_VISION = VisionSizes(
    depth=3,
    hidden_size=32,
    intermediate_size=64,
    num_heads=1,
    image_size=128,
    deepstack_visual_indexes=(0, 1),
)
_TINY_THINKER = DecoderSizes(
    hidden_size=96,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    max_position_embeddings=8192,
    mrope_section=(8, 4, 4),
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
)
_TINY_TALKER = replace(_TINY_THINKER, hidden_size=64, num_hidden_layers=2, shared_expert_intermediate_size=64)
_TINY_PREDICTOR = replace(
    _TINY_TALKER,
    mrope_section=None,
    num_experts=0,
    num_experts_per_tok=0,
    moe_intermediate_size=0,
    shared_expert_intermediate_size=0,
)

SMALL = Sizes(
    name="small",
    text_vocab_size=0,
    num_code_groups=4,
    codebook_size=64,
    accept_hidden_layer=3,
    audio=_TINY_AUDIO,
    vision=_TINY_VISION,
    thinker=_TINY_THINKER,
    talker=_TINY_TALKER,
    predictor=_TINY_PREDICTOR,
    code2wav=VocoderSizes(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        decoder_dim=64,
        sliding_window=8,
        upsample_rates=(4, 3, 2, 2),
        upsampling_ratios=(2, 2),
        layer_scale_initial_scale=0.3,
    ),
)

REAL_VOCAB = replace(
    SMALL,
    name="real-vocab",
    text_vocab_size=152064,
    num_code_groups=16,
    codebook_size=2048,
    thinker=replace(_TINY_THINKER, hidden_size=64, max_position_embeddings=65536),
    code2wav=replace(SMALL.code2wav, sliding_window=72, upsample_rates=(8, 5, 4, 3)),
)

RELEASED = Sizes(
    name="released-shape",
    text_vocab_size=152064,
    num_code_groups=16,
    codebook_size=2048,
    accept_hidden_layer=24,
    dtype="bfloat16",
    audio=AudioSizes(
        d_model=1280,
        encoder_layers=32,
        encoder_attention_heads=20,
        encoder_ffn_dim=5120,
        downsample_hidden_size=480,
        n_window_infer=800,
    ),
    vision=VisionSizes(
        depth=27,
        hidden_size=1152,
        intermediate_size=4304,
        num_heads=16,
        image_size=768,
        deepstack_visual_indexes=(8, 16, 24),
    ),
    thinker=DecoderSizes(
        hidden_size=2048,
        intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=65536,
        mrope_section=(24, 20, 20),
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
    ),
    talker=DecoderSizes(
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=20,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=65536,
        mrope_section=(24, 20, 20),
        num_experts=128,
        num_experts_per_tok=6,
        moe_intermediate_size=384,
        shared_expert_intermediate_size=768,
    ),
    predictor=DecoderSizes(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=5,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=32768,
    ),
    code2wav=VocoderSizes(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=8,
        num_attention_heads=16,
        decoder_dim=1536,
        sliding_window=72,
        upsample_rates=(8, 5, 4, 3),
        upsampling_ratios=(2, 2),
        layer_scale_initial_scale=0.01,
    ),
)
