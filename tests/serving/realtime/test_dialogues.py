"""Whole dialogues with every field of every event, in `tests/data/realtime/`: events of a client and of the server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.realtime import Driver
from vllm_omni_ext.serving.realtime.response import Usage

DIALOGUES = Path(__file__).parents[2] / "data" / "realtime"


def carry_out(driver: Driver, step: dict[str, Any]) -> None:
    """Carry out one step: an event of the client, frames of sound, or a part of the model's answer."""
    session = driver.session
    match step:
        case {"client": event}:
            driver.take(session.receive(json.dumps(event)))
        case {"hear": {"ms": ms, "speech": speech}}:
            driver.hear(ms, speech)
        case {"text": {"response": response, "text": text}}:
            driver.take(session.text(response, text))
        case {"sound": {"response": response, "made_ms": made, "sent_ms": sent, "played_ms": played}}:
            session.made(response, made, last=True)
            driver.take(session.sound(response, b"\0\0", sent))
            driver.playback.played[response] = played
        case {"call": {"response": response, "name": name, "arguments": arguments}}:
            driver.take(session.call(response, 0, name, arguments))
        case {"end": {"response": response, "finish_reason": reason}}:
            usage = Usage(prompt=20, prompt_audio=8, cached=4, text=6, audio=3)
            driver.take(session.generated(response, reason, usage))
            driver.take(session.drained(response))
        case {"prompt": messages}:
            assert driver.generate.messages == messages
        case _:
            raise AssertionError(step)


@pytest.mark.parametrize("file", sorted(DIALOGUES.glob("*.json")), ids=lambda file: file.stem)
def test_a_dialogue_has_exactly_these_events(file: Path) -> None:
    driver = Driver(manual=False)
    for number, entry in enumerate(json.loads(file.read_text())):
        before = len(driver.events)
        carry_out(driver, entry["step"])
        found = driver.events[before:]
        assert [list(event.items()) for event in found] == [list(event.items()) for event in entry["events"]], number
