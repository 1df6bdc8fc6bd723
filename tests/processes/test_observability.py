"""Metrics, status, traces and spans of a served model, after traffic that is known."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families

from examples.server import HOST, Server
from tests.support.cluster import MODEL, STAGES, get, kill, replicas, status, until
from vllm_omni_ext.cli import main as commands
from vllm_omni_ext.cli.top import Client, rows
from vllm_omni_ext.metrics import ALL, PREFIX
from vllm_omni_ext.modalities.audio import METRICS as AUDIO

pytestmark = pytest.mark.engine

WORDS, FRAMES, RATE = 12, 23, 24_000
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
ASK: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Tell me about the blue cat in the moon"}],
    "max_completion_tokens": WORDS,
    "temperature": 0,
}
BODY: dict[str, Any] = {"ignore_eos": True, "talker": {"max_tokens": FRAMES + 1, "min_tokens": FRAMES + 1}}
MEASURED_TEXT = {"ignore_eos": True, "return_stage_metrics": True}
MEASURED = {**BODY, **MEASURED_TEXT}
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Receiver:
    """An OTLP/HTTP endpoint that keeps the spans it is sent."""

    def __init__(self) -> None:
        spans: list[Any] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                data = gzip.decompress(data) if self.headers.get("Content-Encoding") == "gzip" else data
                for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
                    spans.extend(span for scope in resource.scope_spans for span in scope.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self.spans = spans
        self.server = ThreadingHTTPServer((HOST, 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server.server_address[1]}/v1/traces"


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture(scope="module")
def server(tiny: Path, receiver: Receiver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ["--served-model-name", MODEL, "--max-model-len", "2048", "--otlp-traces-endpoint", receiver.url]
    flags += ["--omni-restart-limit", "0"]  # the last test takes a stage away for good
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        with Server(tiny, tmp_path_factory.mktemp("server") / "server.log", flags) as running:
            yield running


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0, timeout=120)


def scrape(server: Server) -> Series:
    families = text_string_to_metric_families(get(server, "/metrics")[1].decode())
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def value(series: Series, name: str, **labels: str) -> float:
    """The sum of all series with these labels."""
    wanted = set(labels.items())
    found = [v for (known, have), v in series.items() if known == name and wanted <= have]
    assert found, f"no series {name} {labels}"
    return sum(found)


def load(server: Server) -> int:
    """Return the requests in all schedulers."""
    return sum(each["running"] + each["waiting"] for each in replicas(server).values())


@pytest.fixture(scope="module")
def reply(client: openai.OpenAI) -> Any:
    """A spoken answer to a request with trace headers and metrics."""
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    return client.chat.completions.create(
        **ASK, modalities=["text", "audio"], extra_body=MEASURED, extra_headers=headers
    )


@pytest.fixture(scope="module")
def traffic(client: openai.OpenAI, server: Server, reply: Any) -> Series:
    """The metrics after: text, two spoken answers (one streamed), two refused, one that was left before it spoke."""
    client.chat.completions.create(**ASK, modalities=["text"], extra_body={"ignore_eos": True})
    sound = {"voice": "ethan", "format": "pcm16"}
    list(client.chat.completions.create(
        **ASK, modalities=["text", "audio"], stream=True, audio=sound, extra_body=BODY
    ))  # fmt: skip
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(**ASK, modalities=["smell"])
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=MODEL, messages=3)
    endless = {**ASK, "max_completion_tokens": 1500, "modalities": ["text", "audio"]}
    silent = {"ignore_eos": True, "chunks": {"text": "all"}}
    stream = client.chat.completions.create(**endless, stream=True, audio=sound, extra_body=silent)
    next(stream)
    assert until(lambda: load(server) > 0)
    stream.close()
    assert until(lambda: load(server) == 0), "running and waiting did not return to 0"
    return scrape(server)


def ours(series: Series, name: str, **labels: str) -> float:
    return value(series, PREFIX + name, **labels)


def test_latencies(traffic: Series) -> None:
    assert ours(traffic, "time_to_first_text_seconds_count", modalities="text") == 1
    assert ours(traffic, "time_to_first_text_seconds_count", modalities="text+audio") == 3
    assert ours(traffic, "time_to_first_audio_seconds_count") == 1, "of the streamed answer"
    text, sound = (ours(traffic, f"time_to_first_{kind}_seconds_sum") for kind in ("text", "audio"))
    assert text > 0 and sound > 0
    assert ours(traffic, "real_time_factor_count") == 2
    assert ours(traffic, "audio_chunk_gap_seconds_count") >= 0


def test_sound_made(traffic: Series, reply: Any) -> None:
    samples = reply.choices[0].audio_metadata["frame_count"]
    assert ours(traffic, "audio_seconds_total") == pytest.approx(2 * samples / RATE)


@pytest.mark.parametrize(("stage", "requests"), [("thinker", 4), ("talker", 2), ("code2wav", 2)])
def test_stages(traffic: Series, stage: str, requests: int) -> None:
    for name in ("stage_queue_seconds", "stage_request_duration_seconds"):
        assert ours(traffic, f"{name}_count", stage=stage) in (requests, requests + 1)  # the one that was left
    for name in ("running", "waiting", "in_flight"):
        assert ours(traffic, f"replica_requests_{name}", stage=stage, replica=f"{stage}/0") == 0
    assert ours(traffic, "replica_up", stage=stage, replica=f"{stage}/0") == 1


def test_handovers(traffic: Series, reply: Any) -> None:
    for source, target in (("thinker", "talker"), ("talker", "code2wav")):
        over = next(over for over in reply.metrics["handovers"] if over["from"] == source)
        # The other answer's chunks are others: their sizes adapt to the time they take.
        assert ours(traffic, "stage_transfer_chunks_total", source=source, target=target) > over["chunks"] > 0
        assert ours(traffic, "stage_transfer_bytes_total", source=source, target=target) >= 2 * over["bytes"] > 0


def test_outcomes(traffic: Series) -> None:
    assert ours(traffic, "requests_total", outcome="finished", modalities="text") == 1
    assert ours(traffic, "requests_total", outcome="finished", modalities="text+audio") == 2
    assert ours(traffic, "requests_total", outcome="aborted", modalities="text+audio") == 1
    assert ours(traffic, "errors_total", kind="RequestError", stage="") == 2


def test_engines_are_named(traffic: Series) -> None:
    for number, stage in enumerate(STAGES):
        assert ours(traffic, "replica_info", engine=str(number), stage=stage, replica=f"{stage}/0") == 1
        assert value(traffic, "vllm:num_requests_running", engine=str(number)) == 0
        assert value(traffic, "vllm:cache_config_info", engine=str(number)) == 1
        assert value(traffic, "vllm:num_requests_running", engine=str(number), stage=stage, replica=f"{stage}/0") == 0
    of_engines = [dict(labels) for name, labels in traffic if name.startswith("vllm:") and "engine" in dict(labels)]
    assert of_engines and all({"stage", "replica"} <= labels.keys() for labels in of_engines)
    assert value(traffic, "vllm:generation_tokens_total", engine="1") >= 2 * (FRAMES + 1)
    assert value(traffic, "vllm:request_success_total", engine="0", finished_reason="length") == 3
    assert value(traffic, "vllm:request_success_total", engine="1") == 0


NOT_HERE = {"request_failovers_total", "stage_steps_total", "stage_part_seconds"}
NOT_HERE |= {metric.name for metric in ALL if metric.name.startswith(("kv_", "realtime_"))}
"""Metrics without an event: no replica was lost, no stage counts steps of its own, none has two sides, and there are no
realtime sessions."""


def test_every_metric_is_there(traffic: Series) -> None:
    names = {name for name, _ in traffic}
    missing = {m.name for m in (*ALL, *AUDIO) if m.full_name + ("_count" if m.kind == "histogram" else "") not in names}
    assert missing <= NOT_HERE


def test_metrics_of_one_request(reply: Any) -> None:
    stages = reply.metrics["stages"]
    assert list(stages) == list(STAGES)
    times = [stages[s][t] for s in STAGES for t in ("queued_s", "first_output_s", "last_output_s")]
    assert all(time >= 0 for time in times) and all(s["waited_s"] >= 0 for s in stages.values())
    assert [stages[s]["replica"] for s in STAGES] == [f"{s}/0" for s in STAGES]
    assert (stages["thinker"]["tokens"], stages["talker"]["tokens"]) == (WORDS, FRAMES + 1)
    audio, facts = reply.metrics["audio"], reply.choices[0].audio_metadata
    assert (audio["frames"], audio["samples"]) == (FRAMES, facts["frame_count"])
    assert reply.metrics["request_id"] == reply.id


@pytest.mark.parametrize("modalities", [["text"], ["text", "audio"]])
@pytest.mark.parametrize("usage", [True, False])
def test_metrics_of_a_stream(client: openai.OpenAI, modalities: list[str], usage: bool) -> None:
    fields = {**ASK, "modalities": modalities, "stream": True, "audio": {"voice": "ethan", "format": "pcm16"}}
    body = MEASURED if "audio" in modalities else MEASURED_TEXT
    chunks = list(client.chat.completions.create(
        **fields, stream_options={"include_usage": usage}, extra_body=body
    ))  # fmt: skip
    last = chunks[-1]
    assert last.choices == [] and (last.usage is not None) == usage
    assert last.metrics["stages"]["thinker"]["tokens"] == WORDS
    assert ("audio" in last.metrics) == ("audio" in modalities)
    assert sum(bool(getattr(chunk, "metrics", None)) for chunk in chunks) == 1


def test_without_the_field_nothing_is_added(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(**ASK, modalities=["text"], extra_body={"ignore_eos": True})
    assert plain.metrics is None
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**ASK, extra_body={"return_stage_metrics": "yes"})
    assert caught.value.param == "return_stage_metrics"


def test_spans(receiver: Receiver, reply: Any) -> None:
    def mine() -> dict[str, Any]:
        return {span.name: span for span in receiver.spans if span.trace_id.hex() == TRACE}

    assert until(lambda: {"llm_request", "omni_talker", "omni_code2wav"} <= set(mine()))
    spans = mine()
    talker, vocoder = spans["omni_talker"], spans["omni_code2wav"]
    assert {span.parent_span_id.hex() for span in (talker, vocoder, spans["llm_request"])} == {PARENT}
    assert talker.start_time_unix_nano < talker.end_time_unix_nano <= vocoder.end_time_unix_nano
    facts = {fact.key: fact.value for fact in talker.attributes}
    assert facts["gen_ai.request.id"].string_value == reply.id
    assert facts["omni.replica"].string_value == "talker/0"
    assert facts["gen_ai.usage.completion_tokens"].int_value == FRAMES + 1


def test_status(server: Server, reply: Any) -> None:
    assert until(lambda: load(server) == 0)  # replicas report it from time to time
    now = status(server)
    assert [stage["name"] for stage in now["stages"]] == list(STAGES)
    for stage in now["stages"]:
        [replica] = stage["replicas"]
        assert (replica["id"], replica["state"], replica["restarts"]) == (f"{stage['name']}/0", "UP", 0)
        assert (replica["running"], replica["waiting"]) == (0, 0)
        assert psutil.pid_exists(replica["pid"])
    assert now["api_servers"][0]["state"] == "UP" and psutil.pid_exists(now["api_servers"][0]["pid"])
    assert 0 < now["uptime_s"] < 3600


def test_top(
    server: Server, traffic: Series, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    before = Client(server.base_url).sample()
    assert [(row["id"], row["state"], row["restarts"]) for row in rows(before, before)] == [
        (f"{name}/0", "UP", 0) for name in STAGES
    ]
    assert commands.main(["top", "--url", server.base_url, "--interval", "0.2", "--once"]) == 0
    told = capsys.readouterr().out
    assert all(f"{name}/0" in told for name in STAGES) and "tokens/s" in told
    assert "audio seconds 0.00/s" in told, "an idle server makes nothing"
    now = Client(server.base_url).sample()
    assert all(row["tokens_per_s"] == 0.0 for row in rows(before, now) if row["id"] != "code2wav/0")


def test_health(server: Server) -> None:
    head = httpx.head(f"http://{HOST}:{server.port}/health")
    assert (head.status_code, head.content) == (200, b"")
    code, body = get(server, "/health")
    assert (code, json.loads(body)["status"]) == (200, "healthy")


def test_a_lost_stage(server: Server, client: openai.OpenAI, traffic: Series) -> None:
    """Last: the talker is gone afterwards."""
    kill(server, "talker/0")
    assert until(lambda: get(server, "/health")[0] == 503)
    body = json.loads(get(server, "/health")[1])
    assert body["reason"] == "stage 'talker' has no live replica"
    assert body["stages"]["talker"] == {"up": 0, "replicas": 1}
    assert httpx.head(f"http://{HOST}:{server.port}/health").status_code == 503
    assert ours(scrape(server), "replica_up", replica="talker/0") == 0
    assert replicas(server)["talker/0"]["state"] == "DOWN"
