"""Measures the silence in concurrent spoken answers: the time without sound because the next sound is late.

code2wav gets the frames of an answer in parts, one request each, and returns the sound of each part.

The program starts two deployments, one after the other: code2wav with vLLM's first come, first served (`fcfs`), and
with the earliest due part first (`priority`, the default). In each, rounds with a first part of one frame while other
answers run take turns with rounds with two frames, the default. The lengths of the answers are those of `spoken.py`.
Playback begins at the first part and runs in real time.

    python benchmarks/silence.py [MODEL] [--listeners 1 4 8] [--rounds 8] [--json FILE]
"""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict
from pathlib import Path
from unittest import mock

from checkpoint import checkpoint, parser
from spoken import Answer, Lengths, inside, several
from vllm import LLM

from vllm_omni_ext.connectors import codec_stream

POLICIES = ("fcfs", "priority")
FIRST_PARTS = (1, 2)
ANSWERS = 6
"""Answers for each listener in a round; a listener is one concurrent answer."""
NOTICED_S = 0.02
"""Shortest silence that is counted."""


def at(share: float, values: list[float]) -> float:
    """Return the quantile of values: the value that a share of them does not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def line(policy: str, first_part: int, listeners: int, seconds: float, answers: list[Answer]) -> str:
    """Return one row of the table.

    Args:
        policy: vLLM's scheduling policy of code2wav.
        first_part: frames of the first part of an answer.
        listeners: concurrent answers.
        seconds: duration of all rounds together.
    """
    late = [answer.late_s for answer in answers]
    first = [answer.first_s for answer in answers]
    made = sum(answer.sound_s for answer in answers) / seconds
    silent = sum(each > NOTICED_S for each in late)
    times = [1e3 * each for each in (at(0.5, first), at(0.95, first), at(0.5, late), at(0.95, late), max(late))]
    cells = "".join(f"{each:11.0f}" for each in times)
    return f"{policy:10}{first_part:8}{listeners:10}{made:10.1f}{cells}{silent:8} of {len(answers)}"


def main() -> None:
    """Run this benchmark from the command line, and print its results."""
    flags = parser(__doc__ or "")
    flags.add_argument("--listeners", type=int, nargs="+", default=[1, 4, 8], help="answers at once")
    flags.add_argument("--rounds", type=int, default=8, help=f"each with {ANSWERS} answers for a listener")
    flags.add_argument("--json", type=Path, help="file that takes every answer")
    args = flags.parse_args()
    heard: dict[tuple[str, int, int], list[tuple[float, list[Answer]]]] = {}
    with checkpoint(args.model) as model:
        for policy in POLICIES:
            overrides = {"code2wav": {"engine": {"scheduling_policy": policy}}}
            with LLM(model, omni=True, stage_overrides=overrides) as omni:
                ask = inside(omni, Lengths())
                omni._run(several(ask, 8, 4))
                for number, listeners in itertools.product(range(args.rounds), args.listeners):
                    for first in FIRST_PARTS if number % 2 else FIRST_PARTS[::-1]:
                        with mock.patch.object(codec_stream, "FIRST_BESIDE_OTHERS", first):
                            turn = omni._run(several(ask, ANSWERS * listeners, listeners))
                        heard.setdefault((policy, first, listeners), []).append(turn)
    names = ("first p50", "first p95", "silent p50", "p95", "most, ms")
    heads = f"{'policy':10}{'frames':>8}{'listeners':>10}{'sound/s':>10}", *(f"{n:>11}" for n in names), "   > 20 ms"
    print("".join(heads))
    for what, turns in sorted(heard.items()):
        print(line(*what, sum(seconds for seconds, _ in turns), [each for _, answers in turns for each in answers]))
    if args.json is not None:
        rows = [[*what, [asdict(each) for _, answers in turns for each in answers]] for what, turns in heard.items()]
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
