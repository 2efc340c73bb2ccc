"""A tiny Qwen2.5-VL folder, prompts and responses for it, and trainer services over segments of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.segments import HostSegments
from support.tiny import Prompt, make_prompts, write_model
from support.trainer import LENGTHS, PROMPTS, Sampled, World, sampled


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied embeddings."""
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return folder


@pytest.fixture(scope="session")
def older_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2-VL, untied."""
    folder = tmp_path_factory.mktemp("older")
    write_model(folder, tied=False, older=True)
    return folder


@pytest.fixture
def make_segments() -> Iterator[Callable[[], HostSegments]]:
    made: list[HostSegments] = []

    def make() -> HostSegments:
        made.append(HostSegments())
        return made[-1]

    yield make
    for segments in made:
        segments.close()


@pytest.fixture(scope="session")
def prompts(model_folder: Path) -> list[Prompt]:
    """One image, text only, two images; of unequal length."""
    return make_prompts(model_folder, PROMPTS)


@pytest.fixture(scope="session")
def groups() -> list[Sampled]:
    return [sampled(number) for number in range(len(LENGTHS))]


@pytest.fixture
def make_world(
    model_folder: Path, prompts: list[Prompt], make_segments: Callable[[], HostSegments]
) -> Callable[..., World]:
    def make(dtype: str = "float32", folder: Path | None = None, **changes: Any) -> World:
        if folder is None:
            return World(model_folder, prompts, make_segments(), dtype, **changes)
        return World(folder, make_prompts(folder, PROMPTS), make_segments(), dtype, **changes)

    return make
