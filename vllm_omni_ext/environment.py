"""Checks the Python environment for `doctor`, and formats the findings. Imports neither vLLM nor torch."""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from vllm_omni_ext import __version__, resampling
from vllm_omni_ext.lifeline import SHARED

ENTRY_POINTS = (
    ("torch.backends", "vllm_omni_ext", "`vllm serve --omni` and LLM(omni=True)"),
    ("vllm.general_plugins", "omni_ext", "model classes in every vLLM process"),
    ("console_scripts", "vllm-omni-ext", "the command line"),
)
CUDA_ONLY = ("torchaudio", "torchcodec")
"""Packages whose usual wheels are CUDA builds and break `import transformers` with a CPU torch."""
SMALL_SHM_BYTES = 1 << 30
"""Free bytes of /dev/shm below which `doctor` reports an error.

Each engine process reserves about 400 MB there, and containers have less by default.
"""
SAMPLER = "VLLM_USE_FLASHINFER_SAMPLER"
"""vLLM's environment variable: 1 = the sampler uses FlashInfer's kernels, which are compiled at the first use."""
CUDA_HOMES = ("CUDA_HOME", "CUDA_PATH")
DEFAULT_CUDA_HOME = "/usr/local/cuda"
_VERSION = re.compile(r"^__version__\b.*?=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)
_ACCELERATOR = re.compile(r"^(cuda|hip|xpu)\b[^=]*=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)

_INDENT = 2


@dataclass(frozen=True)
class Line:
    """One finding of `doctor`.

    Attributes:
        name: the checked package, setting or symbol.
        ok: False makes `doctor` fail.
        state: the result in a few words, with the remedy if `ok` is False.
        details: further texts, by heading.
    """

    name: str
    ok: bool
    state: str
    details: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Section:
    """A group of findings with a title."""

    title: str
    lines: tuple[Line, ...]

    @property
    def ok(self) -> bool:
        """Whether all findings are ok."""
        return all(line.ok for line in self.lines)


def as_text(sections: Sequence[Section]) -> str:
    """Return the findings as text: a line for each finding, and indented lines for its details.

    A detail of one line is written after its heading, a longer one without heading.
    """
    return "\n".join(row for section in sections for row in _rows(section))


def as_data(sections: Sequence[Section]) -> dict[str, object]:
    """Return the findings for `--json`: `ok`, and `sections`, by title a list of findings.

    A finding has the keys `name`, `ok` and `state`, and a key for each detail.
    """
    return {
        "ok": all(section.ok for section in sections),
        "sections": {
            section.title: [
                {"name": line.name, "ok": line.ok, "state": line.state, **line.details} for line in section.lines
            ]
            for section in sections
        },
    }


def _rows(section: Section) -> Iterator[str]:
    yield section.title
    width = max((len(line.name) for line in section.lines), default=0)
    for line in section.lines:
        yield f"{'':{_INDENT}}{'ok ' if line.ok else 'BAD'} {line.name:{width}}  {line.state}"
        for heading, text in line.details.items():
            if "\n" in text:
                yield textwrap.indent(text, " " * (_INDENT + 4))
            else:
                yield f"{'':{_INDENT + 4}}{heading}: {text}"
    yield ""


def versions() -> Section:
    """Return the versions of this package, Python and torch; vLLM has its own section."""
    torch = _version_file("torch")
    lines = [
        Line("vllm-omni-ext", True, __version__),
        Line("python", True, f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        Line("torch", torch is not None, f"{_version('torch')} ({accelerator()})" if torch else "not installed"),
    ]
    return Section("versions", tuple(lines))


def accelerator() -> str:
    """Return the accelerator that torch was built for: "cpu", "cuda 13.0", ..."""
    found = _ACCELERATOR.search(_version_file("torch") or "")
    return f"{found.group(1)} {found.group(2)}" if found else "cpu"


def hooks(environ: Mapping[str, str] = os.environ) -> Section:
    """Check the entry points, the settings that disable them, and whether another package provides `vllm_omni`."""
    lines = [_entry_point(group, name, purpose) for group, name, purpose in ENTRY_POINTS]
    if environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        state = "set, so the torch.backends entry point does not run; unset it, or use `vllm-omni-ext serve`"
        lines.append(Line("TORCH_DEVICE_BACKEND_AUTOLOAD", False, state))
    plugins = environ.get("VLLM_PLUGINS")
    if plugins is not None and "omni_ext" not in plugins.split(","):
        lines.append(Line("VLLM_PLUGINS", False, "set without omni_ext, so our models are unknown; add omni_ext to it"))
    lines.append(Line("vllm-omni", True, _real_vllm_omni()))
    return Section("entry points", tuple(lines))


def traps() -> Section:
    """Check for packages that break other packages here, and for missing optional packages with their features."""
    return Section("known traps", tuple(_traps()))


def connectors() -> Section:
    """Check which connectors, i.e. transports of tensors between stages, can be used on this machine."""
    return Section("connectors", (_shared_memory(), _tcp(), _mooncake()))


def _entry_point(group: str, name: str, purpose: str) -> Line:
    found = metadata.entry_points(group=group, name=name)
    state = next(iter(found)).value if found else "missing; install the package (pip install vllm-omni-ext)"
    return Line(f"{group}: {name}", bool(found), state, {"for": purpose})


def _real_vllm_omni() -> str:
    spec = find_spec("vllm_omni")
    if spec is None or spec.origin is None:
        return "not installed; `vllm serve --omni` is ours"
    return "installed, and it wins: `vllm serve --omni` starts vllm-omni; write `vllm-omni-ext serve` for ours"


def _traps() -> Iterator[Line]:
    on_cpu = accelerator() == "cpu"
    for package in CUDA_ONLY:
        bad = on_cpu and find_spec(package) is not None and "+cpu" not in _version(package)
        state = f"{_version(package)} is a CUDA build, torch is a CPU build; pip uninstall {package}"
        yield Line(package, not bad, state if bad else "no conflict")
    method = resampling.available()
    missing = "no package converts sound to the model's sample rate; pip install soxr"
    yield Line("sample rates of sound", method is not None, f"converted by {method}" if method else missing)
    yield _flashinfer()
    vision = _version("torchvision")
    if find_spec("torchvision") is None:
        yield Line("torchvision", False, "not installed; images and video cannot be read; pip install torchvision")
    elif on_cpu and "+cu" in vision:
        yield Line("torchvision", True, f"{vision} with a CPU torch: made importable by our torch.backends hook")
    else:
        yield Line("torchvision", True, vision)


def missing_for_flashinfer(environ: Mapping[str, str] = os.environ) -> str:
    """Return the missing part of the CUDA toolkit that FlashInfer needs to compile its sampler; "" if none is missing.

    vLLM 0.32 does not check this: a stage that samples would end in its warm-up.
    """
    if not accelerator().startswith("cuda") or find_spec("flashinfer") is None or find_spec("flashinfer_jit_cache"):
        return ""
    path = environ.get("PATH")
    home = next(filter(None, map(environ.get, CUDA_HOMES)), None)
    if home is None:
        found = shutil.which("nvcc", path=path)
        home = str(Path(found).parents[1]) if found else DEFAULT_CUDA_HOME
    if shutil.which("nvcc", path=str(Path(home, "bin"))) is None:
        return "nvcc"
    headers = (Path(home, "include"), *Path(home).glob("targets/*/include"))
    if not any((folder / "curand.h").exists() for folder in headers):
        return "curand.h"
    return "" if shutil.which("ninja", path=path) else "ninja"


def _flashinfer() -> Line:
    missing = missing_for_flashinfer()
    if not missing:
        return Line("FlashInfer's sampler", True, "no conflict")
    state = f"{missing} is missing, so stages run with {SAMPLER}=0; install a CUDA toolkit, or `vllm download-kernels`"
    return Line("FlashInfer's sampler", True, state)


def _shared_memory() -> Line:
    place = Path(SHARED)
    if not os.access(place, os.W_OK):
        return Line("shared_memory", False, f"{place} cannot be written; mount it, vLLM needs it too")
    free = shutil.disk_usage(place).free
    if free < SMALL_SHM_BYTES:
        return Line("shared_memory", False, f"{free >> 20} MiB free in {place}; give it more (docker: --shm-size=8g)")
    return Line("shared_memory", True, "ready")


def _tcp() -> Line:
    ready = find_spec("zmq") is not None
    return Line("tcp", ready, "ready" if ready else "pyzmq is not installed; pip install pyzmq")


def _mooncake() -> Line:
    if find_spec("mooncake") is None:
        return Line("mooncake", True, "not installed (optional); pip install 'vllm-omni-ext[mooncake]'")
    try:
        importlib.import_module("mooncake.engine")
    except (ImportError, OSError) as err:  # a shared library that it needs is missing
        return Line("mooncake", False, f"installed but cannot be imported: {err}{_other_cuda(str(err))}")
    return Line("mooncake", True, "ready")


def _other_cuda(error: str) -> str:
    """Return advice if Mooncake's package needs another CUDA version than this machine has; "" otherwise."""
    missing = re.search(r"libcudart\.so\.(\d+)", error)
    if missing is None:
        return ""
    fitting = {"12": "mooncake", "13": "mooncake-cuda12"}.get(missing[1], "mooncake")
    return (
        f"; that package is for CUDA {missing[1]}: pip uninstall it and pip install 'vllm-omni-ext[{fitting}]' "
        "(docs/gpu.md, Which Mooncake fits which CUDA)"
    )


def _version_file(package: str) -> str | None:
    spec = find_spec(package)
    folders = spec.submodule_search_locations if spec is not None else None
    file = Path(next(iter(folders))) / "version.py" if folders else None
    return file.read_text() if file is not None and file.is_file() else None


def _version(package: str) -> str:
    found = _VERSION.search(_version_file(package) or "")
    if found is not None:
        return found.group(1)
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown version"
