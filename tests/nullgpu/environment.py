"""The environment of the null device: the CUDA wheel of vLLM, the library, this package, and models without weights."""

from __future__ import annotations

import ctypes.util
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass, replace
from pathlib import Path

from tests.faults.table import Fault
from tests.nullgpu.scenarios import Gpu

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
VLLM = "0.32.0"
MOONCAKE = "mooncake-transfer-engine-cuda13==0.3.14"
PACKAGES = (f"vllm=={VLLM}", MOONCAKE, "msgpack", "msgspec", "pyzmq", "psutil", "pyyaml", "rich", "soundfile", "av")
HOME = "NULL_GPU_HOME"
"""Environment variable with the folder of the environment, some 9 GB."""

MODELS = ("qwen3-omni", "qwen2-5-omni", "bagel")
LIBRARY = "libnullgpu.so"


@dataclass(frozen=True)
class Environment:
    """Folders of a prepared environment.

    Attributes:
        cache: compiled code of vLLM, torch and Triton.
        site: this package, as it is installed.
    """

    home: Path
    cache: Path
    site: Path

    @property
    def python(self) -> Path:
        """Python of the virtual environment with the CUDA wheels."""
        return self.home / "venv" / "bin" / "python"

    @property
    def library(self) -> Path:
        """Folder of the null device's library."""
        return self.home / "library"

    def model(self, name: str) -> Path:
        """Folder of a model in its released shape."""
        return self.home / "models" / name

    def variables(self, run: Path, gpu: Gpu, devices: int) -> dict[str, str]:
        """Environment variables of a process on null devices.

        Args:
            run: folder for the counters (`counters`) and the log (`refused`).
            gpu: kind of the devices.
        """
        cache = self.cache
        return {
            "PATH": f"{self.python.parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{self.site}:{HERE / 'shims'}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "LD_PRELOAD": str(self.library / LIBRARY),
            "LD_LIBRARY_PATH": str(self.library),
            "TRITON_LIBCUDA_PATH": str(self.library),
            "NULLGPU_FILE": str(run / "counters"),
            "NULLGPU_LOG": str(run / "refused"),
            "NULLGPU_MIB": str(gpu.mib),
            "NULLGPU_COUNT": str(devices),
            "NULLGPU_NAME": gpu.name,
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "XDG_CACHE_HOME": str(cache),
            "VLLM_CACHE_ROOT": str(cache / "vllm"),
            "TRITON_CACHE_DIR": str(cache / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        }


def prepare() -> Environment:
    """Make or update the environment, and return it."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-omni-ext" / "null-gpu"
    home = Path(os.environ.get(HOME) or default)
    made = Environment(home, home / "cache", home / "site")
    made.home.mkdir(parents=True, exist_ok=True)
    _wheels(made)
    _library(made)
    _mlx5(made)
    shutil.rmtree(made.site, ignore_errors=True)
    _pip(made, "--no-deps", "--no-build-isolation", "--target", str(made.site), str(ROOT))
    for name in MODELS:
        if not made.model(name).exists():
            words = [sys.executable, "-m", "vllm_omni_ext", "tiny", name, str(made.model(name)), "--released-shape"]
            subprocess.run(words, check=True, cwd=ROOT)
    return made


def add_missing(source: Path, target: Path) -> None:
    """Copy the files of a cache that another one lacks; no process may write to `source` meanwhile."""

    def copy(file: str, to: str) -> None:
        if not os.path.exists(to):
            shutil.copy2(file, to)

    for folder in (source, target):
        folder.mkdir(exist_ok=True)
    shutil.copytree(source, target, copy_function=copy, dirs_exist_ok=True)


def with_fault(made: Environment, fault: Fault, job: int) -> Environment:
    """Return the environment with a fault in the package and an empty cache; `job` names the folders of both."""
    faulty = replace(made, cache=made.home / f"cache-of-faults-{job}", site=made.home / f"site-of-faults-{job}")
    for folder in (faulty.cache, faulty.site):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(made.site, faulty.site)
    file = faulty.site / "vllm_omni_ext" / fault.file.removeprefix("vllm_omni_ext/")
    file.write_text(fault.changed(file.read_text()))
    return faulty


def _wheels(made: Environment) -> None:
    """Install the CUDA wheel of vLLM and the packages that go with it, once."""
    done = made.home / "venv" / "packages"
    wanted = "\n".join(PACKAGES)
    if done.exists() and done.read_text() == wanted:
        return
    if not made.python.exists():
        venv.create(made.home / "venv", with_pip=True, symlinks=True)
    _pip(made, *PACKAGES, "setuptools>=77")
    asked = [str(made.python), "-c", "import torch; print(torch.version.cuda)"]
    if subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip() == "None":
        raise RuntimeError("pip has installed a torch for CPUs")
    done.write_text(wanted)


def _pip(made: Environment, *words: str) -> None:
    """Install with the package index alone: local wheels may be builds of torch for CPUs."""
    environ = {name: value for name, value in os.environ.items() if name != "PIP_FIND_LINKS"}
    environ["PIP_CONFIG_FILE"] = os.devnull
    subprocess.run([str(made.python), "-m", "pip", "install", "-q", *words], check=True, env=environ)


def _mlx5(made: Environment) -> None:
    """Put the library of Mellanox cards next to the null device's: Mooncake's build for CUDA 13 is linked with it."""
    name = "libmlx5.so.1"
    if (made.library / name).exists() or ctypes.util.find_library("mlx5"):
        return
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["apt-get", "download", "-qq", "ibverbs-providers"], cwd=folder, check=True)
        (package,) = Path(folder).glob("*.deb")
        subprocess.run(["dpkg-deb", "-x", str(package), folder], check=True)
        shutil.copy2(next(Path(folder).glob(f"usr/lib/*/{name}.*")), made.library / name)


def _library(made: Environment) -> None:
    """Build the library if a source has changed."""
    sources = sorted([*HERE.glob("*.c"), *HERE.glob("*.h"), HERE / "stubs.txt", HERE / "build.py"])
    digest = hashlib.sha256(b"".join(each.read_bytes() for each in sources)).hexdigest()
    mark = made.library / "sources"
    if mark.exists() and mark.read_text() == digest:
        return
    headers = next(made.home.glob("venv/lib/python3*/site-packages/nvidia/cu13/include"))
    words = [sys.executable, HERE / "build.py", "--headers", headers, "--out", made.library]
    subprocess.run(list(map(str, words)), check=True)
    mark.write_text(digest)
