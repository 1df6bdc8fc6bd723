"""The commands and their imports."""

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
def test_a_command_gets_the_rest_of_the_line(name, commands):
    assert cli.main([name, "--help", "x", "--y=1"]) == 0
    assert commands[-1] == (name, ["--help", "x", "--y=1"])


def test_commands_that_use_internals_of_vllm_check_its_version(commands, monkeypatch, capsys):
    for name in cli.COMMANDS:
        cli.main([name])
    unchecked = [(name, []) for name in ("doctor", "tiny", "bench", "eval", "run-batch", "top")]
    assert commands == ["checked", ("serve", []), "checked", ("plan", []), *unchecked]

    def wrong():
        raise IncompatibleVllm("vLLM 0.99 is installed")

    monkeypatch.setattr("vllm_omni_ext.compat.activate", wrong)
    assert cli.main(["serve", "m"]) == 1
    assert capsys.readouterr().err == "vllm-omni-ext serve: vLLM 0.99 is installed\n"


def test_an_error_of_the_package_is_one_line_and_a_bug_is_raised(commands, monkeypatch, capsys):
    serve = sys.modules[cli.COMMANDS["serve"].module]

    def fail(error):
        raise error

    monkeypatch.setattr(serve, "main", lambda argv: fail(StageUnavailable("no talker")))
    assert cli.main(["serve", "m"]) == 1
    assert capsys.readouterr().err == "vllm-omni-ext serve: no talker\n"
    monkeypatch.setattr(serve, "main", lambda argv: fail(KeyError("x")))
    with pytest.raises(KeyError):
        cli.main(["serve", "m"])
    monkeypatch.setattr(serve, "main", lambda argv: 7)
    assert vllm(monkeypatch, "serve", "m", "--omni") == 7


def test_ctrl_c_is_one_line(commands, monkeypatch, capsys):
    def interrupted(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules[cli.COMMANDS["bench"].module], "main", interrupted)
    assert cli.main(["bench", "speech"]) == 130
    assert capsys.readouterr().err == "vllm-omni-ext bench: interrupted\n"


def test_without_a_known_command_the_known_ones_are_printed(capsys):
    assert cli.main([]) == 2
    text = capsys.readouterr().err
    assert all(name in text for name in cli.COMMANDS)
    with pytest.raises(SystemExit) as stop:
        cli.main(["serv"])
    assert stop.value.code == 2
    assert "'serve', 'plan', 'doctor', 'tiny', 'bench', 'eval', 'run-batch', 'top'" in capsys.readouterr().err


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
        ["serve", "m", "--omni", "--port", "1"],
        ["--omni", "serve", "m", "--port", "1"],
        ["serve", "--omni", "m", "--port", "1"],
    ],
)
def test_vllm_serve_runs_serve_with_the_flag_at_any_place(words, commands, monkeypatch):
    assert vllm(monkeypatch, *words) == 0
    assert commands == ["checked", ("serve", ["m", "--port", "1"])]


@pytest.mark.parametrize("words", [("chat", "--omni"), ("--omni",), ("run-batch", "--omni", "-i", "x")])
def test_other_vllm_commands_are_refused(words, commands, monkeypatch, capsys):
    assert vllm(monkeypatch, *words) == 2
    assert commands == []
    err = capsys.readouterr().err
    assert "only 'vllm serve MODEL --omni' exists" in err
    assert "leave --omni out" in err
    assert ("write 'vllm-omni-ext run-batch ...' instead" in err) == (words[0] == "run-batch")


@pytest.mark.engine
@pytest.mark.parametrize("words", [["--version"], ["doctor", "--help"]])
def test_help_imports_no_large_package(words):
    code = (
        "import sys\nfrom vllm_omni_ext.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print([m for m in ('vllm', 'torch', 'numpy', 'transformers', 'zmq') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert words != ["--version"] or done.stdout.splitlines()[0] == f"vllm-omni-ext {__version__}"


@pytest.mark.engine
@pytest.mark.extended
def test_the_package_is_a_module_with_the_benchmarks_of_vllm():
    command = [sys.executable, "-m", "vllm_omni_ext", "bench", "serve", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Benchmark the online serving throughput" in done.stdout
