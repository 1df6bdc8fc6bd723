"""Makes vLLM's Model Runner V2 run without a GPU, in every Python process that has this folder on PYTHONPATH.

Its kernels are written in Triton, which has an interpreter. vLLM for CPUs uses Triton only if there is a backend of the
name "cpu": this one compiles nothing, since nothing is compiled where TRITON_INTERPRET is set.
"""

import importlib.util
import os

if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None:
    from triton.backends import Backend, backends
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class Interpreted(DriverBase):
        """A driver without a device."""

        def __init__(self):
            """Nothing to open."""

        @classmethod
        def is_active(cls):
            return True

        def map_python_to_cpp_type(self, ty):
            return ty

        def get_current_target(self):
            return GPUTarget("cpu", 0, 1)

        def get_active_torch_device(self):
            import torch

            return torch.device("cpu")

        def get_benchmarker(self):
            return None

    class NoCompiler:
        """PyTorch's compiler requests one, and continues without."""

        @staticmethod
        def supports_target(target):
            return False

    backends["cpu"] = Backend(compiler=NoCompiler, driver=Interpreted)
