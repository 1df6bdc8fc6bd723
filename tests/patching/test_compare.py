"""A definition in another vLLM fits, has additions only, has changed or is gone."""

from __future__ import annotations

import shutil
import textwrap
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_omni_ext.errors import IncompatibleVllm
from vllm_omni_ext.patching.compare import differences, other_vllm, state_of
from vllm_omni_ext.patching.source import VllmSource

OLD = '''\
@wraps
def send(self, request, /, count, retry=False, *, wait: float = 1.0):
    """Docstring."""
    if request.last:
        self.close(request)
    try:
        sent = self.socket.send(request)
    except OSError:
        raise
    return sent
'''
FIELDS = """\
class Output(Struct, array_like=True):
    name: str
    size: int = 0

    def done(self) -> bool:
        return self.size > 0
"""


def edited(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1
    return text.replace(old, new)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""Docstring."""', '"""Another one."""'),
        ("def send(self, request, /, count,", "def send(\n    self,\n    request,\n    /,\n    count,"),
        ("    return sent", "    # a comment\n    return sent"),
        ("        raise", "        pass\n        raise"),
    ],
)
def test_layout_comments_and_docstrings_are_no_changes(old: str, new: str) -> None:
    assert state_of(OLD, edited(OLD, old, new)) == "fits"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    if request.last:", "    self.count += 1\n    if request.last:"),
        ("        self.close(request)", "        self.close(request)\n        self.log(request)"),
        ("        self.close(request)", "        self.close(request)\n    else:\n        self.log(request)"),
        ("        sent = self", "        if self.slow:\n            return None\n        sent = self"),
        ("    return sent", "    finally:\n        self.log(request)\n    return sent"),
        ("    return sent", "    return sent\n    raise Unreachable"),
        ("retry=False", "retry=False, level=0"),
        ("*, wait", "*, first=None, wait"),
        ("= 1.0", "= 1.0, last=None"),
    ],
)
def test_added_statements_and_parameters_with_defaults_are_additions_only(old: str, new: str) -> None:
    assert state_of(OLD, edited(OLD, old, new)) == "additions only"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    return sent", ""),
        ("    return sent", "    return sent, 1"),
        ("    if request.last:", "    return None\n    if request.last:"),
        ("    if request.last:", "    if request.last and self.open:"),
        ("        self.close(request)", "        self.log(request)"),
        ("        sent = self", "        if self.fast:\n            sent = self"),
        ("    if request.last:\n        self.close(request)\n", ""),
        ("    except OSError:", "    except ValueError:\n        sent = 0\n    except OSError:"),
        ("retry=False", "retry=True"),
        ("retry=False", "level=0, retry=False"),
        ("count, retry=False", "count, level, retry=False"),
        ("count, retry=False", "retry=False"),
        ("request, /, count", "request, count"),
        ("*, wait", "*, first, wait"),
        ("*, wait", "*rest, wait"),
        ("wait: float", "wait: int"),
        (", *, wait: float = 1.0", ""),
        ("@wraps\n", ""),
        ("def send", "async def send"),
    ],
)
def test_all_other_differences_are_changes(old: str, new: str) -> None:
    assert state_of(OLD, edited(OLD, old, new)) == "changed"


def test_statements_in_another_order_are_a_change() -> None:
    assert state_of("def f():\n    a()\n    b()\n", "def f():\n    b()\n    a()\n") == "changed"
    assert state_of("def f():\n    a()\n    b()\n", "def f():\n    b()\n    a()\n    b()\n") == "additions only"


@pytest.mark.parametrize("parameters", ["*args", "**options"])
def test_collected_parameters_stay(parameters: str) -> None:
    old = f"def f(a, {parameters}): ...\n"
    assert state_of(old, old.replace("(a, ", "(a, b=1, ")) == ("changed" if parameters == "*args" else "additions only")
    assert state_of(old, "def f(a): ...\n") == "changed"


@pytest.mark.parametrize(
    ("old", "new", "state"),
    [
        ("    size: int = 0", "    size: int = 0\n    error: str = ''", "additions only"),
        ("    size: int = 0", "    size: int = 0\n    error: str", "changed"),
        ("    name: str", "    error: str = ''\n    name: str", "changed"),
        ("    size: int = 0", "    size: int = 1", "changed"),
        ("    def done", "    def open(self): ...\n\n    def done", "additions only"),
        ("    def done", "    @abstractmethod\n    def open(self): ...\n\n    def done", "changed"),
        ("done(self)", "done(self, now=False)", "additions only"),
        ("done(self)", "done(self, now)", "changed"),
        ("(Struct,", "(Base,", "changed"),
    ],
)
def test_fields_and_methods_of_a_class(old: str, new: str, state: str) -> None:
    assert state_of(FIELDS, edited(FIELDS, old, new)) == state


def test_a_method_whose_string_keeps_it_indented_is_compared() -> None:
    method = textwrap.indent(OLD, "    ") + "    x = '''\ntext\n'''\n"
    assert state_of(method, method.replace("retry=False", "retry=True")) == "changed"


def test_each_symbol_is_compared_and_shown_as_a_difference(fake, tmp_path) -> None:
    targets = [fake.target(name) for name in ("start", "stop", "Engine.step", "Engine.kind", "Engine.fly")]
    assert [each.state for each in differences(targets, fake.source, fake.source)] == ["fits"] * 4
    new = shutil.copytree(fake.folder, tmp_path / "new")
    (new / "_version.py").write_text("__version__ = version = '0.33.0'\n")
    text = fake.text.replace("return 1", "x = 2\n        return 1").replace('"stop"', '"end"').replace("kind", "name")
    (new / "engine.py").write_text(text)
    found = differences(targets, fake.source, VllmSource(new))
    assert [each.state for each in found] == ["fits", "changed", "additions only", "gone"]
    assert found[0].diff == ""
    assert found[1].diff.splitlines()[:2] == ["--- vLLM 0.32.0", "+++ vLLM 0.33.0"]
    assert '-    return "stop"\n+    return "end"' in found[1].diff
    assert "-def kind(cls):" in found[3].diff


def test_another_vllm_is_a_folder_a_wheel_or_a_version(fake, tmp_path, monkeypatch) -> None:
    assert other_vllm(str(fake.folder), tmp_path).version == "0.32.0"

    def download(words: list[str]) -> SimpleNamespace:
        assert words[1:4] == ["-m", "pip", "download"] and words[-1] == "vllm==0.33.0"
        folder = Path(next(word for word in words if word.startswith("--dest=")).removeprefix("--dest="))
        with zipfile.ZipFile(folder / "vllm-0.33.0-cp38-abi3-manylinux_2_35_x86_64.whl", "w") as archive:
            archive.writestr("vllm/_version.py", "__version__ = version = '0.33.0'\n")
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr("subprocess.run", download)
    assert other_vllm("0.33.0", tmp_path).version == "0.33.0"
    wheel = next(tmp_path.glob("*.whl"))
    assert other_vllm(str(wheel), tmp_path).version == "0.33.0"


def test_another_vllm_that_cannot_be_read_is_refused(tmp_path, monkeypatch) -> None:
    with pytest.raises(IncompatibleVllm, match=r"--against nowhere.whl: no such file or folder, and not a version"):
        other_vllm("nowhere.whl", tmp_path)
    monkeypatch.setattr("subprocess.run", lambda words: SimpleNamespace(returncode=1))
    with pytest.raises(IncompatibleVllm, match=r"--against 0.99.0: pip cannot download"):
        other_vllm("0.99.0", tmp_path)
