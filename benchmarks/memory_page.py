"""Writes the tables of docs/memory.md: the flags that each released model needs on each machine.

The planner (`topology.planner`) computes them from the sizes of the models; no model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import Qwen2_5OmniConfig, Qwen3OmniMoeConfig

from vllm_omni_ext.config.load import load_config
from vllm_omni_ext.config.parse import Names
from vllm_omni_ext.config.schema import OmniConfig
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.model_plugins.bagel import family as bagel_family
from vllm_omni_ext.model_plugins.bagel.stages import facts as bagel_facts
from vllm_omni_ext.model_plugins.bagel.tiny import bagel as bagel_files
from vllm_omni_ext.model_plugins.qwen2_5_omni import facts as qwen2_5_facts
from vllm_omni_ext.model_plugins.qwen2_5_omni import family as qwen2_5_family
from vllm_omni_ext.model_plugins.qwen2_5_omni.tiny import config as qwen2_5_files
from vllm_omni_ext.model_plugins.qwen3_omni.facts import facts
from vllm_omni_ext.model_plugins.qwen3_omni.family import FAMILY, QWEN3_OMNI
from vllm_omni_ext.model_plugins.qwen3_omni.tiny.config import RELEASED, model_config
from vllm_omni_ext.model_plugins.qwen3_omni.tiny.vocabulary import real_vocabulary
from vllm_omni_ext.plugins.memory import ModelFacts
from vllm_omni_ext.plugins.spec import ModelFamily, PipelineSpec
from vllm_omni_ext.topology.machine import Machine
from vllm_omni_ext.topology.plan import Plan
from vllm_omni_ext.topology.planner import make_plan, resolved_params
from vllm_omni_ext.topology.remedies import as_text, flags_that_help

PAGE = Path("docs/memory.md")
BEGIN, END = "<!-- tables: begin -->\n", "<!-- tables: end -->\n"

MIB = 1 << 20

CARDS: Mapping[str, int] = {
    "24 GB (RTX 4090)": 24_564 * MIB,
    "40 GB (A100)": 40_960 * MIB,
    "48 GB (L40S)": 46_068 * MIB,
    "80 GB (H100)": 81_559 * MIB,
    "141 GB (H200)": 143_771 * MIB,
}
"""Memory of a device as `nvidia-smi` shows it."""

COUNTS = (1, 2, 3, 4, 8)


@dataclass(frozen=True)
class Released:
    """A released model with one of its pipelines.

    Attributes:
        name: name of the model.
        shape: returns the model's Hugging Face config.
        facts: the function `ModelFamily.facts`, which returns the sizes of the model's stages.
    """

    name: str
    family: ModelFamily
    pipeline: PipelineSpec
    shape: Callable[[], Any]
    facts: Callable[[Any, Mapping[str, Mapping[str, Any]]], ModelFacts]


def bagel_shape() -> Any:
    """Return BAGEL's config as Transformers reads it, in which the autoencoder's part is a mapping."""
    config = bagel_files.model_config(bagel_files.RELEASED, bagel_files.bagel_vocabulary())
    parts = {name: SimpleNamespace(**config[name]) for name in ("llm_config", "vit_config")}
    return SimpleNamespace(**{**config, **parts})


def qwen_shape() -> Any:
    """Return Qwen3-Omni's config as Transformers reads it."""
    return Qwen3OmniMoeConfig(**model_config(RELEASED, real_vocabulary()))


def qwen2_5_shape() -> Any:
    """Return Qwen2.5-Omni's config as Transformers reads it."""
    words = real_vocabulary(qwen2_5_files.SPECIAL_TOKENS)
    return Qwen2_5OmniConfig(**qwen2_5_files.model_config(qwen2_5_files.RELEASED, words))


