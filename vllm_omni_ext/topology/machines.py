"""A machine as text, to plan for a machine other than this one: `cuda:80GiBx2`."""

from __future__ import annotations

import re
from dataclasses import replace

from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.topology.shape import Machine

_WORDS = re.compile(r"cuda:(\d+(?:\.\d+)?)(GiB|MiB)(?:x(\d+))?")
_UNITS = {"GiB": 1 << 30, "MiB": 1 << 20}


def parse_machine(text: str, here: Machine) -> Machine:
    """Parse a machine.

    Args:
        text: `cuda:SIZExCOUNT` with the size of each device as `nvidia-smi` shows it, in GiB or MiB, and their number
            (1 if left out); or `cpu`.
        here: supplies the cores and the memory of the host, which the text does not name.

    Raises:
        ConfigError: the text is neither.
    """
    if text == "cpu":
        return replace(here, platform="cpu", device_count=0, device_bytes=())
    found = _WORDS.fullmatch(text)
    if found is None or not (count := int(found[3] or 1)) or not float(found[1]):
        raise ConfigError(f"--machine {text}: write cuda:SIZExCOUNT, e.g. cuda:80GiBx2 or cuda:81559MiB, or cpu")
    size = int(float(found[1]) * _UNITS[found[2]])
    return replace(here, platform="cuda", device_count=count, device_bytes=(size,) * count)
