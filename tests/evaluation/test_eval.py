"""`vllm-omni-ext eval` against a small HTTP server, with the real client."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from xml.etree import ElementTree

import numpy as np
import pytest
import soundfile
import yaml

from tests.evaluation.answering import JsonHandler, answering
from vllm_omni_ext.cli.eval import _named, main, scored
from vllm_omni_ext.cli.main import main as command
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.evaluation import servers
from vllm_omni_ext.evaluation.servers import Answer, ServerFailed
from vllm_omni_ext.evaluation.suite import Item, Suite

COLOURS = ("red", "blue", "green", "white", "black", "pink")


class Echo(JsonHandler):
    """Answers `say X` with X; `wrong` is the number of items with another answer."""

    wrong = 0
    models = ("echo",)
    asked: ClassVar[list[Any]] = []

    def do_GET(self) -> None:
        self.answer({"object": "list", "data": [{"id": name, "object": "model"} for name in self.models]})

    def do_POST(self) -> None:
        body = json.loads(self.body())
        self.asked.append(body["messages"])
        said = body["messages"][-1]["content"].removeprefix("say ")
        if said == "nothing":
            self.answer({"error": {"message": "say something", "code": 400}}, 400)
            return
        assert body["temperature"] == 0 and body["max_completion_tokens"] == 9
        text = "wrong" if said in COLOURS[: self.wrong] else said
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if "audio" in body.get("modalities", ()):
            file = io.BytesIO()
            soundfile.write(file, np.zeros(2400), 24_000, format="wav")
            sound = base64.b64encode(file.getvalue()).decode()
            message = {"role": "assistant", "content": None, "audio": {"id": "a", "data": sound, "transcript": text}}
        self.answer({"id": "x", "object": "chat.completion", "choices": [{"index": 0, "message": message}]})


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """No cell of a table is broken into lines."""
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def echo() -> Iterator[Callable[..., str]]:
    """Starts a server; returns its URL."""
    with contextlib.ExitStack() as stack:
        yield lambda **attributes: stack.enter_context(answering(Echo, **attributes))


def suite(folder: Path, **fields: Any) -> list[str]:
    items = [{"id": colour, "content": f"say {colour}", "expected": colour} for colour in COLOURS]
    content = {"name": "colours", "threshold": 0.9, "options": {"max_completion_tokens": 9}, "items": items, **fields}
    (folder / "suite.yaml").write_text(yaml.safe_dump(content))
    return ["--suite", str(folder / "suite.yaml")]


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
@pytest.mark.parametrize("name", ["", "new="])
def test_the_path_of_a_server_may_be_left_out(name: str, end: str) -> None:
    assert _named(f"{name}http://host:1{end}") == (name[:-1] or f"http://host:1{end}", "http://host:1/v1")


def test_a_missing_requirement_is_reported_with_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [
        name for name in sys.modules if name.startswith(("vllm_omni_ext.evaluation", "vllm_omni_ext.cli.eval"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "jiwer", None)
    assert command(["eval", "--help"]) == 1
    assert "pip install 'vllm-omni-ext[eval]'" in capsys.readouterr().err


def test_a_server_with_right_answers_passes(echo: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [f"--json={tmp_path / 'out.json'}", f"--junit={tmp_path / 'out.xml'}"]
    assert main([*suite(tmp_path), "--url", echo(), *files]) == 0
    assert "1.000 [1.000, 1.000]" in capsys.readouterr().out
    [server] = json.loads((tmp_path / "out.json").read_text())["servers"]
    assert (server["model"], server["score"]["mean"], server["problems"]) == ("echo", 1, [])
    assert {item["id"]: item["text"] for item in server["items"]} == {colour: colour for colour in COLOURS}
    root = ElementTree.parse(tmp_path / "out.xml").getroot()
    assert [each.attrib["name"] for each in root.iter("testcase")] == [*COLOURS, "the suite"]
    assert [each.attrib["failures"] for each in root] == ["0"]


def test_a_score_below_the_threshold_fails(echo: Any, tmp_path: Path) -> None:
    xml = tmp_path / "out.xml"
    assert main([*suite(tmp_path), "--url", echo(wrong=1), f"--junit={xml}"]) == 1
    messages = [each.attrib["message"] for each in ElementTree.parse(xml).getroot().iter("failure")]
    assert messages == ["scored 0: wrong", "the score 0.833 is below the threshold 0.9"]


def test_a_score_below_the_baseline_fails(echo: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, before = suite(tmp_path, threshold=0), tmp_path / "before.json"
    assert main([*arguments, "--url", echo(), f"--json={before}"]) == 0
    assert main([*arguments, "--url", echo(wrong=1), f"--baseline={before}"]) == 0, "one of six may be chance"
    assert main([*arguments, "--url", echo(wrong=5), f"--baseline={before}"]) == 1
    assert "5 worse" in " ".join(capsys.readouterr().out.split())


def test_a_baseline_of_other_items_or_options_is_refused(echo: Any, tmp_path: Path) -> None:
    before, server = tmp_path / "before.json", echo()
    assert main([*suite(tmp_path), "--url", server, f"--json={before}"]) == 0
    items = [{"id": "other", "content": "say red", "expected": "red"}]
    for changed in ({"items": items}, {"options": {"max_completion_tokens": 8}}, {"system": "be kind"}):
        with pytest.raises(ConfigError, match="before its items or options changed; make a new one"):
            main([*suite(tmp_path, **changed), "--url", server, f"--baseline={before}"])
    assert main([*suite(tmp_path, threshold=0.5), "--url", server, f"--baseline={before}"]) == 0
    content = json.loads(before.read_text())
    del content["servers"][0]["items"][1]
    before.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"lacks the items blue$"):
        main([*suite(tmp_path), "--url", server, f"--baseline={before}"])


def test_conversations_and_the_system_message_are_sent(echo: Any, tmp_path: Path) -> None:
    before = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    last = {"role": "user", "content": "say red"}
    items = [
        {"id": "a", "messages": [*before, last], "expected": "red"},
        {"id": "b", "content": "say red", "expected": "red"},
    ]
    asked: list[Any] = []
    server = echo(asked=asked)
    assert main([*suite(tmp_path, items=items, system="be kind"), "--url", server, "--at-once", "1"]) == 0
    system = {"role": "system", "content": "be kind"}
    assert asked == [[system, *before, last], [system, last]]


def test_control_characters_and_markup_are_replaced_in_files_and_tables(
    echo: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    items = [{"id": "[/x] \x07", "content": "say [/red] \x1b\x00", "expected": "blue"}]
    xml = tmp_path / "out.xml"
    assert main([*suite(tmp_path, items=items, name="s\x01"), "--url", f"[/b]\x02={echo()}", f"--junit={xml}"]) == 1
    assert "[/b]" in capsys.readouterr().out
    (case, _) = ElementTree.parse(xml).getroot().iter("testcase")
    assert case.attrib["name"] == "[/x] \ufffd"
    assert case[0].attrib["message"] == "scored 0: [/red] \ufffd\ufffd"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--json", "{folder}"], r"--json .*is a folder"),
        (["--junit", "{folder}/missing/out.xml"], r"--junit .*cannot be written"),
        (["--url", "http://127.0.0.1:9/v1"], "does not answer"),
        (["--url", "a=http://x/v1", "--url", "a=http://y/v1"], "two servers are called a; write NAME="),
        (["--url", "http://x/v1", "--url", "http://x/v1"], "two servers are called http://x/v1"),
        (["--serve", "m", "--topology", "a=--x", "--topology", "a=--y"], "two servers are called a"),
        (["--topology", "a=--x"], "--topology: starts servers; name the model with --serve MODEL"),
        (["--serve", "m", "--url", "http://x/v1"], "--url: names a server that runs; with --serve, leave it out"),
        (["--url", "a=http://localhost:80a"], "--url: must begin with .*, got 'http://localhost:80a'"),
        (["--serve", "m", "--topology", "a=--x 'b"], "--topology a=--x 'b: No closing quotation"),
    ],
)
def test_wrong_files_and_servers_are_refused_before_the_first_request(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        main([*suite(tmp_path), *(each.format(folder=tmp_path) for each in arguments)])


def test_flags_of_a_topology_are_split_like_a_command_line(
    monkeypatch: pytest.MonkeyPatch, echo: Any, tmp_path: Path
) -> None:
    started: list[Any] = []

    def served(model: str, name: str, flags: list[str]) -> Any:
        started.append((model, name, flags))
        return contextlib.nullcontext(url)

    url = echo()
    monkeypatch.setattr("vllm_omni_ext.cli.eval.served", served)
    two = """two talkers=--stage-overrides '{"talker":{"replicas":2}}' --no-async-chunk"""
    assert main([*suite(tmp_path), "--serve", "m", "--topology", "usual=", "--topology", two, "--alike"]) == 0
    assert started[0] == ("m", "topology 'usual'", [])
    assert started[1][1:] == (
        "topology 'two talkers'",
        ["--stage-overrides", '{"talker":{"replicas":2}}', "--no-async-chunk"],
    )


@pytest.mark.engine
@pytest.mark.extended
def test_a_server_that_does_not_start_is_reported(tmp_path: Path) -> None:
    """The real command refuses the flag before it loads a model."""
    with pytest.raises(ServerFailed, match=r"(?s)topology 'odd': the server ended with exit status \d.*no-such-flag"):
        main([*suite(tmp_path), "--serve", str(tmp_path), "--topology", "odd=--no-such-flag"])


def test_the_error_of_a_server_that_is_never_ready_has_the_last_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(seconds: float) -> int:
        raise subprocess.TimeoutExpired("vllm", seconds)

    monkeypatch.setattr(servers, "START_S", 0.05)
    process: Any = SimpleNamespace(wait=wait)
    problem = servers._problem(process, "http://127.0.0.1:9/health/ready")
    assert problem is not None and re.fullmatch(r"not ready after 0.05 s: .*Connection refused.*", problem)


def test_models_counts_and_baselines_of_the_command_line_are_checked(
    echo: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["eval", *suite(tmp_path), "--url", echo(models=("echo", "base"))]
    assert command(arguments) == 1
    assert "has the models echo, base; choose one with --model" in capsys.readouterr().err
    assert command([*arguments, "--model", "base"]) == 0
    with pytest.raises(SystemExit):
        main([*arguments[1:], "--at-once", "0"])
    for number, content in enumerate(("{}", '{"servers": []}', '{"servers": [{"suite": "x"}]}')):
        (tmp_path / str(number)).write_text(content)
    for name in ("missing", "0", "1", "2"):
        with pytest.raises(ConfigError, match="--baseline"):
            main([*suite(tmp_path), f"--baseline={tmp_path / name}"])


def test_other_answers_of_a_second_server_fail_with_alike(echo: Any, tmp_path: Path) -> None:
    arguments = [*suite(tmp_path, threshold=0), "--url", f"one={echo()}", "--url", f"two={echo(wrong=1)}"]
    out = tmp_path / "out.json"
    assert main([*arguments, f"--json={out}"]) == 0
    assert main([*arguments, "--alike", f"--json={out}"]) == 1
    problems = {each["server"]: each["problems"] for each in json.loads(out.read_text())["servers"]}
    assert problems == {"one": [], "two": ["other answers than one to 1: red"]}


def test_an_item_without_an_answer_counts_as_wrong(echo: Any, tmp_path: Path) -> None:
    items = [
        {"id": "a", "content": "say red", "expected": "red"},
        {"id": "b", "content": "say nothing", "expected": ""},
    ]
    out = tmp_path / "out.json"
    assert main([*suite(tmp_path, threshold=0, items=items), "--url", echo(), f"--json={out}"]) == 1
    [server] = json.loads(out.read_text())["servers"]
    assert server["problems"] == ["no answer to 1: b"] and server["score"]["mean"] == 0.5
    assert "say something" in server["items"][1]["error"]


def test_recognised_sound_is_scored(echo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_omni_ext.cli.eval.recogniser", lambda name, words: lambda wav: f"{len(wav) > 4800} red")
    items = [{"id": "a", "content": "say red", "expected": "true red", "listen": True}]
    spoken = {"max_completion_tokens": 9, "modalities": ["text", "audio"], "audio": {"format": "wav"}}
    fields = {"items": items, "recogniser": "whisper", "options": spoken}
    out = tmp_path / "out.json"
    assert main([*suite(tmp_path, **fields), "--url", echo(), f"--json={out}"]) == 0
    [item] = json.loads(out.read_text())["servers"][0]["items"]
    assert (item["text"], item["heard"], len(item["sound"])) == ("red", "True red", 64)


@pytest.mark.parametrize(("sound", "error"), [(b"", "the answer has no sound"), (b"x", "the sound cannot be read")])
def test_an_answer_without_readable_sound_counts_as_wrong(sound: bytes, error: str) -> None:
    def listen(sound: bytes) -> str:
        soundfile.read(io.BytesIO(sound))
        return "red"

    item = Item("a", "red", "say red", listen=True)
    found = scored(Suite("s", [item], recogniser="whisper"), item, Answer("red", sound), listen)
    assert found.score == 0 and error in str(found.error)
