"""`vllm-omni-ext top`: rows from two samples, and one line for a server that cannot be shown."""

from __future__ import annotations

import io
import json
import socketserver
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from vllm_omni_ext.cli import main as commands
from vllm_omni_ext.cli.top import Sample, made, rows, table

MODEL = ("model_name", "m")
REPLICA = {"state": "UP", "host": "h", "pid": 7, "running": 2, "waiting": 1, "restarts": 0, "heartbeat_age_s": 0.1}
STATUS = {
    "stages": [
        {"name": "ar", "replicas": [{"id": "ar/0", **REPLICA}, {"id": "ar/1", **REPLICA, "state": "DOWN"}]},
        {"name": "dit", "replicas": [{"id": "dit/0", **REPLICA, "restarts": 3}]},
    ],
    "uptime_s": 61.5,
}
METRICS = """\
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{{model_name="m",engine="0",replica="ar/0"}} {tokens}
vllm:generation_tokens_total{{model_name="m",engine="2",replica="dit/0"}} 5.0
# TYPE vllm_omni_ext:images counter
vllm_omni_ext:images_total{{model_name="m"}} {images}
# TYPE vllm_omni_ext:requests counter
vllm_omni_ext:requests_total{{model_name="m",outcome="finished",modalities="text"}} 9.0
"""


def sample(at: float, tokens: float = 0.0, images: float = 0.0, **more: float) -> Sample:
    series = {
        ("vllm:generation_tokens_total", frozenset({MODEL, ("engine", "0"), ("replica", "ar/0")})): tokens,
        ("vllm:generation_tokens_total", frozenset({MODEL, ("engine", "2"), ("replica", "dit/0")})): 5.0,
        ("vllm_omni_ext:images_total", frozenset({MODEL})): images,
        ("vllm_omni_ext:requests_total", frozenset({MODEL, ("outcome", "finished")})): 9.0,
    }
    return Sample(at, STATUS, series | {(name, frozenset({MODEL})): value for name, value in more.items()})


def test_rows_have_the_rates_between_two_samples() -> None:
    found = rows(sample(10.0, tokens=100.0), sample(14.0, tokens=130.0))
    assert found == [
        {"id": "ar/0", **REPLICA, "tokens_per_s": 7.5},
        {"id": "ar/1", **REPLICA, "state": "DOWN", "tokens_per_s": None},
        {"id": "dit/0", **REPLICA, "restarts": 3, "tokens_per_s": 0.0},
    ]


def test_a_counter_that_fell_or_is_missing_has_no_rate() -> None:
    assert rows(sample(0.0, tokens=100.0), sample(1.0, tokens=3.0))[0]["tokens_per_s"] is None
    assert rows(sample(1.0), sample(1.0))[0]["tokens_per_s"] is None, "no time has passed"
    bare = Sample(2.0, STATUS, {})
    assert [row["tokens_per_s"] for row in rows(bare, bare)] == [None] * 3, "with --disable-log-stats"
    assert rows(Sample(0.0, STATUS, {}), sample(2.0, tokens=4.0))[0]["tokens_per_s"] == 2.0, "it was not there yet"


def test_rates_of_products_are_named_by_their_metrics() -> None:
    before = sample(0.0, images=1.0, **{"vllm_omni_ext:audio_seconds_total": 2.0})
    now = sample(2.0, images=2.0, **{"vllm_omni_ext:audio_seconds_total": 5.0})
    assert made(before, now) == {"audio seconds": 1.5, "images": 0.5}


def test_the_table_has_the_replicas_with_their_rates() -> None:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(table(sample(0.0), sample(2.0, tokens=5.0, images=3.0), "http://here"))
    text = console.export_text()
    assert "http://here, up 62 s" in text and "images 1.50/s" in text
    lines = {line.split()[0]: line.split() for line in text.splitlines() if "/" in line}
    assert lines["ar/0"] == ["ar/0", "UP", "2", "1", "2.5", "0", "7", "h"]
    assert lines["ar/1"] == ["ar/1", "DOWN", "2", "1", "-", "0", "7", "h"]


def test_the_table_fits_into_80_columns() -> None:
    status = {
        "name": "thinker",
        "replicas": [{"id": "thinker.prefill/0", **REPLICA, "state": "SLEEPING", "pid": 4194304}],
    }
    now = Sample(2.0, {"stages": [status], "uptime_s": 1.0}, {})
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table(now, now, "http://here"))
    _, head, row = filter(str.strip, console.export_text().splitlines())
    assert head.split() == ["replica", "state", "running", "waiting", "tokens/s", "restarts", "pid", "host"]
    assert row.split() == ["thinker.prefill/0", "SLEEPING", "2", "1", "-", "0", "4194304", "h"]


