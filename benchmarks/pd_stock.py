"""Compares prefill/decode disaggregation of ours and of stock vLLM; same model, same prompts, taking turns.

Ours is one server with one prefill and one decode replica. Stock vLLM is two servers of the text stage's model, with
vLLM's MooncakeConnector (`mooncake_on_cpu.py` makes it start here). vLLM's proxy is a script of its repository and not
installed with it. This program sends the requests of the script: a prefill request with `max_tokens` 1 and a decode
request with `kv_transfer_params`, both at once, to the two servers. So requests to stock vLLM pass through no proxy.
Answers are streamed. `--clients` clients send requests without pause.

A step takes `--step` seconds and `--token` more for each token. KV caches really move. The prefill engines count
transfers, bytes and seconds: ours in `/metrics`, stock vLLM's in its log.

Mooncake listens on all interfaces: run it in a network namespace with only loopback.

    unshare --map-root-user --net sh -c 'ip link set lo up; exec "$@"' sh \\
        python benchmarks/pd_stock.py [MODEL] [--prompt 1000] [--clients 4] [--requests 24] [--rounds 4] [--json FILE]
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import random
import re
import sys
import tempfile
import time
import urllib.request
import uuid
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # run as a file, from anywhere

import aiohttp
import numpy as np
from checkpoint import checkpoint, parser
from prometheus_client.parser import text_string_to_metric_families
from simulated import PYTHONPATH, engine, flags

from examples.server import HOST, Server, command
from vllm_omni_ext.metrics import PREFIX

MODEL = "model"
OURS, STOCK = "ours", "stock vLLM"
STOCK_PROGRAM = str(Path(__file__).with_name("stock.py"))
OUR_PORT, PREFILL_PORT, DECODE_PORT, BOOTSTRAP_PORT = 8100, 8200, 8300, 8998
"""Fixed ports: no other process uses them in a network namespace of its own. A free port could be taken before its use.
"""

CACHE_BYTES = 64 << 20
MAX_LEN = 2048
TRANSFER_S = 60.0
"""Time limit of a transfer, long enough that none is aborted because this machine is busy."""

LOG_EVERY_S = 1.0
"""Seconds between two log lines of stock vLLM with its transfers."""

LATEST_S = 300.0
WARM_UP = 4
MS, MIB, MB = 1e3, 1 << 20, 1e6


@dataclass
class Seen:
    """Times of answers at the clients, and the engines' counters of KV cache transfers.

    Attributes:
        first: seconds from a request to its first token, for each request.
        gaps: seconds between two successive outputs of a request, of all requests.
        transfers, bytes: number of transfers, and their bytes.
        seconds: sum of the times of all transfers.
        failed: failed transfers, detected by the prefill or the decode engine.
    """

    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    transfers: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0
    failed: float = 0.0

    def row(self, name: str) -> str:
        """Return the line of the table for one side of the comparison."""
        times = [np.percentile(column, at) * MS for column in (self.first, self.gaps) for at in (50, 99)]
        rate = self.bytes / self.seconds / MB
        moved = f"{self.transfers:>7.0f}{self.bytes / MIB:>8.0f}{rate:>8.1f}{self.failed:>8.0f}"
        return f"{name:<12}{len(self.first):>6}{''.join(f'{ms:>10.1f}' for ms in times)}{moved}"


class Ours:
    """The side "ours": one server of this package, with one prefill and one decode replica."""

    def __init__(self, model: str, folder: Path, args: Any) -> None:
        timed = engine(args.step, args.token)
        thinker = {"engine": {"enable_prefix_caching": False, **timed}}
        thinker["prefill_decode"] = {"transfer_timeout_s": TRANSFER_S}
        self.server = Server(model, folder / "ours.log")
        self.server.port = OUR_PORT
        self.server.words = [*command(), "serve", model, "--omni", *_common(self.server)]
        self.server.words += ["--stage-overrides", json.dumps({"thinker": thinker})]
        self.servers = [self.server]

    async def ready(self, session: aiohttp.ClientSession) -> None:
        """Return at once: the server needs no further step."""

    async def ask(self, session: aiohttp.ClientSession, body: dict[str, Any], seen: Seen) -> None:
        """Send one request, and record its times in `seen`."""
        await read(session, self.server, body, time.monotonic(), seen)

    def moved(self) -> dict[str, float]:
        """Return the counters `transfers`, `bytes`, `seconds` and `failed` (see `Seen`) since the server's start."""
        with urllib.request.urlopen(f"http://{HOST}:{self.server.port}/metrics") as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        sums: dict[str, float] = {}
        for sample in (sample for family in families for sample in family.samples):
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        names = {
            "transfers": "kv_transfer_seconds_count",
            "bytes": "kv_transfer_bytes_total",
            "seconds": "kv_transfer_seconds_sum",
            "failed": "kv_transfer_failures_total",
        }
        return {key: sums.get(PREFIX + name, 0.0) for key, name in names.items()}


