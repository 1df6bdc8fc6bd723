"""Machines in words."""

from __future__ import annotations

import pytest

from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.topology.machines import parse_machine
from vllm_omni_ext.topology.plan import Machine

HERE = Machine(platform="cuda", device_count=1, cpu_count=3, memory_bytes=5, device_bytes=(7,))


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("cuda:80GiBx2", (80 << 30,) * 2),
        ("cuda:81559MiB", (81559 << 20,)),
        ("cuda:22.5GiBx1", (45 << 29,)),
        ("cpu", ()),
    ],
)
def test_machines(text: str, devices: tuple[int, ...]) -> None:
    found = parse_machine(text, HERE)
    assert (found.device_bytes, found.device_count) == (devices, len(devices))
    assert found.platform == ("cuda" if devices else "cpu")
    assert (found.cpu_count, found.memory_bytes) == (3, 5)


@pytest.mark.parametrize(
    "text", ["", "cuda", "cuda:80", "cuda:80GB", "cuda:80GiBx0", "cuda:0GiB", "cuda:80GiB x2", "h100"]
)
def test_what_is_no_machine(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_machine(text, HERE)
    assert str(refused.value) == (
        f"--machine {text}: write cuda:SIZExCOUNT, e.g. cuda:80GiBx2 or cuda:81559MiB, or cpu"
    )
