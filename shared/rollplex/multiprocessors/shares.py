"""Runs a process's work on a share of the GPU's multiprocessors.

Owns the parts that this process has made, each once. Knows no torch and no messages.

Work enters a part by its *context*, not by a stream of its own: the default stream of the current context is what
torch launches into, so that torch sees one stream throughout. With a second stream its allocator would keep a second
pool, and autograd would run a backward on the stream of its forward: on a few multiprocessors, long after there is
anybody to make room for. The price: everything is complete on the device before a share is entered and after it is
left, some 20 microseconds each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rollplex.multiprocessors.cut import Side, cut, grain
from rollplex.multiprocessors.green import GreenDriver, Part


class Multiprocessors:
    """The shares of one process.

    Args:
        driver: makes the driver, once it is needed. None: this process computes on its host, and shares mean nothing.
    """

    def __init__(self, driver: Callable[[], GreenDriver] | None) -> None:
        self._make = driver
        self._driver: GreenDriver | None = None
        self._parts: dict[tuple[int, Side], Part] = {}

    @contextmanager
    def on_share(self, share: float, side: Side) -> Iterator[None]:
        """Around work of this thread on torch's default stream: its kernels keep to a share of the multiprocessors.
        Within it, a backward does not: autograd's threads have their own current context.

        Args:
            share: above 0, at most 1; with 1 nothing is done at all.

        Raises:
            MultiprocessorError: the driver cannot set them apart.
            ConfigError: as `cut`.
        """
        if self._make is None or share == 1.0:
            yield
            return
        part = self.part(share, side)
        driver = self._required()
        driver.synchronize()  # what the work reads is there
        driver.enter(part)
        try:
            yield
            driver.synchronize()  # whoever reads what it wrote, on whatever stream, may
        finally:
            driver.leave()

    def part(self, share: float, side: Side) -> Part:
        """The part for a share below 1; made at its first use.

        Raises:
            As `on_share`.
        """
        driver = self._required()
        first = cut(driver.count, share, side, grain=grain(driver.major))
        if (first, side) not in self._parts:
            self._parts[first, side] = driver.part(first, side)
        return self._parts[first, side]

    def stream(self, share: float, side: Side) -> int:
        """A new stream that keeps to the share: a cudaStream_t. A CUDA graph captured on it does so wherever it is
        launched.

        Raises:
            As `on_share`.
        """
        return self._required().stream(self.part(share, side))

    def _required(self) -> GreenDriver:
        assert self._make is not None, "a host has no multiprocessors to share"
        if self._driver is None:
            self._driver = self._make()
        return self._driver
