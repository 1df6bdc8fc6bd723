"""Writes a tiny random checkpoint, from Transformers' model class."""

from pathlib import Path

import torch
from transformers import CsmConfig, CsmForConditionalGeneration

from csm.runtime import MARKS
from vllm_omni_ext.testing import write_byte_tokenizer

CODEBOOKS, CODES, ENDS = 4, 32, 2.5


def write(directory: Path, *, seed: int = 0) -> Path:
    """Write config, tokenizer and weights; return the directory. Called by `vllm-omni-ext tiny csm`."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    words = write_byte_tokenizer(directory, special_tokens=MARKS)
    # vLLM's attention on a CPU has kernels for heads of 32, 64, 80, ... elements, and none for 16.
    small = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    sizes = {**small, "hidden_size": 64, "intermediate_size": 64}
    codec = {**sizes, "num_key_value_heads": 2, "num_filters": 2, "upsample_groups": 64, "sliding_window": 24}
    quantizer = {"codebook_size": CODES, "codebook_dim": 16, "vector_quantization_hidden_dimension": 16}
    ends = {"codebook_eos_token_id": 0, "codebook_pad_token_id": CODES - 1}
    marks = {
        "bos_token_id": words - 2,
        "eos_token_id": words - 1,
        "audio_token_id": words,
        "audio_eos_token_id": words + 1,
    }
    config = CsmConfig(
        num_codebooks=CODEBOOKS,
        vocab_size=CODES,
        text_vocab_size=words + 2,
        pad_token_id=words,
        max_position_embeddings=1024,
        depth_decoder_config={**sizes, "num_codebooks": CODEBOOKS, "vocab_size": CODES, "backbone_hidden_size": 64},
        codec_config={"model_type": "mimi", "num_quantizers": CODEBOOKS, **codec, **quantizer},
        **(sizes | ends | marks),
    )
    torch.manual_seed(seed)
    model = CsmForConditionalGeneration(config).eval()
    for name, weight in model.named_parameters():  # at the usual scale every code is the same
        if weight.dim() > 1:
            weight.data.normal_(std=1.0 if "embed" in name else 1.5 * weight[0].numel() ** -0.5)
    for head in (model.lm_head.weight, model.depth_decoder.codebooks_head.weight.transpose(1, 2)):
        head.data.normal_(std=0.2)
        head.data[..., 0, :] *= ENDS  # code 0 is more frequent, so that some answers end
    for name, buffer in model.codec_model.named_buffers():
        if name.endswith("embed_sum"):
            buffer.normal_()
    with torch.no_grad():
        wave = model.codec_model.decode(torch.randint(CODES, (1, CODEBOOKS, 64))).audio_values
        last = model.codec_model.decoder.layers[-1].conv
        for weight in (last.weight, last.bias):
            weight *= 0.1 / wave.std()
    model.save_pretrained(directory)
    return directory
