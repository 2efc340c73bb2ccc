"""The GPUs of a machine, for tests of several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from rollplex.errors import RollplexError
from rollplex.nvml import Gpu, open_gpu


@contextmanager
def gpus(count: int) -> Iterator[list[Gpu]]:
    """The first `count`, seen from outside. Skips the test where there are fewer."""
    with ExitStack() as stack:
        found = []
        for number in range(count):
            try:
                gpu = open_gpu(number)
            except RollplexError as error:
                pytest.skip(f"needs {count} GPUs: {error}")
            stack.callback(gpu.close)
            found.append(gpu)
        yield found
