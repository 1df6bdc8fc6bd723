"""Suites and pictures of public benchmarks, from small data in their format."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from dev.evaluations import pictures, suites
from tests.evaluation.answering import JsonHandler, answering
from vllm_omni_ext.evaluation.scores import choice
from vllm_omni_ext.evaluation.suite import load


def test_the_suite_of_daily_omni_has_video_sound_and_choices(tmp_path: Path) -> None:
    row = {"video_id": "abc", "Question": "What is it?", "Choice": ["A. a dog", "B. a cat"], "Answer": "B"}
    (tmp_path / "qa.json").write_text(json.dumps({"Entry_0": row, "Entry_1": row | {"Answer": "A"}}))
    (tmp_path / "Videos" / "abc").mkdir(parents=True)
    for name in ("video.mp4", "audio.wav"):
        (tmp_path / "Videos" / "abc" / f"abc_{name}").write_bytes(name.encode())
    suites.main(["daily-omni", str(tmp_path), str(tmp_path / "suite.yaml")])
    suite = load(tmp_path / "suite.yaml")
    assert (suite.score, suite.threshold, [item.expected for item in suite.items]) == ("choice", 0.685, ["B", "A"])
    [message] = suite.messages(suite.items[0])
    video, sound, text = message["content"]
    assert base64.b64decode(video["video_url"]["url"].partition(",")[2]) == b"video.mp4"
    assert sound["input_audio"]["format"] == "wav"
    assert text["text"].splitlines()[:3] == ["What is it?", "A. a dog", "B. a cat"]
    assert choice("B.", suite.items[0].expected) == 1


def test_the_suite_of_mmsu_has_sound_and_the_right_letter(tmp_path: Path) -> None:
    choices = {"choice_a": "joy", "choice_b": "fear", "choice_c": "anger", "choice_d": "shame"}
    row = {"id": "e_1", "audio": {"bytes": b"x"}, "question": "Which emotion?", **choices, "answer_gt": "anger"}
    found = suites.mmsu_rows([row], tmp_path / "sounds")
    [item] = found["items"]
    assert item["expected"] == "C" and "D. shame" in item["content"][1]["text"]
    assert Path(item["content"][0]["file"]).read_bytes() == b"x"


def test_the_suite_of_seed_tts_is_recognised_by_whisper(tmp_path: Path) -> None:
    (tmp_path / "meta.lst").write_text("c_1|Prompt.|prompt-wavs/c_1.wav|Get the trust fund to the bank early.\n")
    suites.main(["seed-tts", str(tmp_path / "meta.lst"), str(tmp_path / "suite.yaml")])
    suite = load(tmp_path / "suite.yaml")
    [item] = suite.items
    assert (item.expected, item.listen, suite.recogniser) == ("Get the trust fund to the bank early.", True, "whisper")
    assert suite.options["modalities"] == ["text", "audio"]


class Painter(JsonHandler):
    """Answers with a picture that contains its request."""

    asked: ClassVar[list[str]]

    def do_POST(self) -> None:
        self.asked.append(self.path)
        self.answer({"created": 0, "data": [{"b64_json": base64.b64encode(self.body()).decode()}]})


@pytest.fixture
def painter() -> Iterator[tuple[str, list[str]]]:
    asked: list[str] = []
    with answering(Painter, asked=asked) as url:
        yield url, asked


def test_pictures_of_geneval_are_drawn_once(
    tmp_path: Path, painter: tuple[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    url, asked = painter
    lines = [json.dumps({"tag": "counting", "prompt": f"a photo of {count} dogs"}) for count in (1, 2)]
    (tmp_path / "metadata.jsonl").write_text("\n".join(lines))
    arguments = ["geneval", str(tmp_path / "metadata.jsonl"), str(tmp_path / "out"), "--url", url]
    pictures.main(arguments)
    body = json.loads((tmp_path / "out/00001/samples/0003.png").read_bytes())
    assert (body["prompt"], body["seed"]) == ("a photo of 2 dogs", 3)
    assert (tmp_path / "out/00000/metadata.jsonl").read_text() == lines[0]
    assert asked == ["/v1/images/generations"] * 8
    (tmp_path / "out/00000/samples/0001.png").unlink()
    pictures.main(arguments)
    assert len(asked) == 9 and "1 pictures were drawn, 7 were there" in capsys.readouterr().out


def test_a_picture_of_gedit_is_an_edit(tmp_path: Path, painter: tuple[str, list[str]]) -> None:
    url, asked = painter
    row = {"key": "k1", "task_type": "color_alter", "instruction_language": "en", "instruction": "make it red"}
    wanted = pictures.gedit_rows([row | {"input_image": {"bytes": b"png bytes"}}], tmp_path)
    assert asyncio.run(pictures.draw(wanted, url, "bagel", 2)) == 1
    body = (tmp_path / "color_alter/en/k1.png").read_bytes()
    assert b"make it red" in body and b"png bytes" in body and asked == ["/v1/images/edits"]
