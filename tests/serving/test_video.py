"""Video in processes of its own: the same frames, and nothing a file does reaches this process."""

from __future__ import annotations

import base64
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from vllm.multimodal.media import ImageMediaIO, VideoMediaIO
from vllm.multimodal.video import VIDEO_LOADER_REGISTRY

from tests.serving.scripted_video import MEMORY_BYTES, Scripted
from tests.support import media
from tests.support.descriptors import open_files
from tests.support.pace import pace
from vllm_omni_ext.serving import crash_isolation, video
from vllm_omni_ext.serving.crash_isolation import CallFailed

TIMEOUT_S = 1.0
CORPUS = 200
"""Damaged files. Of the first 40, three crash the decoder."""


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VIDEO_LOADER_REGISTRY.name2class, "scripted", Scripted)
    monkeypatch.setattr(video, "TIMEOUT_S", TIMEOUT_S)
    monkeypatch.setattr(video, "MEMORY_BYTES", MEMORY_BYTES)


@pytest.fixture
def helper(scripted: None) -> Iterator[psutil.Process]:
    """The fork server, once a video has been read."""
    with video.install():
        load(b"frames")
        yield fork_server()


def fork_server() -> psutil.Process:
    (found,) = (
        each for each in psutil.Process().children() if "multiprocessing.forkserver" in " ".join(each.cmdline())
    )
    return found


def load(data: bytes, loader: str = "scripted", **options: Any) -> Any:
    """As a request's video is loaded."""
    return VideoMediaIO(ImageMediaIO(), video_backend=loader, **options).load_bytes(data).media


@pytest.mark.engine
def test_what_a_loader_returns(helper: psutil.Process) -> None:
    data = b"frames " + bytes(3_000_000)
    frames, about = load(data, fps=2, nested={"a": [1, None, "é"]})
    expected = np.arange(72, dtype=np.uint8).reshape(2, 3, 4, 3)[::-1]
    np.testing.assert_array_equal(frames, expected)
    assert frames.dtype == np.uint8 and frames.flags.writeable
    assert about["options"] == {"num_frames": 32, "fps": 2, "nested": {"a": [1, None, "é"]}}
    assert about["bytes"] == len(data) and about["fps"] == 2.5
    assert about["pid"] not in (os.getpid(), helper.pid)


@pytest.mark.engine
def test_a_child_has_no_file_of_the_server(scripted: None) -> None:
    """Neither its listening socket, which would keep the port, nor anything else but input, output and log."""
    with socket.create_server(("127.0.0.1", 0)), tempfile.TemporaryFile(), video.install():
        ours = {name for number, name in open_files().items() if number > 2}
        theirs = {name for number, name in load(b"frames")[1]["files"].items() if number > 2}
    assert len(ours) > 3
    shared = (ours & theirs) - {os.devnull}
    assert len(shared) <= 2 and all(name.startswith("pipe:") for name in shared), "multiprocessing's own two"


@pytest.mark.engine
def test_no_frames_at_all(helper: psutil.Process) -> None:
    frames, about = load(b"nothing")
    assert frames.shape == (0, 4, 4, 3) and about == {}


@pytest.mark.engine
@pytest.mark.parametrize(
    ("script", "message"),
    [
        (b"crash", "its decoder has crashed"),
        (b"hang", "reading it took longer than 1 s"),
        (b"memory", "Unable to allocate"),
        (b"raise", "that is no video"),
        (b"silent", "AssertionError"),
    ],
)
def test_what_goes_wrong_is_an_error_of_that_call(helper: psutil.Process, script: bytes, message: str) -> None:
    before = helper.pid
    with ThreadPoolExecutor(4) as threads:
        bad = threads.submit(load, script)
        good = [threads.submit(load, b"frames") for _ in range(8)]
        with pytest.raises(CallFailed, match=message):
            bad.result(timeout=TIMEOUT_S + crash_isolation.GRACE_S)
        assert [each.result()[0].shape for each in good] == [(2, 3, 4, 3)] * 8
    assert fork_server().pid == before
    assert not psutil.wait_procs(helper.children(), timeout=0.5)[1]


@pytest.mark.engine
def test_a_helper_that_was_killed_is_replaced(helper: psutil.Process) -> None:
    before = helper.pid
    os.kill(before, signal.SIGKILL)
    os.waitid(os.P_PID, before, os.WEXITED | os.WNOWAIT)
    assert load(b"frames")[0].shape == (2, 3, 4, 3)
    assert fork_server().pid != before


@pytest.mark.engine
def test_signals_meant_for_the_server(helper: psutil.Process) -> None:
    """Ctrl-C goes to the whole group; the server ends in its own time, and the helper with it."""
    os.kill(helper.pid, signal.SIGINT)
    before = helper.pid
    assert load(b"frames")[0].shape == (2, 3, 4, 3)
    assert fork_server().pid == before


