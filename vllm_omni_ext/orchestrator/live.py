"""What the orchestrator holds for a request."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.engine import EngineCoreRequest

from vllm_omni_ext.orchestrator.flow import Flow
from vllm_omni_ext.orchestrator.requests import OmniOptions

Sink = asyncio.Queue[Any]
"""Where a caller gets what is not text: pieces of sound, or the error that ended the request."""


@dataclass
class Ticket:
    """A request that wants more than text, before it is opened."""

    options: OmniOptions
    sink: Sink
    request_id: str | None = None  # internal id, once the text stage has the request


@dataclass
class Live:
    """Everything held for one request beyond the text stage."""

    flow: Flow
    options: OmniOptions
    sink: Sink
    external_id: str
    room: Mapping[str, int]
    recital: bool = False
    opened: dict[str, EngineCoreRequest] = field(default_factory=dict)
    moves: Counter[str] = field(default_factory=Counter)
    """How often each stage was given the request anew; what was decided before that is part of what it was given."""
    text: EngineCoreRequest | None = None
    """The text stage's request, if it exports something."""
    heard: set[str] = field(default_factory=set)
    """Stages that have given something for it."""
    done: set[str] = field(default_factory=set)
    """Stages that have ended the request: it can do without them."""
