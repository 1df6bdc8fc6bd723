"""A world of one process: its groups listen nowhere and give the right results. Larger worlds are as before."""

from __future__ import annotations

import multiprocessing
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from vllm_omni_ext.engine import alone as module
from vllm_omni_ext.engine.alone import BACKEND, alone

PATIENCE_S = 120.0


def listening() -> list[Any]:
    return [each for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN]


def start(init: str, rank: int, size: int) -> None:
    """vLLM's own way to the groups of a worker."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

    with set_current_vllm_config(VllmConfig()), alone():
        init_distributed_environment(size, rank, init, rank, "gloo")
        ensure_model_parallel_initialized(size, 1)


def in_processes(count: int, body: Callable[..., Any], folder: Path) -> list[Any]:
    """What processes return that are the ranks of one world."""
    context = multiprocessing.get_context("fork")  # vLLM is imported here already
    init = f"file://{folder}/{uuid.uuid4().hex}"
    with context.Pool(count) as pool:
        return [each.get(PATIENCE_S) for each in [pool.apply_async(body, (init, rank, count)) for rank in range(count)]]


def _one(init: str, rank: int, size: int) -> dict[str, Any]:
    from vllm.distributed import get_pp_group, get_tp_group, get_world_group

    before = len(listening())
    start(init, rank, size)
    said = torch.arange(3.0)
    results: dict[str, Any] = {"listening": len(listening()) - before, "backend": dist.get_backend()}
    for name, group in (("tp", get_tp_group()), ("pp", get_pp_group()), ("world", get_world_group())):
        results[name] = (group.world_size, group.rank_in_group, group.all_reduce(said).tolist())
        dist.barrier(group=group.cpu_group)
    whole = torch.zeros(3)
    dist.all_reduce(said)
    dist.all_gather_into_tensor(whole, said)
    parts, objects = [torch.zeros(3)], [None]
    dist.all_gather(parts, said)
    dist.all_gather_object(objects, {"some": "object"})
    shared = ["of rank 0"]
    dist.broadcast_object_list(shared, 0)
    return results | {"results": [said.tolist(), whole.tolist(), parts[0].tolist(), objects, shared]}


@pytest.mark.engine
def test_one_process_listens_nowhere_and_computes_what_it_should(tmp_path: Path) -> None:
    (found,) = in_processes(1, _one, tmp_path)
    assert found.pop("listening") == 0
    assert found.pop("backend") == BACKEND
    said = [0.0, 1.0, 2.0]
    assert found.pop("results") == [said, said, said, [{"some": "object"}], ["of rank 0"]]
    assert found == dict.fromkeys(("tp", "pp", "world"), (1, 0, said))


def _two(init: str, rank: int, size: int) -> tuple[str, list[float]]:
    with alone():
        dist.init_process_group("gloo", init_method=init, world_size=size, rank=rank)
    said = torch.full((2,), float(rank + 1))
    dist.all_reduce(said)
    return dist.get_backend(), said.tolist()


@pytest.mark.engine
def test_two_processes_talk_to_each_other(tmp_path: Path) -> None:
    assert in_processes(2, _two, tmp_path) == [("gloo", [3.0, 3.0])] * 2


def test_torch_is_left_as_it_was() -> None:
    before = dist.init_process_group, dist.new_group
    with pytest.raises(KeyboardInterrupt), alone():
        assert (dist.init_process_group, dist.new_group) != before
        raise KeyboardInterrupt
    assert (dist.init_process_group, dist.new_group) == before


@pytest.mark.parametrize(
    ("backend", "size", "made"),
    [("gloo", 1, BACKEND), ("gloo", 2, "gloo"), ("nccl", 1, "nccl"), ("cpu:gloo,cuda:nccl", 1, "cpu:gloo,cuda:nccl")],
)
def test_only_gloo_and_only_of_one_process_is_replaced(
    monkeypatch: pytest.MonkeyPatch, backend: str, size: int, made: str
) -> None:
    """On CUDA the world stays with NCCL, and its groups for the CPU are replaced."""
    seen: list[Any] = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend=None, **more: seen.append((backend, more)))
    monkeypatch.setattr(dist, "new_group", lambda ranks, **more: seen.append((ranks, more)))
    monkeypatch.setattr(dist, "get_world_size", lambda: size)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    with alone():
        dist.init_process_group(backend=backend, world_size=size, rank=0, store="s")
        dist.new_group([0], backend=backend)
    assert seen == [(made, {"world_size": size, "rank": 0, "store": "s"}), ([0], {"backend": made})]


def test_the_backend_is_for_one_process_only() -> None:
    class Common:
        group_size, group_rank = 2, 0

    with pytest.raises(ValueError, match="a group of one process, not of 2"):
        module._make(Common(), None)