class Stock:
    """The side "stock vLLM": a prefill server and a decode server, which get the requests that vLLM's proxy sends."""

    def __init__(self, model: str, folder: Path, args: Any) -> None:
        self.servers = []
        for role, port in (("producer", PREFILL_PORT), ("consumer", DECODE_PORT)):
            server = Server(model, folder / f"{role}.log")
            server.port = port
            transfer = {
                "kv_connector": "StockMooncakeConnector",
                "kv_connector_module_path": "mooncake_on_cpu",
                "kv_role": f"kv_{role}",
                "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
            }
            server.words = [sys.executable, STOCK_PROGRAM, "serve", model, *_common(server)]
            server.words += ["--no-enable-prefix-caching", "--kv-transfer-config", json.dumps(transfer)]
            server.words += ["--limit-mm-per-prompt", '{"audio": 1, "image": 1, "video": 1}']
            server.words += flags(args.step, args.token)
            self.servers.append(server)
        self.prefill, self.decode = self.servers
        self.bootstrap = f"http://{HOST}:{BOOTSTRAP_PORT}"

    async def ready(self, session: aiohttp.ClientSession) -> None:
        """Request the id of the prefill engine, as the proxy does when it starts."""
        async with session.get(f"{self.bootstrap}/query") as answer:
            self.engine_id = (await answer.json())["0"]["engine_id"]

    async def ask(self, session: aiohttp.ClientSession, body: dict[str, Any], seen: Seen) -> None:
        """Send one request as a prefill request and a decode request, and record the times of the latter in `seen`."""
        began, transfer = time.monotonic(), {"transfer_id": uuid.uuid4().hex}
        keep = {"do_remote_decode": True, "do_remote_prefill": False, **transfer}
        fetch = {"do_remote_decode": False, "do_remote_prefill": True, **transfer}
        fetch |= {"remote_engine_id": self.engine_id, "remote_bootstrap_addr": self.bootstrap}
        first = body | {"max_tokens": 1, "stream": False, "kv_transfer_params": keep}
        async with asyncio.TaskGroup() as both:
            both.create_task(post(session, self.prefill, first))
            both.create_task(read(session, self.decode, body | {"kv_transfer_params": fetch}, began, seen))

    def moved(self) -> dict[str, float]:
        """Return the counters `transfers`, `bytes`, `seconds` and `failed` since the start, from the servers' logs.

        The logs' values are rounded to 0.001 ms and 0.001 MiB.
        """
        sums = dict.fromkeys(("transfers", "bytes", "seconds", "failed"), 0.0)
        for server in self.servers:
            for line in re.findall(r"KV Transfer metrics: (.*)", server.log.read_text(errors="replace")):
                said = {name: float(value) for name, value in re.findall(r"([A-Z][^,=]*)=([\d.]+)", line)}
                count = said["Num successful transfers"]
                sums["transfers"] += count
                sums["bytes"] += count * said["Avg MB per transfer"] * MIB
                sums["seconds"] += count * said["Avg xfer time (ms)"] / MS
                sums["failed"] += said["Num failed transfers"] + said["Num failed recvs"]
        return sums


def _common(server: Server) -> list[str]:
    where = ["--host", HOST, "--port", str(server.port), "--disable-uvicorn-access-log"]
    length = ["--served-model-name", MODEL, "--max-model-len", str(MAX_LEN), "--max-num-batched-tokens", str(MAX_LEN)]
    return [*where, *length, "--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", str(CACHE_BYTES)]


def _last_words(server: Server, kind: type[BaseException] | None, *error: Any) -> None:
    """Print the exit status and the last log lines of a server that has ended by itself, if an error ends the program.

    Has the parameters of a context manager's `__exit__` after `server`.
    """
    if kind is not None and server.status() is not None:
        print(f"a server has ended with status {server.status()}:\n{server.tail()}", file=sys.stderr)


