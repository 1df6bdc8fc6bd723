"""The end of a peer's process is detected; a stopped process is not taken for an ended one."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys

import pytest

from vllm_omni_ext.disaggregation.peer_liveness import PeerLiveness, has_unread_input

LISTEN = """
import zmq
socket = zmq.Context().socket(zmq.ROUTER)
print(socket.bind_to_random_port("tcp://127.0.0.1"), flush=True)
socket.recv()
"""
SOON_S = 30.0


@pytest.mark.engine
async def test_a_killed_process_has_ended_and_a_stopped_one_has_not() -> None:
    process = subprocess.Popen([sys.executable, "-c", LISTEN], stdout=subprocess.PIPE, text=True)
    address = f"tcp://127.0.0.1:{process.stdout.readline().strip()}"  # type: ignore[union-attr]
    lines = PeerLiveness()
    try:
        gone = lines.gone(address)
        assert lines.gone(address) is gone
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(1.0)
        assert not gone.done()
        process.kill()
        await asyncio.wait_for(gone, SOON_S)
        assert lines.gone(address) is not gone
        await asyncio.wait_for(lines.gone(address), SOON_S)
    finally:
        process.kill()
        process.communicate()
        lines.close()


async def test_peer_is_dead_where_no_process_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"tcp://127.0.0.1:{closed.getsockname()[1]}"
    lines = PeerLiveness()
    await asyncio.wait_for(lines.gone(address), SOON_S)
    lines.close()


@pytest.mark.parametrize("accepted", [True, False])
def test_data_of_a_closed_connection_is_unread_until_it_is_read(accepted: bool) -> None:
    """Also that of a connection which this process has not accepted yet."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver = server.accept()[0] if accepted else None
        sender.sendall(b"blocks")
        assert not has_unread_input()
        sender.close()
        assert has_unread_input()
        receiver = receiver or server.accept()[0]
        assert receiver.recv(6) == b"blocks" and has_unread_input()
        receiver.close()
        assert not has_unread_input()
