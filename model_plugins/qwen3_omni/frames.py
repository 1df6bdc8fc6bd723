"""Completes the talker's frames after sampling: one function computes whole frames from hidden states and first codes.

A frame has one code per code group. The talker samples the first code; the code predictor computes the others.

The function works in buffers that are allocated once, for the largest number of running requests. With a recorder, it
is recorded as a CUDA graph for each bucket (batch size) when the engine starts. A frame then takes few launches: copies
of the row numbers, hidden states and noise to the device, the graph, and the copy of the frames back. Without a
recorder, the same function is called with the actual number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from vllm.logger import init_logger

from vllm_omni_ext.engine.graphs import Recorder, bucket_of, buckets
from vllm_omni_ext.model_plugins.qwen3_omni.code_predictor import TOP_P, Choice, CodePredictor, Draw, draw_noise

logger = init_logger(__name__)

NUMBERS = 3
"""Number of integers per row: index of its hidden state, its first code, and whether its sampling is greedy."""


class FrameMaker:
    """Completes frames of the talker with the code predictor.

    Args:
        codec_table: embeddings of the first codes, [codes, hidden], complete on every rank.
        rows: largest number of requests per call.
        recorder: records graphs in `warm_up`; None: the function is called without graphs.
    """

    def __init__(
        self, predictor: CodePredictor, codec_table: Tensor, *, rows: int, recorder: Recorder | None = None
    ) -> None:
        self._predictor, self._table, self._recorder = predictor, codec_table, recorder
        self._sizes = buckets(rows)
        most, device, hidden = self._sizes[0], codec_table.device, codec_table.shape[1]
        like = predictor.loop.like
        self._host = torch.zeros(NUMBERS * most, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._written = self._host.numpy()
        self._numbers = self._host if device.type == "cpu" else torch.zeros_like(self._host, device=device)
        self._hidden = torch.zeros((most, hidden), dtype=like.dtype, device=device)
        self._spoken = torch.zeros_like(self._hidden)
        self._noise = torch.zeros((most, predictor.groups - 1), device=device)
        self._nucleus = torch.full((most, 1), TOP_P, device=device)
        self._frames = torch.zeros((most, predictor.groups), dtype=torch.int64, device=device)
        self._replays: dict[int, Callable[[], None]] = {}

    @property
    def recorded(self) -> list[int]:
        """Batch sizes for which there is a graph, largest first."""
        return list(self._replays)

    @torch.inference_mode()
    def try_out(self) -> None:
        """Compute dummy frames in the largest batch, which allocates all memory of the function."""
        self._frame(self._sizes[0], self._choice(self._sizes[0], greedy=True, sampling=True, recorded=True))

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Record a graph for every bucket; without a recorder, compute one frame. No random number is drawn."""
        if self._recorder is None:
            self._frame(1, self._choice(1, greedy=False, sampling=True))
            return
        for size in self._sizes:

            def body(size: int = size) -> None:
                self._frame(size, self._choice(size, greedy=True, sampling=True, recorded=True))

            try:
                self._replays[size] = self._recorder.record(body)
            except RuntimeError as error:
                logger.warning("talker: no CUDA graph for frames of %d requests, which will be slower: %s", size, error)

    @torch.inference_mode()
    def make(self, hidden: Tensor, live: Sequence[int], first: Sequence[int], draws: Sequence[Draw]) -> Tensor:
        """Return frames int32 [n, groups] on the host, one for each of the n >= 1 rows in `live`.

        Args:
            hidden: hidden states from which the first codes were sampled, [requests, hidden].
            live: indices of the rows of `hidden` that have a frame.
            first: first codes of these rows.
            draws: sampling parameters of the other codes of these rows.
        """
        count = len(live)
        if count > self._sizes[0]:
            raise ValueError(f"{count} frames at once; there is room for {self._sizes[0]}")
        size = bucket_of(count, self._replays)
        replay = None if size is None else self._replays[size]
        rows = count if size is None else size
        self._send(rows, live, first, draws)
        torch.index_select(hidden, 0, self._numbers[:rows], out=self._hidden[:rows])
        draw_noise(draws, self._noise)
        if replay is not None:
            replay()
        else:
            greedy = [draw.greedy for draw in draws]
            self._frame(rows, self._choice(rows, greedy=any(greedy), sampling=not all(greedy)))
        return self._frames[:count].cpu().to(torch.int32)

    def _send(self, rows: int, live: Sequence[int], first: Sequence[int], draws: Sequence[Draw]) -> None:
        """Copy the `NUMBERS` integers of each row to the device; padding rows have hidden state 0 and code 0.

        Args:
            rows: number of rows of the batch, with padding.
            live, first, draws: see `make`.
        """
        count, numbers = len(live), self._written[: NUMBERS * rows].reshape(NUMBERS, rows)
        numbers[:, :count] = np.array((live, first, [draw.greedy for draw in draws]))
        numbers[:, count:] = 0
        if self._numbers is not self._host:  # `make` has waited for the last frame: no copy reads the host memory
            self._numbers[: NUMBERS * rows].copy_(self._host[: NUMBERS * rows], non_blocking=True)

    def _choice(self, rows: int, *, greedy: bool, sampling: bool, recorded: bool = False) -> Choice:
        """Return the object that samples the codes of the first `rows` rows.

        Args:
            greedy: some of the rows may be greedy.
            sampling: some of the rows may not be greedy.
            recorded: the function is recorded as a graph.
        """
        if not sampling:
            return Choice(None, None, None)
        mask = self._numbers[2 * rows : 3 * rows].bool() if greedy else None
        return Choice(self._noise[:rows], mask, self._nucleus[:rows], recorded)

    def _frame(self, rows: int, choice: Choice) -> None:
        """Compute frames from the buffers that `make` has filled, into `_frames`; a graph records this function."""
        first = self._numbers[rows : 2 * rows]
        torch.index_select(self._table, 0, first, out=self._spoken[:rows])
        codes = self._predictor.loop.run(self._hidden[:rows], self._spoken[:rows], choice.choose)
        torch.stack((first, *codes), dim=1, out=self._frames[:rows])
