"""Seconds from the command to `/health`, and the memory of every process the command started.

Memory is the proportional set size (PSS): a page shared by n processes counts 1/n in each. The reference is
vllm-omni 0.30 on the same checkpoint (released vocabulary, float32) and 2 cores, on an unofficial CPU platform:
33.1 s and 3.97 GB in 5 processes.

    python benchmarks/startup.py [MODEL_DIR] [--runs N]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a file, from anywhere

from checkpoint import checkpoint, parser

from examples.server import Server

REFERENCE_S = 33.1
REFERENCE_GB = 3.97


def measure(model: str, log: Path) -> tuple[float, dict[str, float]]:
    """Start once: seconds to `/health`, and GB by process."""
    with Server(model, log) as server:
        memory = {f"{p.pid} {p.name()}": p.memory_full_info().pss / 1e9 for p in server.processes()}
        return server.startup_s, memory


def main(argv: Sequence[str] | None = None) -> None:
    """Print each run and the medians beside the reference."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--runs", type=int, default=3)
    args = arguments.parse_args(argv)
    times, sums = [], []
    with checkpoint(args.model) as model, tempfile.TemporaryDirectory() as folder:
        for run in range(args.runs):
            seconds, memory = measure(model, Path(folder, f"{run}.log"))
            times.append(seconds)
            sums.append(sum(memory.values()))
            print(f"run {run}: {seconds:.1f} s, {sums[-1]:.2f} GB in {len(memory)} processes")
            for name, gigabytes in memory.items():
                print(f"    {gigabytes:.2f} GB  {name}")
    seconds, gigabytes = statistics.median(times), statistics.median(sums)
    print(f"median: {seconds:.1f} s ({seconds / REFERENCE_S:.0%} of {REFERENCE_S} s)", end=", ")
    print(f"{gigabytes:.2f} GB ({gigabytes / REFERENCE_GB:.0%} of {REFERENCE_GB} GB)")


if __name__ == "__main__":
    main()
