"""The parts of the null device's tool that need no CUDA wheel."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.faults.table import ROOT, read_file
from tests.nullgpu import __main__ as tool
from tests.nullgpu import build, counters
from tests.nullgpu.scenarios import SCENARIOS, video

STUBS = Path(build.__file__).with_name("stubs.txt")


def test_counters_are_read_by_process(tmp_path: Path) -> None:
    file = tmp_path / "counters"
    assert counters.read(file) == []
    numbers = list(range(2 * counters.DEVICES + 6))
    file.write_bytes(counters.LAYOUT.pack(7, *numbers) + counters.LAYOUT.pack(0, *numbers) + b"part")
    (process,) = counters.read(file)
    assert (process.pid, process.bytes[1], process.peak[0], process.graphs, process.largest) == (7, 1, 8, 16, 20)


def test_each_stub_is_defined_once() -> None:
    names = build.names_in(STUBS)
    assert names == sorted(set(names))
    source = build.stubs(names)
    assert source.count("EXPORT int ") == len(names)
    assert "int cublasLtMatmul() {\n    return nullgpu_matmul();" in source


def test_a_scenario_that_does_not_exist_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["null-gpu", "h100"])
    with pytest.raises(SystemExit):
        tool.main()
    assert f"no scenario h100; use {', '.join(each.name for each in SCENARIOS)}" in capsys.readouterr().err


def test_a_video_of_a_request_is_small() -> None:
    url = tool.made(video(8))["video_url"]["url"]
    assert url.startswith("data:video/mp4;base64,") and len(url) < 4 << 20


def test_refusals_of_the_device_are_defects(tmp_path: Path) -> None:
    assert list(tool.refused(tmp_path)) == []
    lines = ["1 context on device 0", "1 REFUSED in a capture: launch", "2 out of memory: 9 MiB wanted, 1 used of 2"]
    (tmp_path / "refused").write_text("\n".join(lines))
    assert list(tool.refused(tmp_path)) == lines[1:]


def test_each_fault_changes_a_file_and_names_scenarios() -> None:
    faults = read_file(tool.FAULTS)
    assert len({fault.name for fault in faults}) == len(faults)
    for fault in faults:
        fault.changed((ROOT / fault.file).read_text())
        assert set(fault.tests) <= {each.name for each in SCENARIOS}
