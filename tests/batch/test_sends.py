"""The record of the lines that were sent."""

from __future__ import annotations

from pathlib import Path

from vllm_omni_ext.batch.sends import Sends

ODD = 'é"\n+'


def test_a_line_counts_for_each_process_that_ended_while_it_was_being_answered(tmp_path: Path) -> None:
    path = tmp_path / "record"
    for process in range(3):
        sends = Sends(path, {"answered"} if process else ())
        assert [sends.ended(name) for name in (ODD, "stopped", "answered", "new")] == [process, 0, 0, 0]
        for name in (ODD, "stopped", "answered"):
            sends.begin(name)
        sends.withdraw("stopped")
        assert sends.ended(ODD) == process, "this process has not ended"


def test_an_entry_that_was_not_written_to_its_end_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "record"
    for name in ("a", "b"):
        Sends(path, ()).begin(name)
    whole = path.read_bytes()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        Sends(path, ()).begin("a")
        sends = Sends(path, ())
        assert (sends.ended("a"), sends.ended("b")) == (1 + (size >= whole.index(b"\n") + 1), int(size == len(whole)))


def test_the_file_has_only_lines_without_an_answer(tmp_path: Path) -> None:
    path = tmp_path / "record"
    for name in ("a", "b"):
        Sends(path, ()).begin(name)
    Sends(path, {"a"})
    assert path.read_bytes() == b'+"b"\n'
    Sends(path, {"a", "b"})
    assert path.read_bytes() == b""
