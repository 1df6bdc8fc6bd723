"""The example of docs/writing-a-speech-plugin.md: its page, its own tests, and its answers against Transformers."""

from __future__ import annotations

import base64
import importlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile
import torch
from transformers import AutoTokenizer, CsmForConditionalGeneration, DynamicCache

from examples.server import Server
from tests.families.conftest import install
from tests.families.serving import chat, chat_body, during, served, settled
from tests.support.cluster import ANSWER_S, MODEL, all_up, kill, overrides, until
from vllm_omni_ext.engine.input_provider import Span
from vllm_omni_ext.engine.plain_stage import PlainRequest, StreamLost
from vllm_omni_ext.wire.stage_input import PartHeader

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "examples" / "plugins" / "csm"
PAGE = ROOT / "docs" / "writing-a-speech-plugin.md"
EXCERPT = re.compile(r"^```\w+ (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TEXTS = ("hello", "good bye", "a", "x y")
"""The first two and the last two end by themselves."""

LONG, FRAMES, RATE = "speech is silver", 150, 24_000
REFERENCE = (0.3 * np.sin(np.arange(9000) / 15)).astype(np.float32)


def test_the_page_shows_the_files_of_the_example() -> None:
    excerpts = EXCERPT.findall(PAGE.read_text(encoding="utf-8"))
    assert len(excerpts) >= 8
    for name, text in excerpts:
        source = (SOURCE / name).read_text(encoding="utf-8")
        assert "".join(text.split()) in "".join(source.split()), f"{name} has not: {text[:80]}"


def test_the_names_of_the_page_are_in_their_modules() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| ((?:`\w+`(?:, )?)+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) >= 15
    for module, names in rows:
        there = vars(importlib.import_module(f"vllm_omni_ext.{module}"))
        assert [name for name in re.findall(r"\w+", names) if name not in there] == [], module


def test_the_example_is_short() -> None:
    files = [
        each for each in SOURCE.rglob("*") if each.suffix in (".py", ".toml", ".jinja") and "build" not in each.parts
    ]
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    assert len(lines) < 600, "without blank lines"


class Oracle:
    """Transformers' model alone, greedy."""

    def __init__(self, folder: Path) -> None:
        self.model = CsmForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(folder)

    def ids(self, text: str, speaker: int = 0) -> list[int]:
        words = self._tokenizer(f"[{speaker}]{text}", add_special_tokens=False)["input_ids"]
        return [self._tokenizer.bos_token_id, *words, self._tokenizer.eos_token_id]

    def frames(self, ids: list[int], most: int, sound: np.ndarray | None = None, before: Any = ()) -> np.ndarray:
        """Frames int64 [n, codebooks], after a reference sound with the ids of its text."""
        more: dict[str, Any] = {}
        if sound is not None:
            config, values = self.model.config, torch.from_numpy(sound)[None, None]
            with torch.no_grad():
                count = self.model.codec_model.encode(values).audio_codes.shape[-1]
            ids = [*before, *[config.audio_token_id] * count, config.audio_eos_token_id, *ids]
            more = {"input_values": values, "input_values_cutoffs": torch.tensor([[len(sound)]])}
        greedy = {"do_sample": False, "depth_decoder_do_sample": False, "max_new_tokens": most}
        given = torch.tensor([ids])  # without a mask, `generate` leaves out the sound: its id is that of the padding
        made = self.model.generate(input_ids=given, attention_mask=torch.ones_like(given), **greedy, **more)[0]
        ends = (made == 0).all(-1).nonzero()
        return np.asarray(made[: int(ends[0])] if len(ends) else made)

    def sound(self, frames: np.ndarray) -> np.ndarray:
        """The sound of frames, float32 [samples]."""
        with torch.no_grad():
            codes = torch.from_numpy(frames).T[None]
            return np.asarray(self.model.codec_model.decode(codes).audio_values[0, 0])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Oracle]]:
    """The example's modules, and Transformers' model of a tiny checkpoint, in this process."""
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(SOURCE / "src"))
        modules = {name: importlib.import_module(f"csm.{name}") for name in ("tiny", "backbone", "codec", "payloads")}
        folder = modules["tiny"].write(tmp_path_factory.mktemp("csm"))
        yield SimpleNamespace(**modules), Oracle(folder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "csm"]:
            del sys.modules[name]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(90,), (1, 2, 4, 8, 16, 25, 34), (1,) * 90, (60, 1, 29)], ids=str)
