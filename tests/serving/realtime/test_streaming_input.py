"""Whole blocks of the input sound are computed before the turn ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.realtime import OFFER, PCM_MS, SILENT, SPOKEN, Driver
from vllm_omni_ext.serving.realtime.session import BLOCK_MARGIN_MS, ComputeAhead, Generate, StopAhead

BLOCK_MS = 1000
STREAMING = replace(OFFER, block_ms=float(BLOCK_MS))
FIRST, STEP_MS = BLOCK_MS + BLOCK_MARGIN_MS, BLOCK_MS // 4


def ahead(driver: Driver) -> list[Any]:
    """Take the commands about sound that is computed ahead, and responses."""
    commands, driver.commands = driver.commands, []
    return [each for each in commands if isinstance(each, (ComputeAhead, StopAhead, Generate))]


def milliseconds(command: ComputeAhead) -> float:
    return float(command.messages[-1]["content"][0]["input_audio"].ms)


def test_blocks_are_computed_at_each_quarter_of_a_block_until_the_turn_ends() -> None:
    driver = Driver(offer=STREAMING)
    driver.send("session.update", session={"type": "realtime", "instructions": "Be brief."})
    driver.user("Hello")
    ahead(driver)
    driver.append(FIRST - 1)
    assert ahead(driver) == []
    driver.append(1)
    driver.append(STEP_MS - 1)
    (one,) = ahead(driver)
    assert milliseconds(one) == FIRST
    driver.append(1)
    driver.append(3 * STEP_MS)
    again, two = ahead(driver)
    assert (milliseconds(again), milliseconds(two)) == (FIRST + STEP_MS, FIRST + BLOCK_MS)
    driver.send("input_audio_buffer.commit")
    assert ahead(driver) == [StopAhead()]
    driver.send("response.create")
    (answer,) = ahead(driver)
    assert two.settings == answer.settings
    assert two.messages[:-1] == answer.messages[:-1] and len(two.messages) == 3
    data = [each.messages[-1]["content"][0]["input_audio"].data for each in (two, answer)]
    assert data[0] == data[1]
    driver.answer(answer.response_id, "Hi.")
    driver.append(FIRST)
    (next_turn,) = ahead(driver)
    assert milliseconds(next_turn) == FIRST and len(next_turn.messages) == 5


def test_blocks_begin_with_the_sound_of_a_detected_turn() -> None:
    driver = Driver(offer=STREAMING, manual=False)
    driver.hear(3200, SILENT)
    assert ahead(driver) == [], "no turn has begun"
    driver.hear(64, SPOKEN)
    assert ahead(driver) == []
    driver.hear(FIRST - 300 - 64 + 32, SPOKEN)  # the turn begins with 300 ms of padding
    (one,) = ahead(driver)
    assert FIRST <= milliseconds(one) <= FIRST + 32
    driver.hear(512, SILENT)
    *_, stop, answer = ahead(driver)
    assert stop == StopAhead() and isinstance(answer, Generate)
    begun = one.messages[-1]["content"][0]["input_audio"].data
    assert answer.messages[-1]["content"][0]["input_audio"].data.startswith(begun)


@pytest.mark.parametrize("kind", ["input_audio_buffer.clear", "session.update"])
def test_sound_that_becomes_no_turn_is_not_computed_further(kind: str) -> None:
    driver = Driver(offer=STREAMING, manual=False)
    driver.hear(FIRST + 64, SPOKEN)
    assert [type(each) for each in ahead(driver)] == [ComputeAhead]
    turns = {"audio": {"input": {"turn_detection": None}}}
    fields = {} if kind == "input_audio_buffer.clear" else {"session": {"type": "realtime", **turns}}
    driver.send(kind, **fields)
    assert ahead(driver) == [StopAhead()]
    driver.send("input_audio_buffer.clear")
    assert ahead(driver) == []


def test_nothing_is_computed_while_a_response_changes_the_conversation() -> None:
    driver = Driver(offer=STREAMING)
    driver.user("Hello")
    response = driver.respond()
    ahead(driver)
    driver.append(FIRST)
    assert ahead(driver) == []
    driver.answer(response, "Hi.")
    driver.append(20)
    (command,) = ahead(driver)
    assert milliseconds(command) == FIRST + 20


def test_without_blocks_and_while_the_server_shuts_down_nothing_is_computed() -> None:
    for offer in (OFFER, STREAMING):
        driver = Driver(offer=offer)
        driver.take(driver.session.drain())
        driver.append(3 * FIRST)
        driver.send("input_audio_buffer.commit")
        assert ahead(driver) == []
    assert driver.session.conversation.find("item_1").sound_bytes() > PCM_MS * FIRST
