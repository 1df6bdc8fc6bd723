"""Answers as async iterators for callers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any, TypeVar

from vllm_omni_ext.errors import OmniError, RequestFailed
from vllm_omni_ext.orchestrator.messages import END

Answer = AsyncGenerator[Any, None]
Item = TypeVar("Item")

_FRONTEND_END = object()


async def chunks(sink: asyncio.Queue[Any]) -> Answer:
    """Yield the flow's chunks up to the last; raises the error that ended the request."""
    while (item := await sink.get()) is not END:
        if isinstance(item, BaseException):
            raise item
        yield item


async def merged(frontend: Answer, sink: asyncio.Queue[Any]) -> Answer:
    """Yield the frontend's outputs and the flow's chunks in order of arrival, until both have ended."""
    text = asyncio.create_task(_pump(frontend, sink))
    try:
        missing = {_FRONTEND_END, END}
        while missing:
            item = await sink.get()
            if isinstance(item, BaseException):
                raise item
            if item is _FRONTEND_END or item is END:
                missing.discard(item)
            else:
                yield item
    finally:
        text.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await text


async def _pump(source: Answer, sink: asyncio.Queue[Any]) -> None:
    try:
        async with contextlib.aclosing(source):
            async for output in source:
                sink.put_nowait(output)
        sink.put_nowait(_FRONTEND_END)
    except Exception as error:  # passed to the caller through the sink
        cause = error.__cause__
        sink.put_nowait(cause if isinstance(cause, OmniError) else error)


async def with_first(first: Item, rest: AsyncGenerator[Item, None]) -> AsyncGenerator[Item, None]:
    """Yield an item that was taken from a source already, then the rest of the source. Closes `rest`."""
    async with contextlib.aclosing(rest):
        yield first
        async for item in rest:
            yield item


async def until(limit_s: float, source: Answer) -> Answer:
    """Yield items for `limit_s` seconds, then close the source and raise RequestFailed."""
    end = asyncio.get_running_loop().time() + limit_s
    async with contextlib.aclosing(source):
        while True:
            try:
                async with asyncio.timeout_at(end):
                    item = await anext(source)
            except StopAsyncIteration:
                return
            except TimeoutError as error:
                raise RequestFailed(f"the request took longer than {limit_s:g} s (request_timeout_s)") from error
            yield item
