"""What listeners hear of spoken answers at once: how long an answer is silent because its next sound is not there yet.

Two deployments follow each other: code2wav with vLLM's order, first come, first served (`fcfs`), and with what is due
first (`priority`, the default). In each, answers that begin with a part of one frame beside others take turns with
those that begin with two, the default. The lengths of the answers are those of `spoken.py`; a listener begins to play
at the first piece and plays in real time.

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

from vllm_omni_ext.model_plugins.qwen3_omni import voice

POLICIES = ("fcfs", "priority")
FIRST_PARTS = (1, 2)
ANSWERS = 6
"""Of each listener in a round."""
NOTICED_S = 0.02
"""A silence that counts."""


def at(share: float, values: list[float]) -> float:
    """The value that `share` of all do not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def line(policy: str, first_part: int, listeners: int, seconds: float, answers: list[Answer]) -> str:
    """One row of the table."""
    late = [answer.late_s for answer in answers]
    first = [answer.first_s for answer in answers]
    made = sum(answer.sound_s for answer in answers) / seconds
    silent = sum(each > NOTICED_S for each in late)
    times = [1e3 * each for each in (at(0.5, first), at(0.95, first), at(0.5, late), at(0.95, late), max(late))]
    cells = "".join(f"{each:11.0f}" for each in times)
    return f"{policy:10}{first_part:8}{listeners:10}{made:10.1f}{cells}{silent:8} of {len(answers)}"


def main() -> None:
    """Measure and print."""
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
                        with mock.patch.object(voice, "FIRST_BESIDE_OTHERS", first):
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
