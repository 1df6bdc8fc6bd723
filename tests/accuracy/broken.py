"""Faults that the accuracy tests must find: each breaks one place of a running deployment.

    python -m tests.accuracy.broken [--cases N]

prints the table of docs/accuracy.md: the figures with each fault.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from dev.training.tiny_omni.world import VOICES
from examples.server import Server
from tests.accuracy.answers import Answer, ask_all
from tests.accuracy.cases import Case, cases
from tests.accuracy.figures import LEAST, figures, recognisers, too_low
from tests.support import preloaded
from tests.support.cluster import LENGTH, MODEL
from vllm_omni_ext.model_plugins.qwen3_omni.tiny.qwen3_omni import write_qwen3_omni

HERE = "tests.accuracy.broken"


def text_one_step_ahead() -> None:
    """The talker reads each text id one frame too early."""
    from vllm_omni_ext.model_plugins.qwen3_omni.talker_feed import _Request

    text_at = _Request.text_at
    _Request.text_at = lambda request, step: text_at(request, step + 1)  # type: ignore[method-assign]


def residual_codes_zero() -> None:
    """Only the first code of each frame reaches the vocoder."""
    from vllm_omni_ext.model_plugins.qwen3_omni.vocoder_streams import VocoderStreams

    decode = VocoderStreams.decode

    def changed(streams: Any, headers: Any, chunks: Any) -> Any:
        first = [chunk if isinstance(chunk, str) else chunk * (torch.arange(chunk.shape[1]) == 0) for chunk in chunks]
        return decode(streams, headers, first)

    VocoderStreams.decode = changed  # type: ignore[method-assign]


def chunks_without_state() -> None:
    """The vocoder decodes every chunk as if nothing had come before."""
    from vllm_omni_ext.model_plugins.qwen3_omni.vocoder_streams import VocoderStreams

    run = VocoderStreams._run

    def changed(streams: Any, jobs: Sequence[Any], answers: list[Any]) -> None:
        for job in jobs:
            job.stream.state = streams._vocoder.new_state()
        run(streams, jobs, answers)

    VocoderStreams._run = changed  # type: ignore[method-assign]


def other_voice() -> None:
    """The talker is given the row of another voice."""
    from vllm_omni_ext.model_plugins.qwen3_omni import flow, prompt

    def changed(ids: Any, parts: Any, voice: str, special: Any) -> Any:
        (other,) = {*VOICES} - {voice}
        return prompt.talker_prompt(ids, parts, other, special)

    flow.talker_prompt = changed  # type: ignore[attr-defined]


def encoder_rows_shifted() -> None:
    """Each embedding of a sound is at the position before its own."""
    from vllm.model_executor.models import qwen3_omni_moe_thinker

    mixin = qwen3_omni_moe_thinker.Qwen3OmniMoeConditionalGenerationMixin
    process = mixin._process_audio_input

    def changed(model: Any, given: Any) -> Any:
        return tuple(rows.roll(-1, 0) for rows in process(model, given))

    mixin._process_audio_input = changed


def last_chunk_dropped() -> None:
    """The sound of the last chunk is lost."""
    from vllm_omni_ext.model_plugins.qwen3_omni.vocoder_streams import VocoderStreams

    run = VocoderStreams._run

    def changed(streams: Any, jobs: Sequence[Any], answers: list[Any]) -> None:
        run(streams, jobs, answers)
        for job in jobs:
            if job.last:
                answers[job.members[-1]] = torch.zeros_like(answers[job.members[-1]])

    VocoderStreams._run = changed  # type: ignore[method-assign]


FAULTS = {
    "text one frame ahead": text_one_step_ahead,
    "residual codes zero": residual_codes_zero,
    "chunks without state": chunks_without_state,
    "another voice's row": other_voice,
    "rows of the audio encoder shifted by one": encoder_rows_shifted,
    "last chunk silent": last_chunk_dropped,
}


SENT: Mapping[str, Mapping[str, Any]] = {
    chunks_without_state.__name__: {"chunks": {"frames": [4], "adaptive": False}},
    last_chunk_dropped.__name__: {"chunks": {"frames": [4, 25], "adaptive": False}},
}
"""Fields of the requests with which a fault is looked for: the sizes of chunks must not depend on the load."""


def answers_of(server: Server, asked: Sequence[Case], **extra: Any) -> dict[str, Answer]:
    """Return the answers of a server, several requests at once; `extra` fields are sent with each."""
    return asyncio.run(ask_all(server.base_url, MODEL, asked, **extra))


def answers_with(fault: str, checkpoint: Path, log: Path, asked: Sequence[Case]) -> dict[str, Answer]:
    """Return the answers of a deployment with a fault; needs `preloaded.starts`."""
    name = FAULTS[fault].__name__
    change = mock.patch.dict(os.environ, {preloaded.CHANGE: f"{HERE}:{name}"})
    with change, Server(checkpoint, log, LENGTH) as server:
        return answers_of(server, asked, **SENT.get(name, {}))


def others(answers: Mapping[str, Answer], usual: Mapping[str, Answer]) -> list[str]:
    """Return the names of answers that are not the usual ones."""
    return [name for name, answer in answers.items() if not answer.alike(usual[name])]


def table(found: Mapping[str, Mapping[str, float]], differ: Mapping[str, int], asked: Sequence[Case]) -> str:
    """Return the Markdown table of all faults; figures that are too low are bold."""
    names = list(LEAST)
    lines = ["| fault | " + " | ".join(names) + " | other answers |", "|---" * (len(names) + 2) + "|"]
    for fault, values in found.items():
        low = too_low(values, asked)
        cells = [f"**{values[name]:.2f}**" if name in low else f"{values[name]:.2f}" for name in names]
        lines.append(f"| {fault} | {' | '.join(cells)} | {differ[fault]} of {len(asked)} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=6, help="requests of each kind (default: 6)")
    asked, judges = cases(parser.parse_args().cases), recognisers()
    with tempfile.TemporaryDirectory() as folder, preloaded.starts():
        checkpoint = write_qwen3_omni(Path(folder) / "model", trained=True)
        with Server(checkpoint, Path(folder) / "none", LENGTH) as server:
            every = {"none": answers_of(server, asked)}
        for number, fault in enumerate(FAULTS):
            every[fault] = answers_with(fault, checkpoint, Path(folder) / str(number), asked)
    found = {fault: figures(asked, answers, judges) for fault, answers in every.items()}
    differ = {fault: len(others(answers, every["none"])) for fault, answers in every.items()}
    print(table(found, differ, asked))


if __name__ == "__main__":
    main()