def test_parts_of_frames_decode_to_the_sound_of_the_whole(alone: tuple[Any, Oracle], sizes: tuple[int, ...]) -> None:
    """90 frames are 180 positions of the codec's transformer, whose window has 24."""
    csm, oracle = alone
    codec = csm.codec.CsmCodec.__new__(csm.codec.CsmCodec)
    torch.nn.Module.__init__(codec)
    codec.codec_model, codec.config = oracle.model.codec_model, oracle.model.config.codec_config
    frames = torch.randint(32, (90, 4), generator=torch.Generator().manual_seed(1))
    empty = torch.zeros(1, codec.config.hidden_size, 0)
    stream = csm.codec.Stream(DynamicCache(config=codec.config), empty, empty)
    with torch.no_grad():
        wave = torch.cat([codec.decode(part, stream) for part in frames.split(list(sizes))])
    np.testing.assert_allclose(wave, oracle.sound(frames.numpy()), atol=1e-5)


def test_streams_without_an_end_are_dropped(alone: tuple[Any, Oracle], monkeypatch: pytest.MonkeyPatch) -> None:
    """An API server that is killed sends no end of its streams."""
    csm, oracle = alone
    codec, clock = csm.codec.CsmCodec.__new__(csm.codec.CsmCodec), [0.0]
    torch.nn.Module.__init__(codec)
    codec.codec_model, codec.config = oracle.model.codec_model, oracle.model.config.codec_config
    codec.config.codebooks, codec.streams, codec.jobs, codec.idle_s = 4, {}, {}, 60.0
    monkeypatch.setattr(csm.codec.time, "monotonic", lambda: clock[0])
    for clock[0], stream, part in ((0.0, "lost", 0), (1.0, "kept", 0), (61.0, "kept", 1)):
        header = PartHeader(stream=stream, part=part, last=False)
        codec.open(PlainRequest(req_id=stream, prompt=[1, 2, 3, 4], payload=None, params=None, part=header))
        codec.close(stream)
    assert list(codec.streams) == ["kept"]
    late = PartHeader(stream="lost", part=1, last=True)
    with pytest.raises(StreamLost):  # so that it is sent again
        codec.open(PlainRequest(req_id="lost", prompt=[1, 2, 3, 4], payload=None, params=None, part=late))


