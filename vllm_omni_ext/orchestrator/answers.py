"""Async generators that yield the answer of a request: from its queue, merged, and with a time limit."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any, TypeVar

from vllm_omni_ext.errors import OmniError, RequestFailed
from vllm_omni_ext.orchestrator.messages import END

Answer = AsyncGenerator[Any, None]
Item = TypeVar("Item")

_ENDED = object()


async def chunks(sink: asyncio.Queue[Any]) -> Answer:
    """Yield the output chunks from a request's queue (`Ticket.sink`) up to `END`; raise an error from the queue."""
    while (item := await sink.get()) is not END:
        if isinstance(item, BaseException):
            raise item
        yield item


async def merged(*sources: AsyncGenerator[Item, None]) -> AsyncGenerator[Item, None]:
    """Yield the items of several generators in order of arrival; raise the first error. Closes all generators."""
    out = asyncio.Queue[Any]()
    tasks = [asyncio.create_task(_pump(source, out)) for source in sources]
    left = len(tasks)
    try:
        while left:
            item = await out.get()
            if isinstance(item, BaseException):
                raise item
            if item is _ENDED:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _pump(source: AsyncGenerator[Any, None], out: asyncio.Queue[Any]) -> None:
    try:
        async with contextlib.aclosing(source):
            async for item in source:
                out.put_nowait(item)
        out.put_nowait(_ENDED)
    except Exception as error:  # `merged` raises it; vLLM may have wrapped an error of this package
        cause = error.__cause__
        wrapped = isinstance(cause, OmniError) and not isinstance(error, OmniError)
        out.put_nowait(cause if wrapped else error)


async def with_first(first: Item, rest: AsyncGenerator[Item, None]) -> AsyncGenerator[Item, None]:
    """Yield `first`, an item that was already read from a generator, then the items of `rest`. Closes `rest`."""
    async with contextlib.aclosing(rest):
        yield first
        async for item in rest:
            yield item


async def until(limit_s: float, source: Answer) -> Answer:
    """Yield the items of `source`; if it has not ended after `limit_s` seconds, close it and raise RequestFailed."""
    end = asyncio.get_running_loop().time() + limit_s
    async with contextlib.aclosing(source):
        while True:
            try:
                async with asyncio.timeout_at(end):
                    item = await anext(source)
            except StopAsyncIteration:
                return
            except TimeoutError as error:
                raise RequestFailed(
                    f"the request took longer than {limit_s:g} s (timeouts.request_timeout_s)"
                ) from error
            yield item
