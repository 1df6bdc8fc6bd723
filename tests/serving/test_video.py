"""Video is read in separate processes: frames are the same, and a crash of the decoder is an error of one call."""

from __future__ import annotations

import base64
import os
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
from vllm_omni_ext.serving.limits import video
from vllm_omni_ext.serving.limits.references import OPENCV_OPTIONS
from vllm_omni_ext.serving.limits.video import ReadFailed

TIMEOUT_S = 1.0


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
    return VideoMediaIO(ImageMediaIO(), video_backend=loader, **options).load_bytes(data).media


@pytest.mark.engine
def test_frames_and_metadata_of_a_loader_are_returned(helper: psutil.Process) -> None:
    data = b"frames " + bytes(3_000_000)
    frames, about = load(data, fps=2, nested={"a": [1, None, "é"]})
    np.testing.assert_array_equal(frames, np.arange(72, dtype=np.uint8).reshape(2, 3, 4, 3)[::-1])
    assert frames.dtype == np.uint8 and frames.flags.writeable
    assert about["options"] == {"num_frames": 32, "fps": 2, "nested": {"a": [1, None, "é"]}}
    assert about["bytes"] == len(data) and about["fps"] == 2.5
    assert about["pid"] not in (os.getpid(), helper.pid)
    frames, about = load(b"nothing")
    assert frames.shape == (0, 4, 4, 3) and about == {}


@pytest.mark.engine
def test_a_process_that_reads_video_inherits_no_socket_or_file(scripted: None) -> None:
    with socket.create_server(("127.0.0.1", 0)), tempfile.TemporaryFile(), video.install():
        ours = {name for number, name in open_files().items() if number > 2}
        theirs = {name for number, name in load(b"frames")[1]["files"].items() if number > 2}
    assert len(ours) > 3
    shared = (ours & theirs) - {os.devnull}
    assert len(shared) <= 2 and all(name.startswith("pipe:") for name in shared), "multiprocessing's own two"


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
def test_a_failure_is_an_error_of_one_call(helper: psutil.Process, script: bytes, message: str) -> None:
    before = helper.pid
    with ThreadPoolExecutor(4) as threads:
        bad = threads.submit(load, script)
        good = [threads.submit(load, b"frames") for _ in range(8)]
        with pytest.raises(ReadFailed, match=message):
            bad.result(timeout=TIMEOUT_S + video.GRACE_S)
        assert [each.result()[0].shape for each in good] == [(2, 3, 4, 3)] * 8
    assert fork_server().pid == before
    assert not psutil.wait_procs(helper.children(), timeout=0.5)[1]


@pytest.mark.engine
def test_the_fork_server_ignores_ctrl_c_and_is_replaced_when_killed(helper: psutil.Process) -> None:
    os.kill(helper.pid, signal.SIGINT)
    load(b"frames")
    assert fork_server().pid == helper.pid
    os.kill(helper.pid, signal.SIGKILL)
    os.waitid(os.P_PID, helper.pid, os.WEXITED | os.WNOWAIT)
    load(b"frames")
    assert fork_server().pid != helper.pid


def test_loaders_are_replaced_only_inside_the_block() -> None:
    before = dict(VIDEO_LOADER_REGISTRY.name2class)
    with video.install():
        assert VIDEO_LOADER_REGISTRY.name2class.keys() == before.keys()
        assert all(issubclass(VIDEO_LOADER_REGISTRY.name2class[name], stock) for name, stock in before.items())
        assert VIDEO_LOADER_REGISTRY.get_backend_for_video_processor("Qwen3VLVideoProcessor") == "qwen3_vl"
        assert VIDEO_LOADER_REGISTRY.backend_requires_gpu("pynvvideocodec")
    assert before == VIDEO_LOADER_REGISTRY.name2class


SERVER = """
import sys, threading, time
from tests.serving.scripted_video import Scripted
from vllm.multimodal.video import VIDEO_LOADER_REGISTRY
from vllm_omni_ext.serving.limits import video
VIDEO_LOADER_REGISTRY.name2class["scripted"] = Scripted
if __name__ == "__main__":
    video.start_fork_server()
    with video.install():
        print("installed", flush=True)
        sys.stdin.readline()
        threading.Thread(target=VIDEO_LOADER_REGISTRY.load("scripted").load_bytes, args=(b"hang",)).start()
        time.sleep(60)
"""


@pytest.mark.engine
@pytest.mark.extended
def test_only_the_fork_server_starts_before_the_first_video_and_all_end_with_the_server(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    command, pipe = [sys.executable, tmp_path / "server.py"], subprocess.PIPE
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, text=True) as server:
        assert server.stdout.readline() == "installed\n"
        (forks,) = psutil.Process(server.pid).children()
        assert forks.exe() == psutil.Process(server.pid).exe()
        print(file=server.stdin, flush=True)
        deadline = time.monotonic() + 120
        while len(family := psutil.Process(server.pid).children(recursive=True)) < 3:
            assert time.monotonic() < deadline, "a fork server, a resource tracker and the process of the video"
            time.sleep(0.05)
        server.kill()
        left = psutil.wait_procs(family, timeout=60)[1]  # the newest may still import vLLM
        assert [each for each in left if each.status() != psutil.STATUS_ZOMBIE] == []  # init may reap them later


@pytest.mark.engine
@pytest.mark.parametrize("option", [{"device": "cuda"}, {"device": "cuda:1"}, {"backend": "deepstream"}])
def test_video_for_a_gpu_is_read_in_this_process(helper: psutil.Process, option: dict[str, str]) -> None:
    assert load(b"frames", **option)[1]["pid"] == os.getpid()


def avi(frames: int = 6) -> bytes:
    return base64.b64decode(media.video_url(media.video(frames, 64, 48, seed=1)).partition(",")[2])


SESSION = b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 21000 RTP/AVP 26\n"


@pytest.mark.parametrize(("name", "options"), [("scripted", {"backend": "torchcodec"}), ("pynvvideocodec", {})])
def test_ffmpeg_opens_no_addresses_of_a_session(name: str, options: dict[str, str]) -> None:
    since = time.monotonic()
    with pytest.raises(ValueError, match="refers to other files or to addresses"):
        video._read(name, Scripted, SESSION, options)
    assert time.monotonic() - since < 10, "FFmpeg has waited for packets of the session"


@pytest.mark.engine
@pytest.mark.parametrize("given", [None, "timeout;9000000"])
def test_opencv_opens_no_addresses_of_a_session(monkeypatch: pytest.MonkeyPatch, given: str | None) -> None:
    if given is not None:
        monkeypatch.setenv(OPENCV_OPTIONS, given)
    monkeypatch.setattr(video, "TIMEOUT_S", 30.0)
    with video.install(), pytest.raises(ReadFailed, match="Could not open video stream"):
        load(SESSION, "opencv")


@pytest.mark.engine
@pytest.mark.parametrize("loader", ["opencv", "qwen3_vl", "opencv_dynamic", "openpangu"])
def test_frames_equal_those_of_vllms_loaders(loader: str) -> None:
    data, variants = avi(), ({}, {"num_frames": 3}, {"fps": 1}, {"frame_recovery": True})
    stock = [load(data, loader, **options) for options in variants]
    with video.install():
        ours = [load(data, loader, **options) for options in variants]
    assert {len(frames) for frames, _ in stock} > {6}, "otherwise the options say nothing"
    for (frames, about), (expected, about_expected) in zip(ours, stock, strict=True):
        np.testing.assert_array_equal(frames, expected)
        assert (frames.dtype, about) == (expected.dtype, about_expected)
