"""Start a server as the README says, ask it for ten spoken answers, one after the other, and end it.

The first answer should be as fast as the tenth: whatever is compiled or chosen at the first use was forgotten at the
start. A configuration that the plan refuses is exit status 3, with the reason.

    python benchmarks/gpu_start.py MODEL [--json FILE] [-- flags of vllm serve]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from gpu_parts import REFUSED_STATUS
from spoken import Lengths
from spoken_http import over_http, served

ANSWERS = 10
LENGTHS = Lengths(text=8, frames=12)


def refusal(model: str, flags: list[str]) -> str | None:
    """Why the configuration is refused; None if it is not. Starts nothing."""
    command = [sys.executable, "-m", "vllm_omni_ext", "plan", model, *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout, flush=True)
    return done.stderr.strip().splitlines()[-1] if done.returncode else None


def split(words: list[str]) -> tuple[list[str], list[str]]:
    """The words before and after `--`; argparse takes none that begin with a hyphen after an option."""
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def main() -> int:
    """Measure and print; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory or hub id")
    parser.add_argument("--json", type=Path, help="file that takes the figures")
    ours, flags = split(sys.argv[1:])
    args = parser.parse_args(ours)
    reason = refusal(args.model, flags)
    if reason is not None:
        print(reason)
        return REFUSED_STATUS
    with served(args.model, flags) as server, over_http(server, LENGTHS) as (ask, runner):
        answers = [runner.run(ask(seed)) for seed in range(ANSWERS)]
        print(server.log.read_text(errors="replace"))
    firsts = [answer.first_s for answer in answers]
    figures = {"ready_s": server.startup_s, "first_sound_s": firsts, "answer_s": [each.whole_s for each in answers]}
    print(
        f"ready after {server.startup_s:.1f} s; first sound {firsts[0] * 1e3:.0f} ms, tenth {firsts[-1] * 1e3:.0f} ms"
    )
    if args.json is not None:
        args.json.write_text(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
