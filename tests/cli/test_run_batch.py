"""`vllm-omni-ext run-batch` on an HTTP server without a model."""

from __future__ import annotations

import fcntl
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from vllm_omni_ext.batch import running
from vllm_omni_ext.cli import run_batch
from vllm_omni_ext.errors import ConfigError, OmniError

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"


class Handler(BaseHTTPRequestHandler):
    """Answers with the body; with its `status`, if it has one."""

    seen: list[tuple[str, dict[str, Any], dict[str, str]]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.seen.append((self.path, body, dict(self.headers)))
        data = json.dumps(body).encode()
        self.send_response(body.get("status", 200))
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[tuple[str, Any]]:
    """(URL, the requests so far)"""
    handler = type("Counted", (Handler,), {"seen": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{made.server_port}", handler.seen
        made.shutdown()
        thread.join()


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    lines = [
        {"custom_id": f"l{status}", "method": "POST", "url": CHAT, "body": {"status": status}} for status in (200, 201)
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\nwrong\n")
    return ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]


def ids(files: list[str]) -> list[Any]:
    return [json.loads(line)["custom_id"] for line in Path(files[-1]).read_text().splitlines()]


def test_answers_are_written_and_answered_lines_are_not_sent_again(
    server: tuple[str, Any], files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, seen = server
    monkeypatch.setenv("OPENAI_API_KEY", "of-the-environment")
    assert run_batch.main([*files, "--url", f"{url}/v1", "--priority", "3"]) == 1, "a line is wrong"
    assert sorted(map(str, ids(files))) == ["None", "l200", "l201"]
    path, _, headers = seen[0]
    assert path == CHAT and headers["Authorization"] == "Bearer of-the-environment"
    assert headers["X-Vllm-Priority"] == "3"
    output = Path(files[-1])
    kept = [line for line in output.read_text().splitlines() if "l201" not in line]
    output.write_text("\n".join(kept) + '\n{"custom_id": "l2')
    seen.clear()
    assert run_batch.main([*files, "--url", url, "--api-key", "k"]) == 0
    assert [(body["status"], headers["Authorization"]) for _, body, headers in seen] == [(201, "Bearer k")]
    assert sorted(map(str, ids(files))) == ["None", "l200", "l201"]


def test_a_server_that_is_gone_ends_the_command_without_errors_in_the_file(
    server: tuple[str, Any], files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, seen = server
    monkeypatch.setattr(running, "FIRST_PAUSE_S", 0.001)
    source = Path(files[1])
    source.write_text(source.read_text().replace("201", "503"))
    with pytest.raises(OmniError, match=r"2 attempts; .* status 503.*; run the same command again to continue"):
        run_batch.main([*files, "--url", url, "--attempts", "2", "--concurrency", "1"])
    assert "l200" in ids(files) and "l503" not in ids(files)
    assert [body["status"] for _, body, _ in seen] == [200, 503, 503]


def test_a_model_is_served_with_the_flags_that_are_not_the_commands(
    server: tuple[str, Any], files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []

    @contextmanager
    def served(*given: Any) -> Iterator[str]:
        started.append(given)
        yield f"{server[0]}/v1"

    keys: list[str | None] = []
    run = run_batch._run
    monkeypatch.setattr(run_batch, "served", served)
    monkeypatch.setattr(run_batch, "_run", lambda args, url, key, *rest: keys.append(key) or run(args, url, key, *rest))
    monkeypatch.setenv("VLLM_API_KEY", "of the server")
    monkeypatch.setenv("OPENAI_API_KEY", "of another server")
    flags = ["--max-model-len", "8", "--stage-config", "x"]
    for words in (["m", *files, *flags], [*files, *flags, "--model", "m", "--api-key", "k"]):
        run_batch.main(words)
    assert started == [
        ("m", "vllm serve m", flags),
        ("m", "vllm serve m", [*flags, "--api-key", "k"]),
    ]
    assert keys == ["of the server", "k"]


@pytest.mark.parametrize("address", ["http://host:80a/x.wav", "http://[half/x.wav", "http://host/\ud83d.wav"])
def test_a_url_of_a_line_that_is_malformed_is_an_error_of_the_line(
    address: str, server: tuple[str, Any], files: list[str]
) -> None:
    line = {"custom_id": "b", "method": "POST", "url": "/v1/audio/transcriptions", "body": {"file_url": address}}
    with Path(files[1]).open("a") as source:
        source.write(json.dumps(line))
    assert run_batch.main([*files, "--url", server[0]]) == 1
    found = [json.loads(line) for line in Path(files[-1]).read_text().splitlines()]
    errors = {line["custom_id"]: line["error"]["error"] for line in found if line["custom_id"] == "b"}
    assert errors["b"]["code"] == 400 and errors["b"]["param"] == "file_url" and len(found) == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "write either --url URL, or the MODEL"),
        (["--model", "m", "--url", "http://h"], "write either --url URL, or the MODEL"),
        (["--url", "http://h", "--max-model-len", "8"], "unrecognized arguments: --max-model-len 8; flags of vllm"),
        (["--url", "http://h", "--concurrency", "0"], "must be 1 or more"),
        (["m", "-oma", "10.0.0.1"], "-oma: write --omni-master-address"),
        (["m", "-omp=9100"], "-omp: write --omni-master-port"),
    ],
)
def test_wrong_words(words: list[str], message: str, files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        run_batch.main([*files, *words])
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_wrong_files(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = ["--url", "http://127.0.0.1:9"]
    with pytest.raises(ConfigError, match=r"--url: must begin with .*, got 'http://localhost:80a'"):
        run_batch.main([*files, "--url", "http://localhost:80a"])
    with pytest.raises(ConfigError, match=r"-i .*: there is no such file"):
        run_batch.main(["-i", str(tmp_path / "none"), *files[2:], *url])
    with pytest.raises(ConfigError, match="is a folder"):
        run_batch.main([*files[:2], "-o", str(tmp_path), *url])
    with pytest.raises(ConfigError, match="line 1 is not the output of a batch"):
        run_batch.main([*files[:2], "-o", files[1], *url])
    with pytest.raises(SystemExit):
        run_batch.main(["-i", "http://host/in.jsonl", *files[2:], *url])
    assert "must be a file of this machine" in capsys.readouterr().err
    with open(files[-1], "ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process writes to it"):
            run_batch.main([*files, *url])
