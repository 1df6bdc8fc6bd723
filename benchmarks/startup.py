"""Measures the seconds from the command to `/health`, and the memory of all processes, compared with stock vLLM.

Memory is the proportional set size (PSS): a page shared by n processes counts 1/n in each. Stock vLLM's server has the
text stage alone, with the engine in one process. Our server and stock vLLM's are started in turns, with the same
`--max-model-len`, `--max-num-seqs`, data type and KV cache bytes.

    python benchmarks/startup.py [MODEL_DIR] [--runs N] [--json FILE]
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # run as a file, from anywhere

from checkpoint import checkpoint, parser

from examples.server import HOST, Server

OURS, STOCK = "ours", "stock"
STOCK_PROGRAM = str(Path(__file__).with_name("stock.py"))
SAME = ("--max-model-len", "1024", "--max-num-seqs", "8", "--dtype", "float32", "--enforce-eager")
ONE_PROCESS = ("--distributed-executor-backend", "uni")  # as for engines of our stages
CACHE = ("--kv-cache-memory-bytes", str(128 << 20))
THREADS = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def serving(who: str, model: str, log: Path) -> Server:
    """Return our server or stock vLLM's (`who`: `OURS` or `STOCK`), which is not started yet."""
    made = Server(model, log, [*SAME, *CACHE])
    if who == STOCK:
        where = ["--host", HOST, "--port", str(made.port)]
        made.words = [sys.executable, STOCK_PROGRAM, "serve", model, *where, *SAME, *CACHE, *ONE_PROCESS]
    return made


def titles(who: str, server: Server) -> dict[int, str]:
    """Return "API server" or the stage's name by process id, from our server's status; empty for stock vLLM."""
    if who == STOCK:
        return {}
    with urllib.request.urlopen(f"{server.base_url}/omni/status") as answer:
        said = json.load(answer)
    known = {each["pid"]: "API server" for each in said["api_servers"]}
    return known | {replica["pid"]: stage["name"] for stage in said["stages"] for replica in stage["replicas"]}


def by_name(memory: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Convert (process name, GB) pairs to a mapping; the second and later processes of a name get a number."""
    seen: Counter[str] = Counter()
    made = {}
    for name, gigabytes in memory:
        seen[name] += 1
        made[name if seen[name] == 1 else f"{name} ({seen[name]})"] = gigabytes
    return made


def measure(who: str, model: str, log: Path) -> dict[str, Any]:
    """Start a server once; return {"seconds": to `/health`, "memory_gb": {process name: GB}}."""
    with serving(who, model, log) as server:
        known = titles(who, server)
        memory = [(known.get(p.pid, p.name().strip()), p.memory_full_info().pss / 1e9) for p in server.processes()]
        return {"seconds": server.startup_s, "memory_gb": by_name(memory)}


def show(who: str, start: dict[str, Any]) -> None:
    """Print one start."""
    memory = start["memory_gb"]
    print(f"{who}: {start['seconds']:.1f} s, {sum(memory.values()):.2f} GB in {len(memory)} processes", flush=True)
    for name, gigabytes in memory.items():
        print(f"    {gigabytes:.2f} GB  {name}")


def main(argv: Sequence[str] | None = None) -> None:
    """Print each start, and the ratios of the medians."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--runs", type=int, default=3)
    arguments.add_argument("--json", type=Path, help="file that takes every start")
    args = arguments.parse_args(argv)
    os.environ |= THREADS  # as for our stages here
    found: dict[str, list[dict[str, Any]]] = {OURS: [], STOCK: []}
    order = [OURS, STOCK]
    with checkpoint(args.model) as model, tempfile.TemporaryDirectory() as folder:
        for number in range(args.runs):
            for who in order:
                found[who].append(measure(who, model, Path(folder, f"{who}-{number}.log")))
                show(who, found[who][-1])
            order.reverse()
    ours, stock = (statistics.median(start["seconds"] for start in found[who]) for who in (OURS, STOCK))
    print(f"ours / stock: {ours / stock:.2f}")
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
