"""Both workers without an engine around them: what comes in an order that vLLM's own do not survive."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (
    MooncakeConnectorMetadata,
    MooncakeConnectorWorker,
    MooncakeXferResponse,
    MooncakeXferResponseStatus,
    PullReqMeta,
)

from tests.support.loop_clock import stopped_clock
from vllm_omni_ext.disaggregation import decode_worker
from vllm_omni_ext.disaggregation.decode_worker import ReceiveMixin
from vllm_omni_ext.disaggregation.mooncake_connector import OmniMooncakeWorker
from vllm_omni_ext.disaggregation.prefill_worker import SendMixin
from vllm_omni_ext.disaggregation.transfer_stats import WAITED, TransferStats

OK, CONTINUE, ERROR = (
    MooncakeXferResponseStatus.FINISH,
    MooncakeXferResponseStatus.CONTINUE,
    MooncakeXferResponseStatus.ERROR,
)


class Sender(SendMixin):
    """The half that sends, with an engine that is told what to say."""

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


async def test_a_request_that_was_aborted_before_it_ran_costs_no_other_its_blocks() -> None:
    sender = Sender()
    await sender.step({"a": ("ta", []), "b": ("tb", [])})
    await sender.step({"a": ("ta", [[1, 2]])}, drop=("never seen", "tb"))
    assert list(sender.reqs_need_send) == ["ta"]
    assert sender.reqs_need_send["ta"].ready.is_set()
    await sender.step({"c": ("tc", [[3]])}, drop=("never seen",))  # without a first word, as after a restart of decode
    assert sender.reqs_need_send["tc"].local_block_ids == [[3]]
    assert await sender.fetch_finished_sending_reqs() == set()


async def test_blocks_are_freed_when_their_time_is_over() -> None:
    sender = Sender(kv_retention_s=0.01)
    await sender.step({"a": ("ta", [[1]])})
    time.sleep(0.02)
    assert await sender.fetch_finished_sending_reqs() == {"a"}
    assert (sender.reqs_need_send, sender.xfer_stats.totals["expired"]) == ({}, 1)


async def test_a_transfer_id_that_is_used_twice_leaks_nothing() -> None:
    sender = Sender()
    await sender.step({"a": ("t", [[1]])})
    await sender.step({"b": ("t", [[2]])})
    assert sender.finished_sending_reqs == {"b"}
    assert sender.reqs_need_send["t"].p_req_id == "a"


class Socket:
    """Takes answers to a decode worker."""

    async def send_multipart(self, parts: Any) -> None:
        pass


def stock_answers(monkeypatch: pytest.MonkeyPatch, *said: MooncakeXferResponse | Exception) -> None:
    async def answer(self: Any, identity: bytes, sock: Any, meta: Any) -> None:
        for each in said:
            if isinstance(each, Exception):
                raise each
            await sock.send_multipart((identity, msgspec.msgpack.encode(each)))

    monkeypatch.setattr(MooncakeConnectorWorker, "send_kv_to_decode", answer)


ASKED = SimpleNamespace(req_blocks={"da": ("ta", [[1]]), "db": ("tb", [[2]]), "dc": ("never", [[3]])})


async def test_what_decode_did_not_get_is_freed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sender = Sender()
    await sender.step({"a": ("ta", [[1]]), "b": ("tb", [[2]])})
    stock_answers(monkeypatch, MooncakeXferResponse(status=CONTINUE, ok_reqs=["db"], err_reqs=["da"]))
    await sender.send_kv_to_decode(b"", Socket(), ASKED)
    assert sender.finished_sending_reqs == {"a"}
    assert list(sender.reqs_need_send) == ["tb"]


@pytest.mark.parametrize("said", [MooncakeXferResponse(status=ERROR, err_msg="sizes"), AssertionError("sizes")])
async def test_all_of_them_when_the_answer_is_an_error(said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sender = Sender()
    await sender.step({"a": ("ta", [[1]]), "b": ("tb", [[2]])})
    sender.reqs_need_send["tb"].sending = 1 if isinstance(said, Exception) else 0
    stock_answers(monkeypatch, said)
    expected = pytest.raises(AssertionError) if isinstance(said, Exception) else contextlib.nullcontext()
    with expected:
        await sender.send_kv_to_decode(b"", Socket(), ASKED)
    assert (sender.finished_sending_reqs, sender.reqs_need_send) == ({"a", "b"}, {})


@pytest.mark.parametrize(("words", "code"), [((0, 0, 1), 0), ((0, -1), -1), ((-2,), -1)])
def test_sending_lasts_until_it_is_certain(words: tuple[int, ...], code: int) -> None:
    sender, said = Sender(), iter(words)
    sender.engine.transfer_check_status = lambda batch: next(said)
    assert sender._send_blocks("somewhere", [1], [2], [30]) == code
    assert next(said, None) is None
    assert sender.xfer_stats.totals["bytes"] == (30 if code == 0 else 0)
    assert sender.xfer_stats.totals["failed_transfers"] == (code != 0)


def test_blocks_are_not_sent_to_an_unreachable_peer() -> None:
    sender = Sender()
    sender.engine.batch_transfer_async_write = lambda *args: 0
    assert sender._send_blocks("nowhere", [1], [2], [30]) == -1


def test_all_writes_have_ended_when_blocks_count_as_sent() -> None:
    sender, statuses, started = Sender(), {1: [0, 1], 2: [1], 3: [0, 0, 0, 1]}, iter((1, 2, 3))
    sender.engine.batch_transfer_async_write = lambda session, src, dst, length: next(started)
    sender.engine.transfer_check_status = lambda batch: statuses[batch].pop(0)
    assert sender._send_blocks("somewhere", [1, 2, 3], [4, 5, 6], [30, 40, 50]) == 0
    assert not any(statuses.values())
    assert sender.xfer_stats.totals["bytes"] == 120


def test_a_failed_write_is_reported_after_the_others_have_ended() -> None:
    sender, statuses, started = Sender(), {1: [-1], 3: [0, 0, 1]}, iter((1, 0, 3))
    sender.engine.batch_transfer_async_write = lambda session, src, dst, length: next(started)
    sender.engine.transfer_check_status = lambda batch: statuses[batch].pop(0)
    assert sender._send_blocks("somewhere", [1, 2, 3], [4, 5, 6], [30, 40, 50]) == -1
    assert not any(statuses.values())


class Receiver(ReceiveMixin):
    """The half that receives."""

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
        said = self.settled()
        return [] if said is None else sorted(said.counts)


def metas(*names: str) -> dict[str, PullReqMeta]:
    return {n: PullReqMeta(n, "t" + n, [[1, 2]], "e", "http://nowhere", pull_tasks_count=1) for n in names}


async def begin(receiver: Receiver, wanted: dict[str, PullReqMeta], monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(self: Any, reqs_to_recv: Any) -> None:
        pass

    monkeypatch.setattr(MooncakeConnectorWorker, "_start_load_kv", nothing)
    await receiver._start_load_kv({"e": wanted})
    receiver._pulls.ask([decode_worker._transfer(meta) for meta in wanted.values()], 1)


async def test_a_request_that_has_its_blocks_does_not_fail_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    receiver, wanted = Receiver(), metas("a", "b")
    await begin(receiver, wanted, monkeypatch)
    receiver.process_pulling_result(MooncakeXferResponse(status=CONTINUE, ok_reqs=["a"]), wanted)
    receiver._handle_failed_recv(wanted, ["a", "b"], "the sender died in between")
    assert receiver.failed() == ["b"]
    assert receiver.finished_recving_reqs == {"a", "b"}
    assert (receiver.xfer_stats.totals["received"], receiver.xfer_stats.totals["failed_receives"]) == (1, 1)
    assert len(receiver.xfer_stats.clone_and_reset().data[WAITED]) == 1


async def test_a_transfer_is_given_up_in_time_and_settled_later(monkeypatch: pytest.MonkeyPatch) -> None:
    receiver, wanted = Receiver(timeout_s=5.0), metas("a")
    with stopped_clock() as advance:
        await begin(receiver, wanted, monkeypatch)
        await advance(4.9)
        assert (receiver.failed(), receiver.settled_now()) == ([], [])
        await advance(0.1)
        assert (receiver.failed(), receiver.settled_now()) == (["a"], [])
        receiver.process_pulling_result(MooncakeXferResponse(status=OK, ok_reqs=["a"]), wanted)  # too late
        assert receiver.xfer_stats.totals["received"] == 0
        receiver._report(receiver._pulls.answer([("a", "ta")]))
        assert receiver.settled_now() == []
        await advance(decode_worker.SETTLE_S)
    assert receiver.settled_now() == [("a", "ta")]
    assert not receiver._pulls


async def test_sizes_that_do_not_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, engine: str, wanted: Any) -> None:
        raise AssertionError("3 is not divisible by 2")

    receiver, wanted = Receiver(), metas("a")
    await begin(receiver, wanted, monkeypatch)
    receiver._pulls.ask([("a", "ta")], 0)
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
    monkeypatch.setattr(MooncakeConnectorWorker, "receive_kv", lambda self, engine, some: asked.extend(some))
    receiver._handle_failed_recv(wanted, ["a"], "late")
    receiver.receive_kv("e", wanted)
    assert asked == ["b"]


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mooncake", "mooncake.engine"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(RuntimeError, match=r"vllm-omni-ext\[mooncake\].*libibverbs1"):
        OmniMooncakeWorker(SimpleNamespace(), None)
