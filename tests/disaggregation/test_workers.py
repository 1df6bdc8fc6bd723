"""Workers that send and receive blocks, their statistics and their bootstrap server, without an engine."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import queue
import sys
import threading
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import msgspec
import psutil
import pytest
import requests
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (
    MooncakeConnectorMetadata,
    MooncakeConnectorWorker,
    MooncakeXferResponse,
    MooncakeXferResponseStatus,
    PullReqMeta,
)

from tests.support.loop_clock import stopped_clock
from vllm_omni_ext.disaggregation import bootstrap, decode_worker
from vllm_omni_ext.disaggregation.bootstrap import Bootstrap, TransferEndpoint
from vllm_omni_ext.disaggregation.decode_worker import ReceiveMixin
from vllm_omni_ext.disaggregation.mooncake_connector import WAITED, OmniMooncakeWorker, TransferStats
from vllm_omni_ext.disaggregation.prefill_worker import SendMixin

Status = MooncakeXferResponseStatus


class Sender(SendMixin):
    """A worker that sends, with a fake of Mooncake's engine."""

    def __init__(self, kv_retention_s: float = 60.0) -> None:
        self.start_sending(kv_retention_s)
        self.news = threading.Event()
        self.reqs_need_send: dict[str, Any] = {}
        self.finished_sending_reqs: set[str] = set()
        self.xfer_stats = TransferStats()
        self._xfer_resp_decoder = msgspec.msgpack.Decoder(MooncakeXferResponse)
        self.engine = SimpleNamespace(batch_transfer_async_write=lambda *args: 7)

    def __del__(self) -> None:
        """Nothing was started."""

    async def step(self, send: dict[str, tuple[str, list[list[int]]]], drop: tuple[str, ...] = ()) -> None:
        metadata = MooncakeConnectorMetadata()
        metadata.reqs_to_send, metadata.reqs_not_processed = send, set(drop)
        await self.record_send_reqs(metadata)


async def test_an_aborted_request_does_not_free_the_blocks_of_others() -> None:
    sender = Sender()
    await sender.step({"a": ("ta", []), "b": ("tb", [])})
    await sender.step({"a": ("ta", [[1, 2]])}, drop=("never seen", "tb"))
    assert list(sender.reqs_need_send) == ["ta"]
    assert sender.reqs_need_send["ta"].ready.is_set()
    await sender.step({"c": ("tc", [[3]])}, drop=("never seen",))  # as after a restart of decode
    assert sender.reqs_need_send["tc"].local_block_ids == [[3]]
    assert await sender.fetch_finished_sending_reqs() == set()


async def test_blocks_are_freed_after_their_retention_time() -> None:
    sender = Sender(kv_retention_s=-1.0)  # at once
    await sender.step({"a": ("ta", [[1]])})
    assert await sender.fetch_finished_sending_reqs() == {"a"}
    assert (sender.reqs_need_send, sender.xfer_stats.totals["expired"]) == ({}, 1)


async def test_a_transfer_id_that_is_used_twice_leaks_nothing() -> None:
    sender = Sender()
    await sender.step({"a": ("t", [[1]])})
    await sender.step({"b": ("t", [[2]])})
    assert sender.finished_sending_reqs == {"b"}
    assert sender.reqs_need_send["t"].p_req_id == "a"


ASKED = SimpleNamespace(req_blocks={"da": ("ta", [[1]]), "db": ("tb", [[2]]), "dc": ("never", [[3]])})


FAILED_ONE = MooncakeXferResponse(status=Status.CONTINUE, ok_reqs=["db"], err_reqs=["da"])
FAILED_ALL = MooncakeXferResponse(status=Status.ERROR, err_msg="sizes")


