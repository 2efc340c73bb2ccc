"""Two tiny model folders, prompts, and prefix services over segments of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollplex.protocol.common import Responses
from support.prefix import World
from support.tiny import FILM, PICTURE, PICTURES, WORDS, Prompt, make_prompts, write_model

LENGTHS = ((4, 1, 6), (2, 5, 3), (6, 6, 1), (1, 1, 1))


@pytest.fixture(autouse=True, scope="module")
def _as_before() -> Iterator[None]:
    """A service sets torch up for its process (`rollplex.model.setup`); other modules' tests get it back."""
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The actor's, with tied embeddings, and one with other weights."""
    folder = tmp_path_factory.mktemp("models")
    for name, seed in (("actor", 3), ("reference", 4)):
        write_model(folder / name, seed=seed)
    return folder / "actor", folder / "reference"


@pytest.fixture(scope="session")
def prompts(folders: tuple[Path, Path]) -> list[Prompt]:
    """An image, text only, two images, a video; of unequal length."""
    return make_prompts(folders[0], (PICTURE, WORDS, PICTURES, FILM))


@pytest.fixture
def make_world(folders: tuple[Path, Path], prompts: list[Prompt]) -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(**changes: Any) -> World:
        made.append(World(*folders, prompts, **changes))
        return made[-1]

    yield make
    for world in made:
        world.segments.close()


@pytest.fixture(scope="session")
def responses() -> list[Responses]:
    """Three per group, of unequal length (group 3: one token each)."""
    made = []
    for group, lengths in enumerate(LENGTHS):
        tokens = np.random.Generator(np.random.Philox(group)).integers(0, 64, sum(lengths))
        made.append(Responses(group=group, lengths=lengths, tokens=tokens.astype("<i4").tobytes()))
    return made