@pytest.mark.slow
@pytest.mark.parametrize("done", [0, 1, 5])
@pytest.mark.parametrize("reference", [False, True])
def test_the_input_provider_makes_the_frames_of_transformers(
    alone: tuple[Any, Oracle], reference: bool, done: int
) -> None:
    """Two utterances in one batch; the first `done` frames came from a replica that was lost."""
    csm, oracle = alone
    model = oracle.model
    base = SimpleNamespace(
        config=model.config,
        depth_decoder=model.depth_decoder,
        embed_text_tokens=model.embed_text_tokens,
        embed_audio_tokens=model.backbone_model.embed_tokens.embed_audio_tokens,
    )
    base.audio_rows = lambda frames: csm.backbone.CsmBackbone.audio_rows(base, frames)
    provider, params = csm.backbone.Frames(base), SimpleNamespace(seed=None, temperature=0.0, top_k=0)
    audio: list[list[int]] = []
    sound, before = (REFERENCE, oracle.ids("before")) if reference else (None, [])
    if reference:
        with torch.no_grad():
            codes = model.codec_model.encode(torch.from_numpy(REFERENCE)[None, None]).audio_codes[0].T
        audio = [*codes.tolist(), [0] * 4]
    expected, lengths = {}, {}
    for text in ("hello", "a"):
        ids = [*before, *[csm.payloads.FRAME] * len(audio), *oracle.ids(text)]
        expected[text], lengths[text] = oracle.frames(oracle.ids(text), 8, sound, before).tolist(), len(ids)
        prompt = csm.payloads.Prompt(text=ids, audio=audio, frames=expected[text][:done])
        provider.open(text, prompt, (), params)
    with torch.no_grad():
        for made in range(done, 8):
            hidden = [
                model.backbone_model(inputs_embeds=provider.rows([Span(text, 0, lengths[text] + made)])[None])[0][0, -1]
                for text in expected
            ]
            first = [model.lm_head(each).argmax(-1, keepdim=True).tolist() for each in hidden]
            outputs = provider.sampled(list(expected), first, torch.stack(hidden))
            assert [each.tolist()[0] for each in outputs] == [frames[made] for frames in expected.values()]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """In which the example is installed."""
    target = install(SOURCE, tmp_path_factory.mktemp("csm") / "installed")
    before = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(target), *([before] if before else [])])}


