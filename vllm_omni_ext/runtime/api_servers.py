"""The API server processes, as the head starts and addresses them."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any

from vllm.utils.system_utils import get_mp_context

from vllm_omni_ext.errors import OmniError
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.runtime.fleet import About
from vllm_omni_ext.runtime.launcher import START_METHOD, Deployment, environment
from vllm_omni_ext.wire.control import (
    Listen,
    Listening,
    Message,
    ReplicaEnded,
    ReplicaReady,
    ServerReady,
    decode,
    encode,
)

ANSWER_S = 10.0
"""An API server that does not answer within this time is stuck."""

Start = Callable[[int, Connection], tuple[Callable[..., None], tuple[Any, ...]]]
"""Gives the body of an API server process and its arguments, from its number and its end of the pipe."""


class ApiServers:
    """The processes and the pipes to them; a `Users` of the keeper. Leaving the block ends them, replicas included.

    Args:
        start: what each of them runs.
    """

    def __init__(self, deployment: Deployment, start: Start) -> None:
        self._deployment = deployment
        self._start = start
        self.processes: dict[int, Any] = {}
        self._pipes: dict[int, Connection] = {}
        self._answers: dict[int, queue.SimpleQueue[tuple[int, Listening | None]]] = {}
        self._numbers = itertools.count()
        self._reader: threading.Thread | None = None
        self._wake, self._waker = connection.Pipe(duplex=False)

    def __enter__(self) -> ApiServers:
        with environment({START_METHOD: "fork"} if self._deployment.fork else {}, defaults={}):
            context = get_mp_context()
            for client in range(self._deployment.clients):
                receiver, sender = context.Pipe()
                body, arguments = self._start(client, receiver)
                process = context.Process(target=body, name=f"ApiServer_{client}", args=arguments)
                with self._deployment.forking():
                    process.start()
                receiver.close()
                self.processes[client] = process
                self._pipes[client] = sender
        self._deployment.close_listeners()
        return self

    def __exit__(self, *exc: object) -> None:
        # Together with the replicas: one whose API server is gone would wait seconds to deliver its last message.
        self._deployment.end(list(self.processes.values()))
        if self._reader is not None:
            self._waker.send_bytes(b".")
            self._reader.join()
        for pipe in (*self._pipes.values(), self._wake, self._waker):
            pipe.close()

    def wait(self) -> bool:
        """Wait until all answer requests; False if one has ended instead."""
        try:
            for pipe in self._pipes.values():
                assert isinstance(decode(pipe.recv_bytes()), ServerReady)
        except (EOFError, ConnectionResetError):
            return False
        self._reader = threading.Thread(target=self._read, name="omni-servers", daemon=True)
        self._reader.start()
        return True

    # -- what the keeper says ------------------------------------------------------------------------------------

    def listen(self, replica: ReplicaId, host: str | None = None) -> Sequence[tuple[str, str]]:
        """Have all of them listen for a replica that is going to start; where it connects to, for each.

        Raises:
            OmniError: one of them cannot, or does not answer.
        """
        number = next(self._numbers)
        answers: queue.SimpleQueue[tuple[int, Listening | None]] = queue.SimpleQueue()
        self._answers[number] = answers
        try:
            self._tell(Listen(number, str(replica), host))
            found: dict[int, Listening] = {}
            for _ in self.processes:
                client, answer = answers.get(timeout=ANSWER_S)
                if answer is None:
                    raise OmniError("an API server has ended")
                if answer.error:
                    raise OmniError(f"an API server cannot listen for {replica}: {answer.error}")
                found[client] = answer
        except queue.Empty as error:
            raise OmniError(f"an API server did not answer within {ANSWER_S:g} s") from error
        finally:
            del self._answers[number]
        return [(answer.input, answer.output) for _, answer in sorted(found.items())]

    def ready(self, replica: ReplicaId, about: About) -> None:
        """A replica that was listened for can be used."""
        self._tell(ReplicaReady(str(replica), about.host, about.pid, about.restarts))

    def ended(self, replica: ReplicaId, reason: str, *, again: bool) -> None:
        """A replica is gone; `again` if it will be started once more."""
        self._tell(ReplicaEnded(str(replica), reason, again))

    def _tell(self, message: Message) -> None:
        for pipe in self._pipes.values():
            try:
                pipe.send_bytes(encode(message))
            except (BrokenPipeError, ConnectionResetError):  # it is gone, which the supervisor sees too
                continue

    # -- what they say -------------------------------------------------------------------------------------------

    def _read(self) -> None:
        pipes: dict[Any, int] = {pipe: client for client, pipe in self._pipes.items()}
        while True:
            ready = connection.wait([*pipes, self._wake])
            if self._wake in ready:
                return
            for pipe in ready:
                try:
                    self._heard(pipes[pipe], decode(pipe.recv_bytes()))  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    client = pipes.pop(pipe)
                    for answers in list(self._answers.values()):
                        answers.put((client, None))

    def _heard(self, client: int, message: Message) -> None:
        if isinstance(message, Listening) and (answers := self._answers.get(message.number)) is not None:
            answers.put((client, message))
