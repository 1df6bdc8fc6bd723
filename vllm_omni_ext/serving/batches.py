"""Routes `/v1/files` and `/v1/batches` of OpenAI's API. Lines of a batch are requests to this server's own routes."""

from __future__ import annotations

import asyncio
import os
import re
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import IO, Any, TypeVar

import httpx
from fastapi import APIRouter, FastAPI, HTTPException, Request
from fastapi.responses import FileResponse
from starlette.datastructures import UploadFile
from starlette.types import Receive, Scope, Send
from vllm import envs
from vllm.logger import init_logger

from vllm_omni_ext.batch.lines import PRIORITY_HEADER, ROUTES
from vllm_omni_ext.batch.running import NotFetched, Sender
from vllm_omni_ext.batch.store import INPUT, MIB, OUTPUT, Full, InUse, NotFound, Store, is_id
from vllm_omni_ext.batch.worker import Worker
from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.omni import AsyncOmni
from vllm_omni_ext.serving.in_process import InProcess
from vllm_omni_ext.serving.limits.fetching import Fetcher, Rules
from vllm_omni_ext.serving.limits.media import EARLIEST_FAILURE_S
from vllm_omni_ext.serving.limits.validation import HALF_CHARACTER

logger = init_logger(__name__)

T = TypeVar("T")

PRIORITY = 1
"""vLLM's priority of a batch's lines. Other requests have 0, and are scheduled first."""

SHARE = 2
"""Batches send at most 1 / `SHARE` of the requests that the smallest stage can run simultaneously."""

LONGEST_WINDOW_H = 14 * 24
MOST_PAIRS, LONGEST_KEY, LONGEST_VALUE = 16, 64, 512
"""Limits of `metadata`, as in OpenAI's API."""

FILE_PARAMS = ("purpose", "limit", "order", "after")
BATCH_PARAMS = ("limit", "after")
MOST_FILES_LISTED, MOST_BATCHES_LISTED = 10_000, 100

router = APIRouter()


def install(app: FastAPI, omni: AsyncOmni, args: Namespace) -> Worker | None:
    """Add the routes of files and batches.

    Returns:
        The `Worker` that runs the batches, not started yet; None, without routes, if no `batch_dir` is configured.
    """
    config = omni.plan.config
    if config.batch_dir is None:
        return None
    keys = args.api_key or [envs.VLLM_API_KEY]
    headers = {PRIORITY_HEADER: str(PRIORITY)} | ({"Authorization": f"Bearer {keys[0]}"} if keys[0] else {})
    rules = Rules.of(config.allow_private_media, omni.model_config.allowed_media_domains or ())
    client = httpx.AsyncClient(transport=InProcess(app), base_url="http://batch", timeout=None)
    store = Store(Path(config.batch_dir), most=config.limits.max_batch_files_mib * MIB)
    most = config.limits.max_body_mib * MIB
    sender = Sender(client, partial(_fetch, rules), headers=headers, most=most)
    worker = Worker(store, sender, places=_places(omni))
    omni.when_stopping(worker.stop)
    app.include_router(router)
    return worker