@pytest.mark.parametrize(
    ("answer", "freed"), [(FAILED_ONE, {"a"}), (FAILED_ALL, {"a", "b"}), (AssertionError("sizes"), {"a", "b"})]
)
async def test_blocks_of_failed_transfers_are_freed_at_once(
    answer: Any, freed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = Sender()
    await sender.step({"a": ("ta", [[1]]), "b": ("tb", [[2]])})
    sender.reqs_need_send["tb"].sending = 1 if isinstance(answer, Exception) else 0

    async def stock(self: Any, identity: bytes, sock: Any, meta: Any) -> None:
        if isinstance(answer, Exception):
            raise answer
        await sock.send_multipart((identity, msgspec.msgpack.encode(answer)))

    monkeypatch.setattr(MooncakeConnectorWorker, "send_kv_to_decode", stock)
    with pytest.raises(AssertionError) if isinstance(answer, Exception) else contextlib.nullcontext():
        await sender.send_kv_to_decode(b"", AsyncMock(), ASKED)
    assert (sender.finished_sending_reqs, set(sender.reqs_need_send)) == (freed, {f"t{n}" for n in {"a", "b"} - freed})


@pytest.mark.parametrize("expires", [False, True])
async def test_blocks_of_a_failed_transfer_are_freed_when_the_last_write_of_them_has_ended(
    expires: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, ends, asked = Sender(), asyncio.Event(), SimpleNamespace(req_blocks={"da": ("ta", [[1]])})
    await sender.step({"a": ("ta", [[1]])})
    sender.reqs_need_send["ta"].need_send = 3

    async def stock(self: Sender, identity: bytes, sock: Any, meta: Any) -> None:
        entry = self.reqs_need_send["ta"]
        entry.sending += 1
        if identity == b"slow":
            await ends.wait()
        entry.sending -= 1
        names = {"err_reqs": ["da"]} if identity == b"fails" else {"ok_reqs": ["da"]}
        answer = MooncakeXferResponse(status=Status.FINISH, **names)
        await sock.send_multipart((identity, msgspec.msgpack.encode(answer)))

    monkeypatch.setattr(MooncakeConnectorWorker, "send_kv_to_decode", stock)
    slow = asyncio.create_task(sender.send_kv_to_decode(b"slow", AsyncMock(), asked))
    await asyncio.sleep(0)
    for identity in (b"fails", b"other"):
        await sender.send_kv_to_decode(identity, AsyncMock(), asked)
        assert (sender.finished_sending_reqs, set(sender.reqs_need_send)) == (set(), {"ta"})
    if expires:
        del sender.reqs_need_send["ta"]
    ends.set()
    await slow
    assert (sender.finished_sending_reqs, sender.reqs_need_send) == (set() if expires else {"a"}, {})
    assert not sender._failed_while_sending


@pytest.mark.parametrize(
    ("batches", "statuses", "code"),
    [
        ([1], {1: [0, 0, 1]}, 0),
        ([1, 2, 3], {1: [0, 1], 2: [1], 3: [0, 0, 0, 1]}, 0),
        ([1], {1: [-2]}, -1),
        ([1, 0, 3], {1: [-1], 3: [0, 0, 1]}, -1),  # a batch without a number has not begun
        ([0], {}, -1),
    ],
)
def test_sending_ends_when_every_write_has_ended(batches: list[int], statuses: dict[int, list[int]], code: int) -> None:
    sender, started, left = Sender(), iter(batches), {batch: list(each) for batch, each in statuses.items()}
    sender.engine.batch_transfer_async_write = lambda session, src, dst, length: next(started)
    sender.engine.transfer_check_status = lambda batch: left[batch].pop(0)
    count = len(batches)
    assert sender._send_blocks("somewhere", [1] * count, [2] * count, [30] * count) == code
    assert not any(left.values())
    assert sender.xfer_stats.totals["bytes"] == (30 * count if code == 0 else 0)
    assert sender.xfer_stats.totals["failed_transfers"] == (code != 0)


class Receiver(ReceiveMixin):
    """A worker that receives."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        self.start_receiving(timeout_s)
        self.news = threading.Event()
        self.finished_recving_reqs: set[str] = set()
        self._failed_recv_reqs: queue.Queue[str] = queue.Queue()
        self._invalid_block_ids: queue.Queue[set[int]] = queue.Queue()
        self._remote_agents: dict[str, Any] = {"e": {0: {0: "tcp://nowhere"}}}
        self.xfer_stats = TransferStats()

    def __del__(self) -> None:
        """Nothing was started."""

    def failed(self) -> list[str]:
        return [self._failed_recv_reqs.get() for _ in range(self._failed_recv_reqs.qsize())]

    def settled_now(self) -> list[tuple[str, str]]:
        settled = self.settled()
        return [] if settled is None else sorted(settled.counts)


def metas(*names: str) -> dict[str, PullReqMeta]:
    return {n: PullReqMeta(n, "t" + n, [[1, 2]], "e", "http://nowhere", pull_tasks_count=1) for n in names}


async def begin(receiver: Receiver, wanted: dict[str, PullReqMeta], monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(self: Any, reqs_to_recv: Any) -> None:
        pass

    monkeypatch.setattr(MooncakeConnectorWorker, "_start_load_kv", nothing)
    await receiver._start_load_kv({"e": wanted})
    receiver._pulls.queried([decode_worker._transfer(meta) for meta in wanted.values()], 1)


async def test_a_request_that_has_its_blocks_does_not_fail_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    receiver, wanted = Receiver(), metas("a", "b")
    await begin(receiver, wanted, monkeypatch)
    receiver.process_pulling_result(MooncakeXferResponse(status=Status.CONTINUE, ok_reqs=["a"]), wanted)
    receiver._handle_failed_recv(wanted, ["a", "b"], "the sender has ended")
    assert receiver.failed() == ["b"]
    assert receiver.finished_recving_reqs == {"a", "b"}
    assert (receiver.xfer_stats.totals["received"], receiver.xfer_stats.totals["failed_receives"]) == (1, 1)
    assert len(receiver.xfer_stats.clone_and_reset().data[WAITED]) == 1


async def test_a_transfer_fails_after_the_timeout_and_is_settled_later(monkeypatch: pytest.MonkeyPatch) -> None:
    receiver, wanted = Receiver(timeout_s=5.0), metas("a")
    with stopped_clock() as advance:
        await begin(receiver, wanted, monkeypatch)
        await advance(4.9)
        assert (receiver.failed(), receiver.settled_now()) == ([], [])
        await advance(0.1)
        assert (receiver.failed(), receiver.settled_now()) == (["a"], [])
        receiver.process_pulling_result(MooncakeXferResponse(status=Status.FINISH, ok_reqs=["a"]), wanted)  # too late
        assert receiver.xfer_stats.totals["received"] == 0
        receiver._report(receiver._pulls.answer([("a", "ta")]))
        assert receiver.settled_now() == []
        await advance(decode_worker.SETTLE_S)
    assert receiver.settled_now() == [("a", "ta")]
    assert not receiver._pulls


@pytest.mark.parametrize(("unread_s", "settled_s"), [(0.5, 1), (2.5, 3), (1e9, 60)])
async def test_a_failed_transfer_is_settled_when_the_data_of_its_sender_is_read(
    unread_s: float, settled_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver, wanted = Receiver(), metas("a")
    with stopped_clock() as advance:
        now = asyncio.get_running_loop().time
        began = now()
        monkeypatch.setattr(decode_worker, "has_unread_input", lambda: now() < began + unread_s)
        await begin(receiver, wanted, monkeypatch)
        receiver._handle_failed_recv(wanted, ["a"], "the sender has ended")
        receiver._report(receiver._pulls.answer([("a", "ta")]))
        for _ in range(settled_s):
            assert receiver.settled_now() == []
            await advance(decode_worker.SETTLE_S)
        assert receiver.settled_now() == [("a", "ta")]


@pytest.mark.parametrize("answer", ["ok_reqs", "err_reqs"])
async def test_a_transfer_is_settled_while_another_one_of_its_query_waits(
    answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver, wanted, ends = Receiver(), metas("a", "b"), asyncio.Event()

    async def stock(self: Receiver, address: str, wanted: dict[str, PullReqMeta]) -> None:
        copied = wanted.copy()  # as vLLM 0.33 does
        self.process_pulling_result(MooncakeXferResponse(status=Status.CONTINUE, **{answer: ["a"]}), copied)
        await ends.wait()
        self.process_pulling_result(MooncakeXferResponse(status=Status.FINISH, ok_reqs=["b"]), copied)

    monkeypatch.setattr(MooncakeConnectorWorker, "receive_kv_from_single_worker", stock)
    receiver._liveness = SimpleNamespace(gone=lambda address: asyncio.get_running_loop().create_future())
    with stopped_clock() as advance:
        await begin(receiver, wanted, monkeypatch)
        query = asyncio.create_task(receiver.receive_kv_from_single_worker("tcp://nowhere", wanted))
        await advance(0.0)
        await advance(decode_worker.SETTLE_S)
        assert receiver.settled_now() == [("a", "ta")]
        ends.set()
        await query
    assert receiver.settled_now() == [("b", "tb")]
    assert not receiver._pulls


@pytest.mark.parametrize("first", ["sent", "failed", "late"])
async def test_a_failure_of_one_of_two_prefill_workers_is_reported_once(
    first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver, wanted = Receiver(timeout_s=5.0), metas("a")
    wanted["a"].pull_tasks_count = 2
    sent = MooncakeXferResponse(status=Status.FINISH, ok_reqs=["a"])
    failed = MooncakeXferResponse(status=Status.FINISH, err_reqs=["a"], err_msg="no such request")
    with stopped_clock() as advance:
        await begin(receiver, wanted, monkeypatch)
        answers = {"sent": [sent, failed], "failed": [failed, sent], "late": [sent]}[first]
        for number, answer in enumerate(answers):
            receiver.process_pulling_result(answer, dict(wanted))
            reported = number == answers.index(failed) if failed in answers else False
            assert receiver.finished_recving_reqs == ({"a"} if reported else set())
            receiver.finished_recving_reqs.clear()
        await advance(5.0)  # the request has failed, or fails now
        assert receiver.finished_recving_reqs == ({"a"} if first == "late" else set())
        receiver.process_pulling_result(sent, dict(wanted))
        assert receiver.finished_recving_reqs == ({"a"} if first == "late" else set())
    assert receiver.failed() == ["a"]
    assert (receiver.xfer_stats.totals["received"], receiver.xfer_stats.totals["failed_receives"]) == (0, 1)


async def test_a_transfer_between_sizes_that_do_not_match_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, engine: str, wanted: Any) -> None:
        raise AssertionError("3 is not divisible by 2")

    receiver, wanted = Receiver(), metas("a")
    await begin(receiver, wanted, monkeypatch)
    receiver._pulls.queried([("a", "ta")], 0)
    monkeypatch.setattr(MooncakeConnectorWorker, "receive_kv", refuse)
    with stopped_clock() as advance:
        receiver.receive_kv("e", wanted)
        assert (receiver.failed(), receiver._remote_agents) == (["a"], {})
        await advance(decode_worker.SETTLE_S)
    assert receiver.settled_now() == [("a", "ta")]


async def test_a_cancelled_transfer_is_not_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    receiver, wanted = Receiver(), metas("a", "b")
    await begin(receiver, wanted, monkeypatch)
    monkeypatch.setattr(MooncakeConnectorWorker, "receive_kv", lambda self, engine, some: asked.append([*some]))
    receiver._handle_failed_recv(wanted, ["a"], "late")
    receiver.receive_kv("e", wanted)
    assert asked == [["b"]]
    receiver._handle_failed_recv(wanted, ["b"], "late")
    receiver.receive_kv("e", wanted)
    assert asked == [["b"]], "no prefill worker answers an empty query"


def test_without_the_library_the_error_names_the_packages_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mooncake", "mooncake.engine"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(RuntimeError, match=r"vllm-omni-ext\[mooncake\].*libibverbs1"):
        OmniMooncakeWorker(SimpleNamespace(), None)


def test_statistics_of_an_interval_can_be_sent_and_added_up() -> None:
    stats = TransferStats()
    assert stats.is_empty()
    stats.record_received(0.25)
    assert not stats.is_empty()
    stats.record_transfer(0.5, 100, 2)
    first = pickle.loads(pickle.dumps(stats.clone_and_reset()))
    assert stats.is_empty()
    stats.record_received(0.5)
    stats.record_failed_recv()
    both = first.aggregate(stats.clone_and_reset())
    assert both.data[WAITED] == [0.25, 0.5]
    assert (both.reduce()["Num failed recvs"], both.reduce()["Num successful transfers"]) == (1, 1)


def test_totals_are_kept_after_an_interval() -> None:
    stats = TransferStats()
    for _ in range(2):
        stats.record_transfer(0.5, 100, 2)
        stats.record_failed_transfer()
        stats.record_kv_expired_req()
        stats.record_received(0.25)
        stats.clone_and_reset()
    assert stats.totals == {
        "transfers": 2,
        "bytes": 200,
        "seconds": 1.0,
        "failed_transfers": 2,
        "expired": 2,
        "received": 2,
        "waited_seconds": 0.5,
    }


@pytest.mark.parametrize(
    ("record", "name"),
    [
        (lambda stats: stats.record_transfer(0.5, 100, 2), "transfers"),
        (lambda stats: stats.record_failed_transfer(), "failed_transfers"),
    ],
    ids=["sent", "failed"],
)
def test_totals_count_the_transfers_of_all_threads(record: Callable[[TransferStats], None], name: str) -> None:
    stats, lock, goes_on = TransferStats(), threading.Lock(), threading.Event()

    class Lock(contextlib.AbstractContextManager[None]):
        def __enter__(self) -> None:
            if not lock.acquire(blocking=False):
                goes_on.set()
                lock.acquire()

        def __exit__(self, *error: object) -> None:
            lock.release()

    def record_in_other_thread() -> None:
        record(stats)
        goes_on.set()

    other = threading.Thread(target=record_in_other_thread, daemon=True)

    class Totals(Counter[str]):
        """Before the first change, the other thread runs until it has ended or waits for the lock."""

        def __setitem__(self, key: str, value: int) -> None:
            if other.ident is None:
                other.start()
                assert goes_on.wait(30)
            super().__setitem__(key, value)

    stats._lock, stats.totals = Lock(), Totals({name: 0})
    record(stats)
    other.join()
    assert stats.totals[name] == 2


WORKER = {"dp_rank": 0, "tp_rank": 0, "pp_rank": 0, "addr": "tcp://127.0.0.1:1"}


def as_worker(monkeypatch: pytest.MonkeyPatch, rank: int, sent: TransferEndpoint | None = None) -> None:
    group: Any = SimpleNamespace(rank_in_group=rank, broadcast_object=lambda place, src: place or sent)
    monkeypatch.setattr(bootstrap, "get_world_group", lambda: group)


def test_the_bootstrap_server_listens_only_on_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_restarted_bootstrap_server_has_no_old_registrations(monkeypatch: pytest.MonkeyPatch) -> None:
    as_worker(monkeypatch, 0)
    ids = set()
    for _ in range(2):
        made = Bootstrap("127.0.0.1")
        answer = requests.post(f"{made.place.url}/register", json={**WORKER, "engine_id": made.place.engine_id})
        assert answer.status_code == 200
        ids.add(made.place.engine_id)
        made.close()
    assert len(ids) == 2


def test_other_workers_receive_the_endpoint_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = TransferEndpoint("e", "10.0.0.1:5")
    as_worker(monkeypatch, 1, sent)
    made = Bootstrap("127.0.0.1")
    assert made.place == sent
    made.close()
