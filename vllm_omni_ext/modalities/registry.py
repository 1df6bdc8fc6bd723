"""Lists the output modalities of the core and of model families."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_omni_ext import metrics
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.modalities import audio, image
from vllm_omni_ext.modalities.audio import Audio
from vllm_omni_ext.modalities.base import TEXT, Modality
from vllm_omni_ext.modalities.chunks import TextChunk
from vllm_omni_ext.modalities.image import Image
from vllm_omni_ext.plugins.spec import ModelFamily, resolve


class Text(Modality):
    """The output modality text, which vLLM's server writes to answers."""

    name = TEXT
    chunk = TextChunk


CORE: Mapping[str, Modality] = {each.name: each for each in (Text(), Audio(), Image())}

METRICS = (*metrics.ALL, *audio.METRICS, *image.METRICS)
"""All metrics of the core and its modalities."""


def modalities_of(family: ModelFamily) -> Mapping[str, Modality]:
    """Return, by name, the modalities that requests of a model family can select.

    Raises:
        ConfigError: two modalities have the same name.
    """
    known = dict(CORE)
    for path in family.modalities:
        modality = resolve(path)
        if modality.name in known:
            raise ConfigError(
                f"model family '{family.name}': the modality '{modality.name}' of {path} is there already"
            )
        known[modality.name] = modality
    return known
