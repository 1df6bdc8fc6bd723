"""Which command runs what, and what is imported for it."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

from vllm_omni_ext import __version__
from vllm_omni_ext.cli import main as cli
from vllm_omni_ext.errors import IncompatibleVllm, StageUnavailable


@pytest.fixture
def commands(monkeypatch):
    """Replaces every command; returns the list of (command, argv) that were run."""
    ran = []
    for name in cli.COMMANDS:
        module = types.SimpleNamespace(main=lambda argv, name=name: ran.append((name, argv)) or 0)
        monkeypatch.setitem(sys.modules, cli.COMMANDS[name].module, module)
        parent, _, child = cli.COMMANDS[name].module.rpartition(".")
        monkeypatch.setattr(sys.modules[parent], child, module, raising=False)
    monkeypatch.setattr("vllm_omni_ext.compat.activate", lambda: ran.append("checked"))
    return ran


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_rest_of_the_line_belongs_to_the_command(name, commands):
    assert cli.main([name, "--help", "x", "--y=1"]) == 0
    assert commands[-1] == (name, ["--help", "x", "--y=1"])


def test_what_uses_vllm_s_inside_checks_it_first(commands, monkeypatch, capsys):
    for name in cli.COMMANDS:
        cli.main([name])
    unchecked = [(name, []) for name in ("doctor", "tiny", "bench", "eval", "top")]
    assert commands == ["checked", ("serve", []), "checked", ("plan", []), *unchecked]

    def wrong():
        raise IncompatibleVllm("vLLM 0.99 is installed")

    monkeypatch.setattr("vllm_omni_ext.compat.activate", wrong)
    assert cli.main(["serve", "m"]) == 1
    assert capsys.readouterr().err == "vllm-omni-ext serve: vLLM 0.99 is installed\n"


def test_an_error_of_ours_is_one_line(commands, monkeypatch, capsys):
    def fails(argv):
        raise StageUnavailable("no talker")

    monkeypatch.setattr(sys.modules[cli.COMMANDS["serve"].module], "main", fails)
    assert cli.main(["serve", "m"]) == 1
    assert capsys.readouterr().err == "vllm-omni-ext serve: no talker\n"


def test_a_bug_is_not_hidden(commands, monkeypatch):
    def fails(argv):
        raise KeyError("x")

    monkeypatch.setattr(sys.modules[cli.COMMANDS["serve"].module], "main", fails)
    with pytest.raises(KeyError):
        cli.main(["serve", "m"])


def test_nothing_at_all_prints_the_help(capsys):
    assert cli.main([]) == 2
    text = capsys.readouterr().err
    assert all(name in text for name in cli.COMMANDS)


def test_an_unknown_command_names_the_known_ones(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["serv"])
    assert stop.value.code == 2
    assert "'serve', 'plan', 'doctor', 'tiny', 'bench', 'eval', 'top'" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"vllm-omni-ext {__version__}\n"


def vllm(monkeypatch, *words: str) -> int:
    """`vllm words...`; returns the exit status."""
    monkeypatch.setattr(sys, "argv", ["/usr/bin/vllm", *words])
    try:
        cli.vllm_main()
    except SystemExit as stop:
        return stop.code
    return 0


@pytest.mark.parametrize(
    "words",
    [
        ("serve", "m", "--omni", "--port", "1"),
        ("--omni", "serve", "m", "--port", "1"),
        ("serve", "--omni", "m", "--port", "1"),
    ],
)
def test_vllm_serve_is_our_serve_wherever_the_flag_is(words, commands, monkeypatch):
    assert vllm(monkeypatch, *words) == 0
    assert commands == ["checked", ("serve", ["m", "--port", "1"])]


@pytest.mark.parametrize("words", [("chat", "--omni"), ("--omni",), ("run-batch", "--omni", "-i", "x")])
def test_other_vllm_commands_are_refused(words, commands, monkeypatch, capsys):
    assert vllm(monkeypatch, *words) == 2
    assert commands == []
    err = capsys.readouterr().err
    assert "only 'vllm serve MODEL --omni' exists" in err
    assert "leave --omni out" in err


def test_a_failed_serve_ends_the_process_with_its_status(commands, monkeypatch):
    monkeypatch.setattr(sys.modules[cli.COMMANDS["serve"].module], "main", lambda argv: 7)
    assert vllm(monkeypatch, "serve", "m", "--omni") == 7


@pytest.mark.engine
@pytest.mark.parametrize("words", [["--help"], ["--version"], ["doctor", "--help"]])
def test_help_loads_nothing_heavy(words):
    code = (
        "import sys\nfrom vllm_omni_ext.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print([m for m in ('vllm', 'torch', 'numpy', 'transformers', 'zmq') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.engine
def test_the_package_can_be_run_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "vllm_omni_ext", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"vllm-omni-ext {__version__}\n"


@pytest.mark.engine
def test_vllm_s_benchmarks_are_reachable():
    command = [sys.executable, "-m", "vllm_omni_ext", "bench", "serve", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Benchmark the online serving throughput" in done.stdout