def test_only_while_installed() -> None:
    before = dict(VIDEO_LOADER_REGISTRY.name2class)
    with video.install():
        assert VIDEO_LOADER_REGISTRY.name2class.keys() == before.keys()
        assert all(issubclass(VIDEO_LOADER_REGISTRY.name2class[name], stock) for name, stock in before.items())
        assert VIDEO_LOADER_REGISTRY.get_backend_for_video_processor("Qwen3VLVideoProcessor") == "qwen3_vl"
        assert VIDEO_LOADER_REGISTRY.backend_requires_gpu("pynvvideocodec")
    assert before == VIDEO_LOADER_REGISTRY.name2class


SERVER = """
import os, sys, threading, time
from tests.serving.scripted_video import Scripted
from vllm.multimodal.video import VIDEO_LOADER_REGISTRY
from vllm_omni_ext.serving import video
VIDEO_LOADER_REGISTRY.name2class["scripted"] = Scripted
if __name__ == "__main__":
    with video.install():
        print("installed", flush=True)
        sys.stdin.readline()
        loader = VIDEO_LOADER_REGISTRY.load("scripted")
        loader.load_bytes(b"frames")
        threading.Thread(target=loader.load_bytes, args=(b"hang",)).start()
        print("reading", flush=True)
        time.sleep(60)
"""


@pytest.mark.engine
def test_processes_come_with_the_first_video_and_end_with_the_server(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    server = subprocess.Popen(
        [sys.executable, tmp_path / "server.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        text=True,
    )
    with server:
        assert server.stdout.readline() == "installed\n"
        assert psutil.Process(server.pid).children() == []
        print(file=server.stdin, flush=True)
        assert server.stdout.readline() == "reading\n"
        deadline = time.monotonic() + 10
        while len(family := psutil.Process(server.pid).children(recursive=True)) < 3:
            assert time.monotonic() < deadline, "a fork server, a resource tracker and the process of the video"
        server.kill()
        assert psutil.wait_procs(family, timeout=10)[1] == []


@pytest.mark.engine
@pytest.mark.parametrize("option", [{"device": "cuda"}, {"device": "cuda:1"}, {"backend": "deepstream"}])
def test_what_is_decoded_on_a_gpu_stays_here(helper: psutil.Process, option: dict[str, str]) -> None:
    assert load(b"frames", **option)[1]["pid"] == os.getpid()


def avi(frames: int = 6) -> bytes:
    return base64.b64decode(media.video_url(media.video(frames, 64, 48, seed=1)).partition(",")[2])


@pytest.mark.engine
@pytest.mark.parametrize("loader", ["opencv", "qwen3_vl", "opencv_dynamic", "openpangu"])
def test_the_same_frames_as_stock(loader: str) -> None:
    data, variants = avi(), ({}, {"num_frames": 3}, {"fps": 1}, {"frame_recovery": True})
    stock = [load(data, loader, **options) for options in variants]
    with video.install():
        ours = [load(data, loader, **options) for options in variants]
    assert {len(frames) for frames, _ in stock} > {6}, "otherwise the options say nothing"
    for (frames, about), (expected, about_expected) in zip(ours, stock, strict=True):
        np.testing.assert_array_equal(frames, expected)
        assert (frames.dtype, about) == (expected.dtype, about_expected)


@pytest.mark.engine
def test_a_video_is_not_slow_once_the_helper_runs(helper: psutil.Process) -> None:
    data = avi()
    since = time.monotonic()
    load(data, "opencv")
    assert time.monotonic() - since < pace()


@pytest.mark.engine
@pytest.mark.parametrize("part", [range(40), range(40, CORPUS)], ids=str)
def test_damaged_files(part: range, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of the head are changed, as OpenCV's own reader does not survive: each is frames or an error."""
    monkeypatch.setattr(video, "TIMEOUT_S", 20.0)
    file, numbers = avi(), random.Random(0)
    crashes = read = 0
    with video.install(), ThreadPoolExecutor(2) as threads:
        load(file, "opencv")
        before = fork_server().pid
        damaged = []
        for _ in range(CORPUS):
            changed = bytearray(file)
            for _ in range(numbers.choice([1, 8, 64])):
                changed[numbers.randrange(min(len(file), numbers.choice([64, 4096])))] = numbers.randrange(256)
            damaged.append(bytes(changed))
        for each in [threads.submit(load, damaged[number], "opencv") for number in part]:
            try:
                frames, _ = each.result()
            except CallFailed as error:
                crashes += "crashed" in str(error)
            else:
                read += 1
                assert frames.ndim == 4 and frames.shape[3] == 3
        assert fork_server().pid == before
    assert crashes and read, "otherwise this proves nothing"