def _places(omni: AsyncOmni) -> int:
    """Return the number of lines of batches that are sent simultaneously, at least 1; see `SHARE`.

    The size of a stage is `max_num_seqs` times its number of replicas.
    """
    stages = [stage for stage in omni.plan.stages if stage.name in omni.connections.configs]
    sizes = (omni.connections.configs[each.name].scheduler_config.max_num_seqs * len(each.replicas) for each in stages)
    return max(1, min(filter(None, sizes), default=1) // SHARE)


async def _fetch(rules: Rules, url: str) -> bytes:
    """Return the contents of the file at a URL in a line of a batch.

    All failures have the same message and take at least `EARLIEST_FAILURE_S`, so that clients cannot probe a network.

    Raises:
        NotFetched: the file could not be fetched.
    """
    since = time.monotonic()
    try:
        most = int(envs.VLLM_MAX_AUDIO_CLIP_FILESIZE_MB * MIB)
        return await Fetcher(rules, lambda size: None).async_get_bytes(
            url, max_bytes=most, allow_redirects=envs.VLLM_MEDIA_URL_ALLOW_REDIRECTS
        )
    except Exception as err:
        logger.warning("A file of a batch was not fetched: %r", err)
        await asyncio.sleep(max(0.0, EARLIEST_FAILURE_S - (time.monotonic() - since)))
        raise NotFetched("the URL of a file could not be fetched") from None


# -- files ------------------------------------------------------------------------------------------------------


@router.post("/v1/files")
async def create_file(raw_request: Request) -> dict[str, Any]:
    """Upload the input file of a batch, and return the file's object."""
    if not raw_request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise RequestError("file: must be sent as multipart/form-data", parameter="file")
    async with raw_request.form(max_files=1, max_fields=len(FILE_PARAMS)) as form:
        _refuse_unknown(form, ("file", "purpose"))
        file = form.get("file")
        if form.get("purpose") != INPUT:
            raise RequestError(f"purpose: must be '{INPUT}'", parameter="purpose")
        if not isinstance(file, UploadFile) or not file.size:
            raise RequestError("file: must be a file that is not empty", parameter="file")
        name = Path(file.filename or "").name[:255] or "batch.jsonl"
        record = await _blocking(partial(_store(raw_request).add_file, name, file.size, file.file))
    return record.as_object()


@router.get("/v1/files")
async def list_files(raw_request: Request) -> dict[str, Any]:
    """List files, by default the newest first."""
    params = raw_request.query_params
    _refuse_unknown(params, FILE_PARAMS)
    order, purpose = params.get("order", "desc"), params.get("purpose")
    if order not in ("asc", "desc"):
        raise RequestError("order: must be asc or desc", parameter="order")
    if purpose not in (None, INPUT, OUTPUT):
        raise RequestError(f"purpose: must be {INPUT} or {OUTPUT}", parameter="purpose")
    files = await _blocking(_store(raw_request).files)
    chosen = [file for file in files if purpose in (None, file.purpose)]
    limits = MOST_FILES_LISTED, MOST_FILES_LISTED
    page, more = _page("file", chosen, params, *limits, newest_first=order == "desc")
    return _list([file.as_object() for file in page], more)


@router.get("/v1/files/{file_id}")
async def retrieve_file(file_id: str, raw_request: Request) -> dict[str, Any]:
    """Return a file's object."""
    record = await _blocking(partial(_store(raw_request).file, file_id))
    return record.as_object()


class _OpenFile(FileResponse):
    """Response with the contents of an open file, which may be deleted before they are sent; closes the file."""

    def __init__(self, file: IO[bytes], name: str) -> None:
        number = file.fileno()
        super().__init__(
            f"/dev/fd/{number}", media_type="application/jsonl", filename=name, stat_result=os.fstat(number)
        )
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            await super().__call__(scope, receive, send)


@router.get("/v1/files/{file_id}/content", response_class=FileResponse)
async def file_content(file_id: str, raw_request: Request) -> FileResponse:
    """Return a file's contents."""
    record, file = await _blocking(partial(_store(raw_request).open, file_id))
    return _OpenFile(file, record.filename)


@router.delete("/v1/files/{file_id}")
async def delete_file(file_id: str, raw_request: Request) -> dict[str, Any]:
    """Delete a file."""
    await _blocking(partial(_store(raw_request).delete_file, file_id))
    return {"id": file_id, "object": "file", "deleted": True}


# -- batches ----------------------------------------------------------------------------------------------------


@router.post("/v1/batches")
async def create_batch(raw_request: Request) -> dict[str, Any]:
    """Create a batch whose requests are the lines of an uploaded file, and return the batch's object."""
    try:
        body = await raw_request.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise RequestError("body: must be a JSON object", parameter="body")
    _refuse_unknown(body, ("input_file_id", "endpoint", "completion_window", "metadata"))
    file_id, endpoint, window = body.get("input_file_id"), body.get("endpoint"), body.get("completion_window", "")
    if not isinstance(file_id, str) or not file_id.isascii():
        raise RequestError("input_file_id: must be the id of a file", parameter="input_file_id")
    if not isinstance(endpoint, str) or endpoint not in ROUTES:
        raise RequestError(f"endpoint: must be one of {', '.join(sorted(ROUTES))}", parameter="endpoint")
    hours, metadata = read_window(window), read_metadata(body.get("metadata"))
    store: Store = _store(raw_request)
    add = partial(store.add_batch, endpoint=endpoint, input_file_id=file_id, window=window, seconds=hours * 3600)
    batch = await _blocking(partial(add, metadata=metadata))
    _worker(raw_request).wake()
    return await _blocking(partial(store.as_object, batch))


@router.get("/v1/batches")
async def list_batches(raw_request: Request) -> dict[str, Any]:
    """List batches, the newest first."""
    _refuse_unknown(raw_request.query_params, BATCH_PARAMS)
    store = _store(raw_request)
    batches = await _blocking(store.batches)
    page, more = _page("batch", batches, raw_request.query_params, MOST_BATCHES_LISTED, 20)
    return _list(await _blocking(lambda: [store.as_object(batch) for batch in page]), more)


@router.get("/v1/batches/{batch_id}")
async def retrieve_batch(batch_id: str, raw_request: Request) -> dict[str, Any]:
    """Return a batch's object."""
    store = _store(raw_request)
    return await _blocking(lambda: store.as_object(store.batch(batch_id)))


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(batch_id: str, raw_request: Request) -> dict[str, Any]:
    """Cancel a batch; its answers so far stay."""
    store = _store(raw_request)
    batch = await _blocking(partial(store.batch, batch_id))
    if batch.ended:
        raise HTTPException(HTTPStatus.CONFLICT, f"{batch_id}: the batch has ended, its status is {batch.status}")
    await _blocking(partial(store.cancel, batch_id))
    _worker(raw_request).wake()
    return await _blocking(lambda: store.as_object(store.batch(batch_id)))


# -- parts of requests ------------------------------------------------------------------------------------------


def read_window(window: Any) -> int:
    """Return the hours of a `completion_window`. RequestError: it is not a number of hours such as "24h"."""
    if isinstance(window, str) and re.fullmatch(r"[1-9]\d{0,2}h", window) and int(window[:-1]) <= LONGEST_WINDOW_H:
        return int(window[:-1])
    message = f'completion_window: must be hours, from "1h" to "{LONGEST_WINDOW_H}h"'
    raise RequestError(message, parameter="completion_window")


def read_metadata(metadata: Any) -> dict[str, str] | None:
    """Return a request's `metadata`. RequestError: it is not an object of texts, or too large."""
    if metadata is None:
        return None
    if not isinstance(metadata, dict) or len(metadata) > MOST_PAIRS:
        raise RequestError(f"metadata: must be an object with {MOST_PAIRS} texts at most", parameter="metadata")
    for key, value in metadata.items():
        if not isinstance(value, str) or len(key) > LONGEST_KEY or len(value) > LONGEST_VALUE:
            limits = f"keys have {LONGEST_KEY} characters at most, and values are texts of {LONGEST_VALUE}"
            raise RequestError(f"metadata: {limits}", parameter="metadata")
        if HALF_CHARACTER.search(key + value):
            raise RequestError("metadata: has half of a surrogate pair", parameter="metadata")
    return metadata


def _refuse_unknown(given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in given:
        if name not in known:
            raise RequestError(f"{name}: is unknown; use {', '.join(known)}", parameter=name)


def _page(
    kind: str, items: list[Any], params: Mapping[str, str], most: int, usual: int, *, newest_first: bool = True
) -> tuple[list[Any], bool]:
    """Return (items of the page that the parameters `after` and `limit` select, whether further items follow).

    `after` may be the id of an object that was deleted: ids are in the order of creation.

    Args:
        kind: "file" or "batch", the beginning of the ids.
        items: all objects, the oldest first.
        most: largest allowed `limit`.
        usual: `limit` if the parameters have none.
    """
    limit, after = params.get("limit", str(usual)), params.get("after")
    if not limit.isdecimal() or not 1 <= int(limit) <= most:
        raise RequestError(f"limit: must be 1 to {most}", parameter="limit")
    if after is not None:
        if not is_id(after, kind):
            raise RequestError(f"after: must be the id of a {kind}", parameter="after")
        items = [item for item in items if (item.id < after if newest_first else item.id > after)]
    if newest_first:
        items = items[::-1]
    return items[: int(limit)], len(items) > int(limit)


def _list(data: list[dict[str, Any]], more: bool) -> dict[str, Any]:
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": more}


def _worker(raw_request: Request) -> Worker:
    worker: Worker = raw_request.app.state.omni_batches
    return worker


def _store(raw_request: Request) -> Store:
    return _worker(raw_request).store


async def _blocking(call: Callable[[], T]) -> T:
    """Call a function of `Store` in a thread, and convert its errors to HTTPExceptions."""
    try:
        return await asyncio.to_thread(call)
    except NotFound as err:
        raise HTTPException(HTTPStatus.NOT_FOUND, f"{err.args[0]:.100}: there is no such object") from None
    except InUse as err:
        raise HTTPException(HTTPStatus.CONFLICT, str(err)) from None
    except Full as err:
        status = HTTPStatus.TOO_MANY_REQUESTS if err.many else HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        raise HTTPException(status, str(err)) from None
