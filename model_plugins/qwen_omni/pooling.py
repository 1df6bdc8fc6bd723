"""Names the pooling task of the stage that converts codes to sound, for its flow and for its model. Pure: no I/O."""

from __future__ import annotations

from typing import Literal

POOLING_TASK: Literal["token_embed"] = "token_embed"
"""Pooling task of every part of an utterance. Model Runner V2, vLLM's default on GPUs, accepts only its own tasks (not
"plugin"). This task reads no prefix cache and leaves the pooler's output unchanged, on both runners."""