@pytest.fixture(scope="module")
def folder(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint."""
    folder = tmp_path_factory.mktemp("csm") / "checkpoint"
    words = [sys.executable, "-m", "vllm_omni_ext", "tiny", "csm", str(folder)]
    subprocess.run(words, env=environment, check=True, timeout=300)
    return folder


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


@pytest.fixture(scope="module")
def server(environment: dict[str, str], folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two replicas of each stage."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", environment["PYTHONPATH"])
        two = overrides(backbone={"replicas": 2}, codec={"replicas": 2})
        with served(folder, tmp_path_factory.mktemp("csm") / "log", 4, *two) as server:
            yield server


def speak(server: Server, text: str, **fields: Any) -> np.ndarray:
    """The sound of a text, int16 [samples]."""
    body = {"model": MODEL, "input": text, "response_format": "pcm", "backbone": {"temperature": 0}, **fields}
    answer = httpx.post(f"{server.base_url}/audio/speech", json=body, timeout=ANSWER_S)
    assert answer.status_code == 200, answer.text
    return np.frombuffer(answer.content, np.int16)


def check(samples: np.ndarray, expected: np.ndarray) -> None:
    """Samples of 16 bits are those of the oracle, rounded."""
    assert samples.shape == expected.shape
    assert np.abs(samples.astype(np.float64) - np.clip(expected, -1, 1) * 32768).max() <= 2


def wav(sound: np.ndarray) -> str:
    buffer = io.BytesIO()
    soundfile.write(buffer, sound, RATE, format="wav", subtype="FLOAT")
    return f"data:audio/wav;base64,{base64.b64encode(buffer.getvalue()).decode()}"


@pytest.mark.engine
@pytest.mark.extended
def test_the_example_passes_its_own_test_and_all_its_names_exist(environment: dict[str, str]) -> None:
    words = [sys.executable, "-m", "vllm_omni_ext.plugins.names"]
    output = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300).stdout
    assert '"csm": []' in output, output
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(SOURCE), "tests"]
    done = subprocess.run(words, env=environment, cwd=SOURCE, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout


@pytest.mark.engine
@pytest.mark.extended
def test_texts_are_spoken_as_by_transformers(server: Server, oracle: Oracle) -> None:
    """A batch in two replicas a stage, a reference sound, a chat whose parameters reach the backbone, wrong fields."""
    with ThreadPoolExecutor() as pool:
        sounds = list(pool.map(lambda text: speak(server, text, max_new_tokens=70), TEXTS * 2))
    for text, samples in zip(TEXTS * 2, sounds, strict=True):
        check(samples, oracle.sound(oracle.frames(oracle.ids(text), 70)))
    fields = {"ref_audio": wav(REFERENCE), "ref_text": "before", "voice": "3", "max_new_tokens": 20, "stream": True}
    frames = oracle.frames(oracle.ids("after", 3), 20, REFERENCE, oracle.ids("before", 3))
    check(speak(server, "after", **fields), oracle.sound(frames))
    answer = chat(server, chat_body("hello", "audio", max_tokens=5, audio={"voice": "2", "format": "pcm16"}))
    sound = np.frombuffer(base64.b64decode(answer["choices"][0]["message"]["audio"]["data"]), np.int16)
    check(sound, oracle.sound(oracle.frames(oracle.ids("hello", 2), 5)))
    assert answer["usage"]["completion_tokens_details"]["audio_tokens"] == 5
    for wrong, name in (
        ({"speed": 2}, "speed"),
        ({"codec": {"temperature": 0}}, "codec"),
        ({"ref_audio": "data:audio/wav;base64,AAAA", "ref_text": "x"}, "ref_audio"),
    ):
        body = {"model": MODEL, "input": "hello", **wrong}
        refused = httpx.post(f"{server.base_url}/audio/speech", json=body, timeout=ANSWER_S)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name), refused.text
    assert settled(server)


@pytest.mark.engine
@pytest.mark.extended
def test_frames_and_samples_are_spoken_as_by_transformers(
    environment: dict[str, str], folder: Path, oracle: Oracle, tmp_path: Path
) -> None:
    """`LLM`, in a program of its own that finds the example."""
    code = (
        "import sys; import numpy as np; from vllm import LLM, SamplingParams\n"
        "if __name__ == '__main__':\n"
        "    with LLM(sys.argv[1], omni=True, max_model_len=1024) as llm:\n"
        f"        chats = [[{{'role': 'user', 'content': text}}] for text in {TEXTS}]\n"
        "        made = llm.chat(chats, SamplingParams(temperature=0, max_tokens=70), raise_on_error=True)\n"
        "        np.savez(sys.argv[2], **{f'frames{i}': each.frames for i, each in enumerate(made)},\n"
        "                 **{f'sound{i}': each.audio for i, each in enumerate(made)})\n"
    )
    program, result = tmp_path / "program.py", tmp_path / "result.npz"
    program.write_text(code)
    words = [sys.executable, str(program), str(folder), str(result)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = np.load(result)
    for number, text in enumerate(TEXTS):
        frames = oracle.frames(oracle.ids(text), 70)
        np.testing.assert_array_equal(found[f"frames{number}"], frames)
        np.testing.assert_allclose(found[f"sound{number}"], oracle.sound(frames), atol=1e-5)


@pytest.mark.engine
@pytest.mark.extended
@pytest.mark.parametrize("stage", ["backbone", "codec"])
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "seed": 5}], ids=["greedy", "seed"])
def test_a_text_is_spoken_as_before_when_a_replica_is_killed(
    server: Server, oracle: Oracle, stage: str, sampling: dict[str, Any]
) -> None:
    assert until(lambda: all_up(server, 4), 120)
    fields = {"backbone": {**sampling, "max_tokens": FRAMES}, "ref_audio": wav(REFERENCE), "ref_text": "before"}
    expected = speak(server, LONG, **fields)
    with ThreadPoolExecutor() as pool:
        others = [pool.submit(speak, server, LONG, **fields) for _ in range(7)]
        answer = during(server, stage, lambda: speak(server, LONG, **fields), lambda name: kill(server, name) and None)
        for samples in (answer, *(each.result() for each in others)):
            assert samples.shape == expected.shape
            assert np.abs(samples.astype(np.int32) - expected).max() <= 2
    if not sampling["temperature"]:
        frames = oracle.frames(oracle.ids(LONG), FRAMES, REFERENCE, oracle.ids("before"))
        check(expected, oracle.sound(frames))
    assert settled(server)
