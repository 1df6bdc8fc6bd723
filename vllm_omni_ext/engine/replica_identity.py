"""Identity of a replica's process (name, parent, coordinator), which the parent passes in an environment variable."""

from __future__ import annotations

import os
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

VARIABLE = "OMNI_REPLICA_IDENTITY"
"""Name of the environment variable with the identity as JSON.

vLLM's config is not used for the identity, since the config is part of the key of compiled kernels.
"""


class ReplicaIdentity(Struct, frozen=True, kw_only=True):
    """The name of a replica (stage and index), and the settings that its process receives from its parent.

    Attributes:
        parent: process id of the parent; the replica ends when the parent's thread that started it ends. None: the end
            of a parent does not end the replica.
        program: process id of a user's program, any thread of which may have started the replica; the replica ends when
            the program ends. None: no user's program has started it.
        epoch: distinguishes this process from earlier processes of the same replica name.
        proof: token that shows the coordinator that the head (the process of `vllm serve`) has assigned this name and
            epoch.
        events: the coordinator's address for replicas; None: there is no coordinator.
        interval_s: seconds between two heartbeats.
        host: address under which other hosts reach this host; "" if they cannot.
        secret_file: file with the cluster's secret.
        ports: first and last port on which the replica may listen for other hosts; None: any.
    """

    stage: str
    index: Annotated[int, Meta(ge=0)]
    parent: int | None = None
    program: int | None = None
    epoch: int = 0
    proof: str = ""
    events: str | None = None
    interval_s: float = 1.0
    host: str = ""
    secret_file: str | None = None
    ports: tuple[int, int] | None = None

    def variable(self) -> dict[str, str]:
        """Return {name: value} of the environment variable that passes the identity to the replica's process."""
        return {VARIABLE: msgspec.json.encode(self).decode()}

    @classmethod
    def read(cls) -> ReplicaIdentity | None:
        """Return the identity of this process; None if the variable is not set."""
        text = os.environ.get(VARIABLE)
        return None if text is None else msgspec.json.decode(text, type=cls)


def own_ports() -> tuple[int, int] | None:
    """Return the first and last port on which this process may listen for other hosts; None: any."""
    identity = ReplicaIdentity.read()
    return None if identity is None else identity.ports