def test_a_server_of_another_protocol_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    class Other(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.sendall(b"SSH-2.0-OpenSSH_9\r\n")

    with socketserver.TCPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        assert commands.main(["top", "--url", url, "--once"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"vllm-omni-ext top: no server answers at {url}: BadStatusLine")


class Peer:
    """A server with the answers of the test; `key` is the one it needs."""

    def __init__(self) -> None:
        self.key, self.code, self.status, self.metrics = "", 200, json.dumps(STATUS), METRICS
        self.asked = 0
        peer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                allowed = not peer.key or self.headers["Authorization"] == f"Bearer {peer.key}"
                code = peer.code if allowed else 401
                peer.asked += self.path == "/metrics"
                told = peer.metrics.format(tokens=peer.asked, images=0) if self.path == "/metrics" else peer.status
                self.send_response(code)
                self.end_headers()
                self.wfile.write(told.encode())

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def peer() -> Iterator[Peer]:
    made_peer = Peer()
    yield made_peer
    made_peer.server.shutdown()
    made_peer.server.server_close()


def test_top_with_once_prints_one_table(
    peer: Peer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    peer.key = "k"
    monkeypatch.setenv("VLLM_API_KEY", "k")
    monkeypatch.setenv("COLUMNS", "160")
    assert commands.main(["top", "--url", f"{peer.url}/v1/", "--interval", "0.01", "--once"]) == 0
    told = capsys.readouterr().out
    assert all(name in told for name in ("ar/0", "ar/1", "dit/0", "tokens/s", "restarts"))
    assert peer.asked == 2


@pytest.mark.parametrize(("words", "waits", "status"), [(["--once"], 0, 130), ([], 0, 130), ([], 2, 0)])
def test_top_that_is_interrupted_before_a_table_is_no_success(
    peer: Peer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    waits: int,
    status: int,
) -> None:
    """`waits`: number of pauses before Ctrl-C."""
    left = iter(range(waits))

    def wait(*_: Any) -> bool:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return False

    monkeypatch.setattr("vllm_omni_ext.cli.top.threading", SimpleNamespace(Event=lambda: SimpleNamespace(wait=wait)))
    assert commands.main(["top", "--url", peer.url, *words]) == status
    printed = capsys.readouterr()
    assert ("ar/0" in printed.out, "interrupted" in printed.err) == (status == 0, status != 0)


@pytest.mark.parametrize(
    ("change", "words", "error"),
    [
        ({"key": "k"}, [], "needs a key; give it with --api-key or VLLM_API_KEY"),
        ({"key": "k"}, ["--api-key", "other"], "refuses this key; give it with --api-key or VLLM_API_KEY"),
        ({"code": 404}, [], "is no server of vllm-omni-ext: it has no /v1/omni/status"),
        ({"code": 500}, [], "/v1/omni/status answers with status 500"),
        ({"status": "<html>"}, [], "is no server of vllm-omni-ext: its status page is not JSON"),
        ({"status": '{"stages": 3}'}, [], "is no server of vllm-omni-ext: its status page has other fields: Expected"),
        ({"metrics": "<html>"}, [], "is no server of vllm-omni-ext: /metrics is not in Prometheus' format"),
        ({"url": "http://127.0.0.1:9"}, [], "no server answers at http://127.0.0.1:9: "),
        ({"url": "here:80"}, [], "--url: must begin with http"),
        ({"url": "http://localhost:80a"}, [], "--url: must begin with http:// or https://, and name a host"),
        ({"url": "http://[half"}, [], ", got 'http://[half'"),
        ({"url": "http://a..b"}, [], ", got 'http://a..b'"),
        ({"url": "http://"}, [], ", got 'http://'"),
        ({"url": "http://a b"}, [], ", got 'http://a b'"),
    ],
)
def test_a_server_that_cannot_be_shown_is_one_line(
    peer: Peer,
    change: dict[str, Any],
    words: list[str],
    error: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    vars(peer).update(change)
    assert commands.main(["top", "--url", peer.url, "--once", *words]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"vllm-omni-ext top: {'' if 'url' in change else peer.url}") and error in line
