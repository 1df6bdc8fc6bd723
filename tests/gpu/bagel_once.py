"""Make pictures and a text with a tiny BAGEL through its stages and compare with the stored ones. Needs no pytest.

    python tests/gpu/bagel_once.py [--stage-config bagel]

In float32, on any device of vLLM. The tokens of the text must be the stored ones; the latents of a picture may
differ by `LATENTS`, its bytes by `BYTES`. Exit status 1 if an answer differs.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))  # run as a file

PICTURES = ("t2i_fp32", "t2i_nocfg_fp32", "edit_fp32")
TEXT = "chat_fp32"
LATENTS, BYTES = 1e-2, 2
"""Kernels of a GPU add in another order than a CPU: over all steps, latents of about 1 differ by less than this."""


def prompt_of(run: Any) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Return the prompt of a stored picture, its fields, and those of them that are keywords."""
    fields = {**run.info["kwargs"], "seed": run.info["seed"]}
    height, width = fields.pop("image_shapes")
    texts = [part for part in run.parts if isinstance(part, str)]
    pictures = [part for part in run.parts if not isinstance(part, str)]
    if pictures:
        return {"prompt": texts[0], "image": pictures[0]}, fields, {"seed": fields.pop("seed")}
    return {"prompt": texts[0]}, fields, {"seed": fields.pop("seed"), "height": height, "width": width}


def is_right_picture(llm: Any, name: str) -> bool:
    """Make a stored picture again, and print how far it is from the stored one."""
    import numpy as np

    from tests.support.bagel_runs import golden

    run = golden(name)
    prompt, fields, top = prompt_of(run)
    [made] = llm.generate(prompt, {"dit": fields}, modalities=["image"], return_latents=True, use_tqdm=False, **top)
    if made.error is not None:
        print(f"  {name}: FAILED: {made.error}")
        return False
    latents = float(np.abs(made.latents[0] - run.tensors["latent"].numpy()).max())
    stored = run.tensors["image_u8"].numpy().astype(int)
    bytes_off = int(np.abs(np.asarray(made.images[0]).astype(int) - stored).max())
    right = latents <= LATENTS and bytes_off <= BYTES
    print(f"  {name}: {'ok' if right else 'WRONG'}; latents differ by {latents:.1e}, bytes by {bytes_off}")
    return right


def is_right_text(llm: Any) -> bool:
    """Answer a stored prompt, and print how many tokens are the stored ones."""
    from tests.support.bagel_runs import golden

    run = golden(TEXT)
    expected = run.info["generated_ids"][0][1:]
    messages = [{"role": "user", "content": [{"type": "text", "text": part} for part in run.parts]}]
    [made] = llm.chat(messages, temperature=0, max_tokens=len(expected), modalities=["text"], use_tqdm=False)
    tokens = [] if made.error is not None else list(made.outputs[0].token_ids)
    equal = sum(a == b for a, b in zip(tokens, expected, strict=False))
    print(f"  {TEXT}: {'ok' if tokens == expected else 'WRONG'}; {equal} of {len(expected)} tokens as stored")
    return tokens == expected


def main() -> int:
    """Run all cases; the exit status."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--stage-config", default="bagel", choices=("bagel", "bagel_single"))
    args = flags.parse_args()
    os.environ |= {"TRITON_F32_DEFAULT": "ieee", "NVIDIA_TF32_OVERRIDE": "0", "VLLM_NO_USAGE_STATS": "1"}
    from vllm import LLM

    from vllm_omni_ext.model_plugins.bagel.tiny.bagel import write_bagel

    with tempfile.TemporaryDirectory() as folder:
        model = str(write_bagel(f"{folder}/model", seed=0))
        with LLM(model, omni=True, dtype="float32", max_model_len=1024, stage_config=args.stage_config) as llm:
            results = [*(is_right_picture(llm, name) for name in PICTURES), is_right_text(llm)]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
