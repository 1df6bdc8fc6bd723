"""`input_audio` of any format that `/v1/audio/transcriptions` takes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.serving.chat import SOUND_FORMATS, sound_of_any_format

TEXT = {"type": "text", "text": "what is it"}


def sound(name: Any, **others: Any) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": name}, **others}


def read(*messages: dict[str, Any]) -> list[Any]:
    """Return the content of each message as vLLM reads it."""
    sent = list(messages)
    request = ChatCompletionRequest.model_validate({"messages": copy.deepcopy(sent)})
    sound_of_any_format(request.messages, sent)
    return [m["content"] if isinstance(m["content"], str) else list(m["content"]) for m in request.messages]


@pytest.mark.parametrize("name", SOUND_FORMATS)
def test_each_format_is_read(name: str) -> None:
    user = {"role": "user", "content": [TEXT, sound(name, uuid="a")]}
    (content, answer) = read(user, {"role": "assistant", "content": "a dog"})
    assert (content[0], answer) == (TEXT, "a dog")
    if name in ("wav", "mp3"):
        assert content[1]["input_audio"] == {"data": "UklGRg==", "format": name}
    else:
        assert content[1] == {
            "type": "audio_url",
            "audio_url": {"url": f"data:audio/{name};base64,UklGRg=="},
            "uuid": "a",
        }


@pytest.mark.parametrize("name", ["midi", None, 3])
def test_an_unknown_format_is_refused_and_named(name: Any) -> None:
    with pytest.raises(RequestError, match="use wav, mp3") as caught:
        read({"role": "user", "content": "hello"}, {"role": "user", "content": [TEXT, sound(name)]})
    assert caught.value.parameter == "messages[1].content[1].input_audio.format"


@pytest.mark.parametrize("sent", [None, "hello", [], [3], [{"content": 3}], [{"content": [3, {"input_audio": 3}]}]])
def test_other_bodies_stay_as_they_are(sent: Any) -> None:
    messages = [{"role": "user", "content": "hello"}]
    sound_of_any_format(messages, sent)
    assert messages == [{"role": "user", "content": "hello"}]
