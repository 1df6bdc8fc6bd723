"""The bootstrap server of a prefill replica."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import requests

from vllm_omni_ext.disaggregation import bootstrap
from vllm_omni_ext.disaggregation.bootstrap import Bootstrap, TransferEndpoint

WORKER = {"dp_rank": 0, "tp_rank": 0, "pp_rank": 0, "addr": "tcp://127.0.0.1:1"}


def as_worker(monkeypatch: pytest.MonkeyPatch, rank: int, said: TransferEndpoint | None = None) -> None:
    group: Any = SimpleNamespace(rank_in_group=rank, broadcast_object=lambda place, src: place or said)
    monkeypatch.setattr(bootstrap, "get_world_group", lambda: group)


def test_it_listens_only_on_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    as_worker(monkeypatch, 0)
    made = Bootstrap("127.0.0.1")
    port = int(made.place.address.rpartition(":")[2])
    listening = [c.laddr for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert [address.ip for address in listening if address.port == port] == ["127.0.0.1"]
    assert requests.get(f"{made.place.url}/query", timeout=5).json() == {}
    made.close()
    made.close()
    with pytest.raises(requests.ConnectionError):
        requests.get(f"{made.place.url}/query", timeout=5)


def test_a_restarted_server_has_no_old_registrations(monkeypatch: pytest.MonkeyPatch) -> None:
    as_worker(monkeypatch, 0)
    first = Bootstrap("127.0.0.1")
    registered = requests.post(f"{first.place.url}/register", json={**WORKER, "engine_id": first.place.engine_id})
    assert registered.status_code == 200
    first.close()
    second = Bootstrap("127.0.0.1")
    assert second.place.engine_id != first.place.engine_id
    registered = requests.post(f"{second.place.url}/register", json={**WORKER, "engine_id": second.place.engine_id})
    assert registered.status_code == 200
    second.close()


def test_other_workers_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    said = TransferEndpoint("e", "10.0.0.1:5")
    as_worker(monkeypatch, 1, said)
    made = Bootstrap("127.0.0.1")
    assert made.place == said
    made.close()
