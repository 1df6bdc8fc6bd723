"""What listeners hear of spoken answers at once: how long an answer is silent because its next sound is not there yet.

Two deployments follow each other: code2wav with vLLM's order, first come, first served (`fcfs`), and with what is due
first (`priority`, the default). The lengths of the answers are those of `spoken.py`; a listener begins to play at the
first piece and plays in real time.

    python benchmarks/silence.py [MODEL] [--listeners 1 4 8] [--requests 24] [--json FILE]
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from checkpoint import checkpoint, parser
from spoken import Answer, Lengths, inside, several
from vllm import LLM

POLICIES = ("fcfs", "priority")
NOTICED_S = 0.02
"""A silence that counts."""


def at(share: float, values: list[float]) -> float:
    """The value that `share` of all do not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def line(policy: str, listeners: int, seconds: float, answers: list[Answer]) -> str:
    """One row of the table."""
    late = [answer.late_s for answer in answers]
    first = [answer.first_s for answer in answers]
    made = sum(answer.sound_s for answer in answers) / seconds
    silent = sum(each > NOTICED_S for each in late)
    times = [1e3 * each for each in (at(0.5, first), at(0.95, first), at(0.5, late), at(0.95, late), max(late))]
    cells = "".join(f"{each:11.0f}" for each in times)
    return f"{policy:10}{listeners:10}{made:10.1f}{cells}{silent:8} of {len(answers)}"


def main() -> None:
    """Measure and print."""
    flags = parser(__doc__ or "")
    flags.add_argument("--listeners", type=int, nargs="+", default=[1, 4, 8], help="answers at once")
    flags.add_argument("--requests", type=int, default=24, help="answers of each run")
    flags.add_argument("--json", type=Path, help="file that takes every answer")
    args = flags.parse_args()
    heard = {}
    names = ("first p50", "first p95", "silent p50", "p95", "most, ms")
    print(f"{'policy':10}{'listeners':>10}{'sound/s':>10}" + "".join(f"{n:>11}" for n in names) + "   > 20 ms")
    with checkpoint(args.model) as model:
        for policy in POLICIES:
            overrides = {"code2wav": {"engine": {"scheduling_policy": policy}}}
            with LLM(model, omni=True, stage_overrides=overrides) as omni:
                ask = inside(omni, Lengths())
                omni._run(several(ask, 8, 4))
                for listeners in args.listeners:
                    seconds, answers = omni._run(several(ask, args.requests, listeners))
                    heard[f"{policy}, {listeners}"] = [asdict(answer) for answer in answers]
                    print(line(policy, listeners, seconds, answers), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(heard, indent=1))


if __name__ == "__main__":
    main()
