"""Process groups of a single process have no sockets and compute the right results; larger ones stay gloo's."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from vllm_omni_ext.engine.alone import BACKEND, alone

PATIENCE_S = 120.0


def listening() -> list[Any]:
    return [each for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN]


def groups_of_one_process(init: str) -> dict[str, Any]:
    """Make the groups of a worker as vLLM does; return the results of their collectives."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        ensure_model_parallel_initialized,
        get_pp_group,
        get_tp_group,
        get_world_group,
        init_distributed_environment,
    )

    before = len(listening())
    with set_current_vllm_config(VllmConfig()), alone():
        init_distributed_environment(1, 0, init, 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
    sent = torch.arange(3.0)
    found: dict[str, Any] = {"listening": len(listening()) - before, "backend": dist.get_backend()}
    for name, group in (("tp", get_tp_group()), ("pp", get_pp_group()), ("world", get_world_group())):
        found[name] = (group.world_size, group.rank_in_group, group.all_reduce(sent).tolist())
        dist.barrier(group=group.cpu_group)
    whole, parts, objects, shared = torch.zeros(3), [torch.zeros(3)], [None], ["of rank 0"]
    dist.all_reduce(sent)
    dist.all_gather_into_tensor(whole, sent)
    dist.all_gather(parts, sent)
    dist.all_gather_object(objects, {"some": "object"})
    dist.broadcast_object_list(shared, 0)
    return found | {"results": [sent.tolist(), whole.tolist(), parts[0].tolist(), objects, shared]}


@pytest.mark.engine
def test_collectives_of_one_process_need_no_socket(tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(1) as pool:  # vLLM is imported here already
        found = pool.apply_async(groups_of_one_process, (f"file://{tmp_path}/init",)).get(PATIENCE_S)
    sent = [0.0, 1.0, 2.0]
    groups = dict.fromkeys(("tp", "pp", "world"), (1, 0, sent))
    results = [sent, sent, sent, [{"some": "object"}], ["of rank 0"]]
    assert found == {"listening": 0, "backend": BACKEND, "results": results, **groups}


def test_torch_is_unchanged_after_the_block() -> None:
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
