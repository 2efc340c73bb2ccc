"""A small workload for whole nodes on GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollplex.bench.lengths import parse_lengths
from rollplex.bench.workload import Wanted, write_workload


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four prompts of four responses, of a model that tensor parallelism of 2 and SGLang take."""
    wanted = Wanted(
        lengths=parse_lengths("8:24"), group_size=4, prompts=4, vision_tokens=16, preset="tiny-gpu", device="cuda"
    )
    return write_workload(tmp_path_factory.mktemp("w"), wanted).config