QWEN = Released(
    name="Qwen3-Omni-30B-A3B",
    family=FAMILY,
    pipeline=QWEN3_OMNI,
    shape=qwen_shape,
    facts=facts,
)
QWEN2_5 = Released(
    name="Qwen2.5-Omni-7B",
    family=qwen2_5_family.FAMILY,
    pipeline=qwen2_5_family.QWEN2_5_OMNI,
    shape=qwen2_5_shape,
    facts=qwen2_5_facts.facts,
)
BAGEL, BAGEL_SINGLE = (
    Released(
        name="BAGEL-7B-MoT",
        family=bagel_family.FAMILY,
        pipeline=pipeline,
        shape=bagel_shape,
        facts=bagel_facts.facts,
    )
    for pipeline in bagel_family.FAMILY.pipelines
)
CONFIGS: Mapping[str, Released] = {
    "qwen3_omni": QWEN,
    "qwen3_omni_pd": QWEN,
    "qwen3_omni_replicas": QWEN,
    "qwen2_5_omni": QWEN2_5,
    "qwen2_5_omni_24gb": QWEN2_5,
    "bagel": BAGEL,
    "bagel_replicas": BAGEL,
    "bagel_pd": BAGEL,
    "bagel_single": BAGEL_SINGLE,
}
"""Stage configs of this package -> their models."""

TABLES = ("qwen3_omni", "qwen3_omni_pd", "qwen2_5_omni", "bagel", "bagel_single")
"""Stage configs that have a table in docs/memory.md."""


def machine(size: int, count: int) -> Machine:
    """Return a machine with `count` devices of `size` bytes."""
    return Machine(
        platform="cuda", device_count=count, cpu_count=32, memory_bytes=1 << 38, device_bytes=(size,) * count
    )


@cache
def released(config: str) -> tuple[OmniConfig, ModelFacts]:
    """Return (a stage config of this package, sizes of the stages of its released model)."""
    model = CONFIGS[config]
    names = Names(stages=tuple(stage.name for stage in model.pipeline.stages))
    settings = load_config(config, names, model.family.stage_configs)
    return settings, model.facts(model.shape(), resolved_params(model.pipeline, settings))


def plan_released(config: str, flags: Mapping[str, Any], where: Machine) -> Plan:
    """Plan the released model of a stage config on a machine; DoesNotFit if its memory is too small.

    Args:
        flags: `EngineArgs` fields for the frontend, as set by flags of `vllm serve`.
    """
    model = CONFIGS[config]
    settings, known = released(config)
    return make_plan(
        model=model.name,
        pipeline=model.pipeline,
        config=settings,
        text_args=flags,
        machine=where,
        facts=known,
        remedies=False,
    )


def tables() -> str:
    """Return all tables in Markdown."""
    return "\n".join(line for config in TABLES for line in _table(config))


def write(page: Path = PAGE) -> None:
    """Write the tables into the page, between the lines `BEGIN` and `END`."""
    text = page.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    page.write_text(f"{before}{BEGIN}{tables()}{END}{after}", encoding="utf-8")


def _table(config: str) -> Iterator[str]:
    yield f"{CONFIGS[config].name}, `--stage-config {config}`:"
    yield ""
    yield "| devices | " + " | ".join(CARDS) + " |"
    yield "|---|" + "---|" * len(CARDS)
    for count in COUNTS:
        yield f"| {count} | " + " | ".join(_cell(config, machine(size, count)) for size in CARDS.values()) + " |"
    yield ""


def _cell(config: str, where: Machine) -> str:
    def attempt(flags: Mapping[str, Any], there: Machine) -> Plan:
        return plan_released(config, flags, there)

    try:
        return f"as it is{_tokens(attempt({}, where))}"
    except ConfigError:
        longest = released(config)[1][CONFIGS[config].pipeline.frontend].max_model_len
        ways = flags_that_help(attempt, {}, where, longest)
    if not ways:
        return "no"
    return f"`{as_text(ways[0])}`{_tokens(attempt(ways[0], where))}"


def _tokens(plan: Plan) -> str:
    """Return text with the size of the frontend's KV cache in thousands of tokens; "" if the frontend has none."""
    name = str(plan.frontend().replicas[0].id)
    tokens = min(share.kv_tokens for sheet in plan.sheets for share in sheet.shares if share.replica == name)
    return f": {tokens // 1000}k" if tokens else ""


if __name__ == "__main__":
    write()
    print(PAGE)
