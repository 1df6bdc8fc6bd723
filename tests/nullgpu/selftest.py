"""Check the null device with PyTorch: `python selftest.py --lib DIR`, DIR being the out folder of `build.py`.

The interpreter must have a CUDA wheel of PyTorch. The script runs itself again under the library.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from counters import Process, read

MIB = 1 << 20
BOARD_MIB = 8192
DRIVER_MIB = 600
CONTEXT_MIB = 300
NAME = "NVIDIA Selftest"
LIBRARY = "libnullgpu.so"


def environment(library: Path, folder: Path) -> dict[str, str]:
    """Return this process's environment with the null device and its settings."""
    return {
        **os.environ,
        "LD_PRELOAD": str(library / LIBRARY),
        "LD_LIBRARY_PATH": str(library),
        "PYTHONPATH": str(Path(__file__).with_name("shims")),
        "NULLGPU_MIB": str(BOARD_MIB),
        "NULLGPU_COUNT": "2",
        "NULLGPU_NAME": NAME,
        "NULLGPU_CONTEXT_MIB": str(CONTEXT_MIB),
        "NULLGPU_FILE": str(folder / "counters"),
        "NULLGPU_LOG": str(folder / "log"),
    }


def own() -> Process:
    """Return the counters of this process."""
    (process,) = (process for process in read(os.environ["NULLGPU_FILE"]) if process.pid == os.getpid())
    return process


def check_devices() -> None:
    """Number, name and memory of the devices are those of the environment, in PyTorch and in NVML."""
    import torch

    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 2
    for device in range(2):
        properties = torch.cuda.get_device_properties(device)
        assert properties.name == NAME
        assert properties.total_memory == (BOARD_MIB - DRIVER_MIB) * MIB
        assert torch.cuda.get_device_capability(device) == (9, 0)
    memory = (ctypes.c_ulonglong * 3)()
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    assert nvml.nvmlDeviceGetMemoryInfo(ctypes.c_void_p(1), memory) == 0
    assert memory[0] == BOARD_MIB * MIB
    assert memory[0] == memory[1] + memory[2]


def check_memory() -> None:
    """An allocation is counted for its device while it lives; one that exceeds the device fails."""
    import torch

    for device in range(2):
        torch.cuda.set_device(device)
        assert own().bytes[device] == CONTEXT_MIB * MIB, own()
        tensor = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        assert own().bytes[device] == (CONTEXT_MIB + 64) * MIB, own()
        free, total = torch.cuda.mem_get_info()
        assert total - free == own().bytes[device]
        del tensor
        torch.cuda.empty_cache()
        assert own().bytes[device] == CONTEXT_MIB * MIB, own()
        assert own().peak[device] == (CONTEXT_MIB + 64) * MIB, own()
    assert own().largest == 64 * MIB
    torch.cuda.set_device(0)
    try:
        torch.empty(BOARD_MIB * MIB, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError:
        pass
    else:
        raise AssertionError("an allocation larger than the device succeeded")
    assert "out of memory" in Path(os.environ["NULLGPU_LOG"]).read_text()
    assert own().bytes[0] == CONTEXT_MIB * MIB, own()


def check_mapped_memory() -> None:
    """Memory that vLLM's allocator maps is charged, given back by a sleep and charged again by the waking."""
    import torch
    from vllm.device_allocator.cumem import CuMemAllocator

    size = 64 * MIB
    before = own().bytes[0]
    allocator = CuMemAllocator.get_instance()
    with allocator.use_memory_pool("weights"):
        tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
    assert own().bytes[0] == before + size
    allocator.sleep()
    assert own().bytes[0] == before
    allocator.wake_up()
    assert own().bytes[0] == before + size
    assert tensor.cpu().numel() == size


def check_fork() -> None:
    """A process made by fork has counters of its own; its memory is free again after it ended."""
    import torch

    before, _ = torch.cuda.mem_get_info()
    runtime = ctypes.CDLL(None)
    if not (pid := os.fork()):
        address = ctypes.c_void_p()
        failed = runtime.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(32 * MIB))
        expected = (CONTEXT_MIB + 32) * MIB
        os._exit(failed or own().bytes[0] != expected)
    assert os.waitpid(pid, 0)[1] == 0
    assert torch.cuda.mem_get_info()[0] == before
    assert [process.pid for process in read(os.environ["NULLGPU_FILE"])] == [os.getpid()]


def check_work() -> None:
    """Copies keep their values; a matrix product is counted."""
    import torch

    values = torch.arange(1000, dtype=torch.float32)
    assert torch.equal(values.to("cuda").cpu(), values)
    assert torch.equal(values.pin_memory().to("cuda", non_blocking=True).clone().cpu(), values)
    for dtype in (torch.float32, torch.bfloat16):
        left = torch.ones(64, 32, device="cuda", dtype=dtype)
        before = own().launches
        product = left @ left.T
        assert product.shape == (64, 64)
        assert own().launches > before
    before = own().waits
    torch.cuda.synchronize()
    torch.cuda.synchronize()
    assert own().waits == before + 1
    assert product[0, 0].item() is not None
    assert own().waits == before + 2


def check_graph() -> None:
    """A graph is captured over two streams and replayed; its nodes and launches are counted."""
    import torch

    values = torch.ones(1024, device="cuda")
    other = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    before = own()
    with torch.cuda.graph(graph):
        assert torch.cuda.is_current_stream_capturing()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            values * 2
        torch.cuda.current_stream().wait_stream(other)
        values + 1
    after = own()
    assert after.graphs == before.graphs + 1
    assert after.nodes == before.nodes + 2, (before, after)
    graph.replay()
    assert own().launches == after.launches + 1
    other.synchronize()  # the stream left the capture when the capture ended
    torch.cuda.synchronize()
    assert own().refused == 0


def check_refusal() -> None:
    """A wait inside a capture is refused and logged, and the capture fails."""
    import torch

    errors = []
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:
                errors.append(str(error))
    except RuntimeError as error:
        errors.append(str(error))
    assert len(errors) == 2, errors
    assert "operation not permitted when stream is capturing" in errors[0]
    assert "operation failed due to a previous error during capture" in errors[1]
    assert own().refused == 1
    lines = Path(os.environ["NULLGPU_LOG"]).read_text().splitlines()
    assert f"{os.getpid()} REFUSED in a capture: cudaDeviceSynchronize: not allowed while this thread captures" in lines
    torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the null device with PyTorch.")
    parser.add_argument("--lib", type=Path, required=True, help="the out folder of build.py")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    library = arguments.lib.resolve()
    if not arguments.inside:
        command = [sys.executable, __file__, "--lib", str(library), "--inside"]
        with tempfile.TemporaryDirectory() as folder:
            return subprocess.call(command, env=environment(library, Path(folder)))
    for check in (check_devices, check_memory, check_mapped_memory, check_fork, check_work, check_graph, check_refusal):
        check()
    print("ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
