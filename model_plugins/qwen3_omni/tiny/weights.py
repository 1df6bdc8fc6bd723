"""Random weights with which a tiny model generates varied text and sound.

Plain random initialisation gives one repeated token and clipped sound, which is useless for tests. Here every matrix is
scaled by its fan-in, so that activations keep their size through any depth. Larger attention scores make the output
depend on the context. The scores of the two end tokens are scaled so that some replies end by themselves, others by the
length limit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_omni_ext.model_plugins.qwen3_omni.tiny.config import Sizes
from vllm_omni_ext.model_plugins.qwen3_omni.tiny.vocabulary import Vocabulary

if TYPE_CHECKING:
    import torch

EMBEDDING_STD = 1.0
NORM_STD = 0.1
BIAS_STD = 0.1
SNAKE_STD = 0.3

THINKER_LOGIT_STD = 3.0
TALKER_LOGIT_STD = 3.0
THINKER_EOS_QUANTILE = 2.6
TALKER_EOS_QUANTILE = 2.8
"""The end token is the most likely token of a step if its score exceeds this number of standard deviations of its own
score: a larger value makes ends rarer."""

WAVE_RMS = 0.15
"""Target loudness, relative to full scale 1; reached within a factor of 1.5."""

CALIBRATION_FRAMES = 32
QUIET = 2.0**-20
"""Factor on the last convolution while its output is measured, so that nothing is clipped."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Normal distribution of the parameters of some names.

    Attributes:
        pattern: regular expression that is searched in a parameter's name.
        by_fan_in: `std` is divided by the square root of the fan-in.
    """

    pattern: str
    std: float
    mean: float = 0.0
    by_fan_in: bool = False


RULES = (
    Rule(r"layer_scale\.scale$", 0.05, mean=0.3),
    Rule(r"upsample\..*\.gamma$", 0.1, mean=0.5),
    Rule(r"decoder\..*\.conv[12]\.conv\.weight$", 0.5, by_fan_in=True),
    Rule(r"decoder\..*\.weight$", 0.8, by_fan_in=True),
    Rule(r"\.(alpha|beta)$", SNAKE_STD),
    Rule(r"\.(q_norm|k_norm)\.weight$", NORM_STD, mean=1.6),
    Rule(r"(norm\w*|ln_q|ln_post)\.weight$", NORM_STD, mean=1.0),
    Rule(r"\.bias$", BIAS_STD),
    Rule(r"(embed_tokens|codec_embedding(\.\d+)?|code_embedding)\.weight$", EMBEDDING_STD),
    Rule(r"pos_embed\.weight$", 0.5),
    Rule(r"thinker\.lm_head\.weight$", THINKER_LOGIT_STD, by_fan_in=True),
    Rule(r"codec_head\.weight$", TALKER_LOGIT_STD, by_fan_in=True),
    Rule(r"code_predictor\.lm_head\.\d+\.weight$", TALKER_LOGIT_STD, by_fan_in=True),
    Rule(r"mlp\.gate\.weight$", 2.0, by_fan_in=True),
    Rule(r"self_attn\.(v_proj|o_proj)\.weight$", 1.6, by_fan_in=True),
    Rule(r"down_proj(\.weight)?$", 2.0, by_fan_in=True),
    Rule(r"", 1.2, by_fan_in=True),
)
"""Rules of all parameters: the first rule that matches applies; the last rule matches all other parameters."""


def fan_in(name: str, shape: tuple[int, ...], transposed: Iterable[str]) -> int:
    """Return the number of inputs that one output of a matrix or convolution sums over; 1 for a vector.

    Args:
        name: name of the parameter in the model.
        shape: shape of the parameter.
        transposed: names of the model's transposed convolutions.
    """
    if len(shape) < 2:
        return 1
    if any(name.startswith(prefix) for prefix in transposed):
        return shape[0]  # [in, out, kernel]; a sample depends on kernel / stride <= 2 inputs
    if re.search(r"experts\.\w+$", name):
        return shape[-1]  # [experts, out, in]
    return math.prod(shape[1:])


def expected_maximum(count: int) -> float:
    """Return the approximate maximum of `count` standard normal draws."""
    return math.sqrt(2 * math.log(count))


def draw(model: Any, rules: Sequence[Rule], generator: torch.Generator) -> None:
    """Draw all parameters of a model, in the order of their names, each by the first rule that matches."""
    import torch

    transposed = [name for name, module in model.named_modules() if isinstance(module, torch.nn.ConvTranspose1d)]
    for name, parameter in sorted(model.named_parameters()):
        rule = next(rule for rule in rules if re.search(rule.pattern, name))
        std = rule.std
        if rule.by_fan_in:
            std /= math.sqrt(fan_in(name, tuple(parameter.shape), transposed))
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * std + rule.mean)


def fill(model: Any, sizes: Sizes, vocabulary: Vocabulary, seed: int) -> None:
    """Draw all parameters of a Qwen3-Omni model from one seeded generator, in the order of their names."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        draw(model, RULES, generator)
        shape_thinker_head(model.thinker.lm_head.weight, vocabulary)
        _shape_codec_head(model.talker.codec_head.weight, sizes, model.config.talker_config.codec_eos_token_id)
        _shape_wave(model.code2wav, sizes, generator)


def shape_thinker_head(head: torch.Tensor, vocabulary: Vocabulary) -> None:
    """Restrict the thinker to readable text and the end of its turn; `head` is [vocabulary, hidden]."""
    import torch

    speakable = vocabulary.speakable_ids()
    end = vocabulary.id_of("<|im_end|>")
    silent = torch.ones(head.shape[0], dtype=torch.bool)
    silent[[*speakable, end]] = False
    head[silent] = 0.0
    head[end] *= expected_maximum(len(speakable)) / THINKER_EOS_QUANTILE


def _shape_codec_head(head: torch.Tensor, sizes: Sizes, end: int) -> None:
    """Make the end of speech about as likely as the codes together; `head` is [talker vocabulary, hidden]."""
    head[end] *= expected_maximum(sizes.codebook_size) / TALKER_EOS_QUANTILE


def _shape_wave(code2wav: Any, sizes: Sizes, generator: torch.Generator) -> None:
    """Remove the constant offset of the last convolution [1, channels, kernel]; scale it to the loudness `WAVE_RMS`.

    The factor is a power of two, so that it does not depend on the last digits of the measured loudness.
    """
    import torch

    last = code2wav.decoder[-1].conv
    last.weight -= last.weight.mean(dim=-1, keepdim=True)
    last.weight *= QUIET
    last.bias.zero_()
    shape = (1, sizes.num_code_groups, CALIBRATION_FRAMES)
    sound = code2wav(torch.randint(sizes.codebook_size, shape, generator=generator))
    loudness = sound.square().mean().sqrt().item() / QUIET
    last.weight *= 2.0 ** round(math.log2(WAVE_RMS / loudness)) / QUIET
