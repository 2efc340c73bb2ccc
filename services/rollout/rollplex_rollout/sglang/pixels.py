"""The pixels of a unit's pictures, in SGLang's scheduler process.

Owns: this process's mapping of the inputs segment while a unit lasts, and making of it what the vision tower takes:
rows in the model's dtype, for a GPU in memory that it copies from by itself. Knows no SGLang: `tower` lends it to the
model.

    thread of the weights      open ─────────► the unit's segment is here
    a prompt arrives           expect ───────► a thread beside makes its rows, of AHEAD_BYTES at most before they are
                                               wanted, while the GPU works on the prompts before
    the tower's turn           take ◄───────── ready by then; else made at once (a prompt that lost its place)
    the scheduler rests        close: nobody looks at the segment any more

A prefill step takes its images before its videos, whichever came first: they are two queues.

Host memory, of each rank: AHEAD_BYTES of images and as much of videos, or one picture that has more; and what prefill
steps have taken that the GPU has not copied yet. For a GPU torch pins it, in blocks that it rounds up to a power of
two, and keeps what is freed; `scheduler.rest` has it given back.

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
"""Of rows of images, or of videos, that are made and not taken, unless one alone has more: two prefill steps of large
pictures."""
OPEN_DEADLINE_S: Final = 60.0
"""How much later than a request the segment may come: of several ranks each has it from another process."""


class Place(NamedTuple):
    """Where a picture or a video lies in the inputs segment."""

    offset: int
    """Of float32 [rows, row width]."""
    rows: int
    video: bool


class Pixels:
    """Of one scheduler process. `open` is called by another thread than the rest, and before it or soon after."""

    def __init__(self, *, row_width: int, dtype: torch.dtype, device: torch.device) -> None:
        """dtype: of the model, which would round to it anyway. device: of the model."""
        self._row_width = row_width
        self._dtype = dtype
        self._device = device
        self._mapping: Mapping | None = None
        self._closing = False
        self._changed = threading.Condition()
        """Of the two above."""
        self._thread: ThreadPoolExecutor | None = None
        self._expected: dict[bool, deque[Place]] = {False: deque(), True: deque()}
        """By whether they are videos."""
        self._made: dict[Place, Future[Tensor]] = {}

    def open(self, mapping: Mapping) -> None:
        """From here on the pictures lie in `mapping`, which is closed here.

        Raises:
            StateError: another unit's is open.
        """
        with self._changed:
            if self._mapping is not None:
                mapping.close()
                raise StateError("A unit's inputs came while another's are in use", needed="the scheduler at rest")
            self._mapping = mapping
            self._changed.notify_all()

    def expect(self, place: Place) -> None:
        """The tower will want these rows, after all of their kind that were expected before."""
        expected = self._expected[place.video]
        expected.append(place)
        self._make_ahead(expected)

    def take(self, place: Place) -> Tensor:
        """The rows on the model's device, of the model's dtype. What was expected before them, of their kind, is
        not wanted any more: SGLang found it encoded.

        Raises:
            WaitError: the segment has not come.
            SegmentError: they do not lie in it.
        """
        ready = None
        expected = self._expected[place.video]
        if place in expected:
            while (first := expected.popleft()) != place:
                self._forget(first)
            ready = self._made.pop(place, None)
        rows = self._rows(place) if ready is None else ready.result()  # which has the deadline of `_rows`
        self._make_ahead(expected)
        return rows.to(self._device, non_blocking=True)

    def close(self) -> None:
        """The unit is over: its segment is unmapped. Nothing happens where there is none.

        Raises:
            SegmentError: something looks at it; it stays mapped.
        """
        for expected in self._expected.values():
            expected.clear()
        self._made.clear()
        if self._thread is not None:
            self._end_thread(self._thread)
            self._thread = None
        with self._changed:
            if self._mapping is not None:
                self._mapping.close()
                self._mapping = None

    def _end_thread(self, thread: ThreadPoolExecutor) -> None:
        """Waits for the rows that it makes, not for a segment that has not come."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        thread.shutdown(cancel_futures=True)
        self._closing = False

    def _make_ahead(self, expected: deque[Place]) -> None:
        """Have the next ones of a kind made, as many as may lie there."""
        total = 0
        for place in expected:
            total += place.rows * self._row_width * self._dtype.itemsize
            if total > AHEAD_BYTES and place is not expected[0]:
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
        shape = (place.rows, self._row_width)
        stored = tensor(self._opened(), place.offset, shape, torch.float32)
        rows = torch.empty(shape, dtype=self._dtype, device="cpu", pin_memory=self._device.type == "cuda")
        return rows.copy_(stored)

    def _opened(self) -> Mapping:
        """The segment, when it has come."""
        with self._changed:
            self._changed.wait_for(lambda: self._mapping is not None or self._closing, OPEN_DEADLINE_S)
            if self._mapping is not None:
                return self._mapping
            if self._closing:
                raise StateError("Rows are made of a unit that is over", needed="its inputs before its end")
        raise WaitError("A unit's inputs have not come", got=f"nothing within {OPEN_DEADLINE_S:.0f} s")
