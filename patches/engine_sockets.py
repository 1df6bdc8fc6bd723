"""Sets CURVE keys for the connections of vLLM's engine to its clients.

vLLM's engine has a thread for input and a thread for output. Each thread creates a ZeroMQ context and passes it to
`make_zmq_socket`. The patches replace the functions of both threads by copies with the same code, in which the name
`make_zmq_socket` is a wrapper. The wrapper sets the socket options on the context before it creates a socket for a TCP
address. The function `make_zmq_socket` of vLLM's module stays unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

from vllm_omni_ext.patching.patch import Patch

MAKER = "make_zmq_socket"
"""Name of vLLM's function that creates a socket."""

_options: dict[int, Any] = {}


def use(options: Mapping[int, Any]) -> None:
    """Set these socket options on every socket that this process's engine creates for a TCP address from now on.

    Args:
        options: values by libzmq's option number.
    """
    _options.update(options)


def with_options(original: FunctionType) -> FunctionType:
    """Return a copy of a function of vLLM's engine whose calls of `make_zmq_socket` set the options passed to `use`."""
    names = {**original.__globals__, MAKER: _with_options_set(original.__globals__[MAKER])}
    made = FunctionType(original.__code__, names, original.__name__, original.__defaults__, original.__closure__)
    made.__kwdefaults__ = original.__kwdefaults__
    made.__qualname__, made.__doc__, made.__module__ = original.__qualname__, original.__doc__, original.__module__
    return made


def _with_options_set(make: Callable[..., Any]) -> Callable[..., Any]:
    def make_zmq_socket(ctx: Any, path: str, *args: Any, **kwargs: Any) -> Any:
        if path.startswith("tcp:"):
            ctx.sockopts.update(_options)
        return make(ctx, path, *args, **kwargs)

    return make_zmq_socket


def _patch(name: str, function: str, traffic: str) -> Patch:
    return Patch(
        name=name,
        target=f"vllm.v1.engine.core:EngineCoreProc.{function}",
        when="only in replicas that have a cluster's secret",
        why=f"Encryption of {traffic} replicas on other hosts: vLLM's engine connects to its clients without any keys. "
        "Our clients also follow the function's wire protocol.",
        upstream="none: vLLM has no hook for the options of the engine's sockets",
        remove_when="vLLM's engine can be given keys or socket options for the connections to its clients",
        wrap=with_options,
    )


PATCHES = (
    _patch("engine_input_sockets", "process_input_sockets", "requests to"),
    _patch("engine_output_sockets", "process_output_sockets", "outputs of"),
)
