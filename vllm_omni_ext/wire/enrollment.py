"""What a replica's process is told about itself, in its environment: who it is to the coordinator, and whose child."""

from __future__ import annotations

import os
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

VARIABLE = "OMNI_ENROLLMENT"
"""The environment variable, as JSON. Not in vLLM's config: that is part of the key of compiled kernels."""


class Enrollment(Struct, frozen=True, kw_only=True):
    """One replica, as its parent made it.

    Attributes:
        parent: process id of the parent, with which it shall end; None: it shall not.
        events: the coordinator's address for replicas; None: there is no coordinator.
        instance: text that no other process uses.
        host: address of this host as others reach it; "": they do not.
        secret_file: file with the cluster's secret.
    """

    stage: str
    index: Annotated[int, Meta(ge=0)]
    instance: str
    parent: int | None = None
    events: str | None = None
    model: str = ""
    config_hash: str = ""
    version: str = ""
    host: str = ""
    secret_file: str | None = None

    def variable(self) -> dict[str, str]:
        """As an environment variable."""
        return {VARIABLE: msgspec.json.encode(self).decode()}

    @classmethod
    def read(cls) -> Enrollment | None:
        """This process's own; None if it has none."""
        text = os.environ.get(VARIABLE)
        return None if text is None else msgspec.json.decode(text, type=cls)
