"""The pixels of a unit's pictures, in SGLang's scheduler process.

Owns: this process's mapping of the inputs segment while a unit lasts, and making of it what the vision tower takes:
rows in the model's dtype, for a GPU in memory that it copies from by itself. Knows no SGLang: `tower` lends it to the
model.

    thread of the weights      open ─────────► the unit's segment is here
    a prompt arrives           expect ───────► a thread beside makes its rows, of AHEAD_BYTES at most before they are
                                               wanted, while the GPU works on the prompts before
    the tower's turn           take ◄───────── ready by then; else made at once (a prompt that lost its place)
    the scheduler rests        close: nobody looks at the segment any more

Pixels would else travel through SGLang's messages: each hop copies tens of megabytes of every prompt, in the thread
that also starts the GPU's work.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, NamedTuple

import torch
from torch import Tensor

from rollplex.errors import StateError, WaitError
from rollplex.memory.segment import Mapping
from rollplex.memory.tensors import tensor

AHEAD_BYTES: Final = 256 * 2**20
"""Of rows that are made and not taken, unless one picture alone has more: two prefill steps of large pictures."""
OPEN_DEADLINE_S: Final = 60.0
"""How much later than a request the segment may come: of several ranks each has it from another process."""


class Place(NamedTuple):
    """Where a picture or a video lies in the inputs segment."""

    offset: int
    """Of float32 [rows, row width]."""
    rows: int


class Pixels:
    """Of one scheduler process. `open` is called by another thread than the rest, and before it or soon after."""

    def __init__(self, *, row_width: int, dtype: torch.dtype, device: torch.device) -> None:
        """dtype: of the model, which would round to it anyway. device: of the model."""
        self._row_width = row_width
        self._dtype = dtype
        self._device = device
        self._mapping: Mapping | None = None
        self._opened = threading.Event()
        self._thread: ThreadPoolExecutor | None = None
        self._expected: deque[Place] = deque()
        self._made: dict[Place, Future[Tensor]] = {}

    def open(self, mapping: Mapping) -> None:
        """From here on the pictures lie in `mapping`, which is closed here.

        Raises:
            StateError: another unit's is open.
        """
        if self._opened.is_set():
            mapping.close()
            raise StateError("A unit's inputs came while those of another are in use", needed="the scheduler at rest")
        self._mapping = mapping
        self._opened.set()

    def expect(self, place: Place) -> None:
        """The tower will want these rows, after all that were expected before."""
        self._expected.append(place)
        self._make_ahead()

    def take(self, place: Place) -> Tensor:
        """The rows on the model's device, of the model's dtype. What was expected before them is not wanted any more.

        Raises:
            WaitError: the segment has not come.
            SegmentError: they do not lie in it.
        """
        ready = None
        if place in self._expected:
            while (first := self._expected.popleft()) != place:
                self._forget(first)
            ready = self._made.pop(place, None)
        rows = self._rows(place) if ready is None else ready.result()  # which has the deadline of `_rows`
        self._make_ahead()
        return rows.to(self._device, non_blocking=True)

    def close(self) -> None:
        """The unit is over: its segment is unmapped. Nothing happens where there is none.

        Raises:
            SegmentError: something looks at it; it stays mapped.
        """
        self._expected.clear()
        self._made.clear()
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)  # waits for the rows that it makes
            self._thread = None
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None
            self._opened.clear()

    def _make_ahead(self) -> None:
        """Have the next ones made, as many as may lie there."""
        total = 0
        for place in self._expected:
            total += place.rows * self._row_width * self._dtype.itemsize
            if total > AHEAD_BYTES and place is not self._expected[0]:
                return
            if place not in self._made:
                self._thread = self._thread or ThreadPoolExecutor(1, "rollplex-pixels", self._enter)
                self._made[place] = self._thread.submit(self._rows, place)

    def _forget(self, place: Place) -> None:
        made = self._made.pop(place, None)
        if made is not None:
            made.cancel()

    def _enter(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def _rows(self, place: Place) -> Tensor:
        """On the host, not the segment's own."""
        if not self._opened.wait(OPEN_DEADLINE_S):
            raise WaitError("A unit's inputs have not come", got=f"nothing within {OPEN_DEADLINE_S:.0f} s")
        assert self._mapping is not None
        shape = (place.rows, self._row_width)
        stored = tensor(self._mapping, place.offset, shape, torch.float32)
        rows = torch.empty(shape, dtype=self._dtype, device="cpu", pin_memory=self._device.type == "cuda")
        return rows.copy_(stored)