async def post(session: aiohttp.ClientSession, server: Server, body: dict[str, Any]) -> None:
    """Send a request and discard its answer."""
    async with session.post(f"{server.base_url}/completions", json=body) as answer:
        await _check(answer)
        await answer.read()


async def read(session: aiohttp.ClientSession, server: Server, body: dict[str, Any], began: float, seen: Seen) -> None:
    """Send a request, and record the times of its streamed answer in `seen`; the first counts from `began`."""
    last = None
    async with session.post(f"{server.base_url}/completions", json=body) as answer:
        await _check(answer)
        async for line in answer.content:
            if b'"choices":[{' in line:
                now = time.monotonic()
                (seen.first if last is None else seen.gaps).append(now - (began if last is None else last))
                last = now
    if last is None:
        raise RuntimeError("nothing was answered")


async def _check(answer: aiohttp.ClientResponse) -> None:
    if answer.status != 200:
        raise RuntimeError(f"status {answer.status}: {(await answer.text())[:300]}")


async def one_round(who: Ours | Stock, prompts: list[list[int]], args: Any, seen: Seen) -> None:
    """Send all prompts to one side of the comparison, `args.clients` at once, and record the times in `seen`."""
    waiting = iter(prompts)
    timeout = aiohttp.ClientTimeout(total=LATEST_S)
    limits = aiohttp.TCPConnector(limit=0, force_close=True)  # one connection a request, as from separate clients
    async with aiohttp.ClientSession(timeout=timeout, connector=limits) as session:
        await who.ready(session)

        async def client() -> None:
            for prompt in waiting:
                body = {"model": MODEL, "prompt": prompt, "max_tokens": args.tokens, "stream": True}
                await who.ask(session, body | {"temperature": 0, "ignore_eos": True}, seen)

        async with asyncio.TaskGroup() as clients:
            for _ in range(args.clients):
                clients.create_task(client())


def measure(model: str, folder: Path, args: Any) -> dict[str, Seen]:
    """Start all servers, and measure both sides in turns; return the results by name of the side."""
    rng = random.Random(args.seed)
    sides = {OURS: Ours(model, folder, args), STOCK: Stock(model, folder, args)}
    seen = {name: Seen() for name in sides}
    with ExitStack() as running:
        for server in (server for side in sides.values() for server in side.servers):
            running.enter_context(server)
            running.push(functools.partial(_last_words, server))
        before: dict[str, dict[str, float]] = {}
        for number in range(args.rounds + 1):
            count = args.requests if number else WARM_UP
            prompts = [[rng.randrange(5, 250) for _ in range(args.prompt)] for _ in range(count)]
            for name, side in sides.items():
                asyncio.run(one_round(side, prompts, args, seen[name] if number else Seen()))
                time.sleep(2 * LOG_EVERY_S)
                before.setdefault(name, side.moved())
        for name, side in sides.items():
            for key, value in side.moved().items():
                setattr(seen[name], key, value - before[name][key])
    return seen


def main() -> None:
    """Run this benchmark from the command line: measure both sides and print a table."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--prompt", type=int, default=1000, help="tokens of a prompt")
    arguments.add_argument("--tokens", type=int, default=32, help="tokens of an answer")
    arguments.add_argument("--clients", type=int, default=4)
    arguments.add_argument("--requests", type=int, default=24, help="in each round")
    arguments.add_argument("--rounds", type=int, default=4)
    arguments.add_argument("--step", type=float, default=0.01, help="seconds a step takes")
    arguments.add_argument("--token", type=float, default=0.00005, help="seconds that each token of a step adds")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--json", type=Path)
    args = arguments.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # as for our text stage here
    os.environ |= {"PYTHONPATH": PYTHONPATH, "VLLM_LOG_STATS_INTERVAL": str(LOG_EVERY_S)}
    os.environ |= {"VLLM_HOST_IP": HOST, "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(BOOTSTRAP_PORT)}
    with checkpoint(args.model) as model, tempfile.TemporaryDirectory() as folder:
        seen = measure(model, Path(folder), args)
    heads = ("first 50", "99", "gap 50", "99")
    print(f"{'ms':<12}{'asked':>6}{''.join(f'{head:>10}' for head in heads)}  moved     MiB    MB/s  failed")
    for name, each in seen.items():
        print(each.row(name))
    if args.json:
        args.json.write_text(json.dumps({name: asdict(each) for name, each in seen.items()}))


if __name__ == "__main__":
    main()
