"""The tables of docs/memory.md: what Qwen3-Omni-30B-A3B needs to run on which machine, by the planner itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm_omni_ext.config.load import load_config
from vllm_omni_ext.config.parse import Names
from vllm_omni_ext.config.schema import OmniConfig
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.model_plugins.qwen3_omni.facts import facts
from vllm_omni_ext.model_plugins.qwen3_omni.memory import memory
from vllm_omni_ext.model_plugins.qwen3_omni.pipeline import QWEN3_OMNI
from vllm_omni_ext.model_plugins.registry import ModelFacts
from vllm_omni_ext.tiny.config import model_config
from vllm_omni_ext.tiny.sizes import RELEASED
from vllm_omni_ext.tiny.vocabulary import real_vocabulary
from vllm_omni_ext.topology.plan import Machine, Plan, plan_as_asked, resolved_sampling
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

CONFIGS = ("qwen3_omni", "qwen3_omni_pd")


def machine(size: int, count: int) -> Machine:
    """A machine with so many devices of so many bytes."""
    return Machine(
        platform="cuda", device_count=count, cpu_count=32, memory_bytes=1 << 38, device_bytes=(size,) * count
    )


@cache
def released(config: str) -> tuple[OmniConfig, ModelFacts]:
    """A stage config of this package, and the facts of Qwen3-Omni-30B-A3B with it."""
    settings = load_config(config, Names(stages=tuple(stage.name for stage in QWEN3_OMNI.stages)))
    sampling = resolved_sampling(QWEN3_OMNI, settings)
    shape = _as_attributes(model_config(RELEASED, real_vocabulary()))
    return settings, replace(facts(shape, sampling), memory=memory(shape))


def plan_released(config: str, flags: Mapping[str, Any], where: Machine) -> Plan:
    """Plan the released model; DoesNotFit if it does not fit."""
    settings, known = released(config)
    return plan_as_asked(
        model=RELEASED.name, pipeline=QWEN3_OMNI, config=settings, text_args=flags, machine=where, facts=known
    )


def tables() -> str:
    """All tables in Markdown."""
    return "\n".join(line for config in CONFIGS for line in _table(config))


def write(page: Path = PAGE) -> None:
    """Put the tables into the page, between the marks."""
    text = page.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    page.write_text(f"{before}{BEGIN}{tables()}{END}{after}", encoding="utf-8")


def _table(config: str) -> Iterator[str]:
    yield f"`--stage-config {config}`:"
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
        return f"as it is: {_tokens(attempt({}, where))}"
    except ConfigError:
        longest = released(config)[1].max_model_len["thinker"]
        ways = flags_that_help(attempt, {}, where, longest)
    if not ways:
        return "no"
    return f"`{as_text(ways[0])}`: {_tokens(attempt(ways[0], where))}"


def _tokens(plan: Plan) -> str:
    """Tokens in the KV cache of the stage that answers text, in thousands."""
    name = str(plan.text_stage().replicas[0].id)
    tokens = min(share.kv_tokens for sheet in plan.sheets for share in sheet.shares if share.replica == name)
    return f"{tokens // 1000}k"


def _as_attributes(value: Any) -> Any:
    if isinstance(value, dict):
        return SimpleNamespace(**{key: _as_attributes(item) for key, item in value.items()})
    return value
