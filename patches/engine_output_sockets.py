"""CURVE keys for the connections that carry outputs of a replica's engine, see `patching.sockets`."""

from __future__ import annotations

from vllm_omni_ext.patching.sockets import with_options
from vllm_omni_ext.patching.spec import Patch

PATCH = Patch(
    name="engine_output_sockets",
    target="vllm.v1.engine.core:EngineCoreProc.process_output_sockets",
    why="Encryption of outputs of replicas on other hosts: vLLM's engine connects to its clients without any keys.",
    upstream="none: vLLM has no hook for the options of the engine's sockets",
    remove_when="vLLM's engine can be given keys or socket options for the connections to its clients",
    seen=frozenset({"17bdcc1213d7"}),
    wrap=with_options,
    when="secret",
)
