"""A tiny random model over a host segment, prompts in an inputs segment, and stock transformers to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration

from rollplex.layout.parameters import parameter_table
from rollplex.layout.shape import read_shape
from rollplex.memory.digest import digest
from rollplex.memory.header import HeaderPage
from rollplex.memory.tensors import views
from rollplex.model.weights import fill
from rollplex.protocol.common import Kind, ModelSpec, PromptSlot
from rollplex.protocol.rollout import EngineSpec, Sampling
from rollplex_rollout.engine import FinishedGroup, Setup, Unit, UnitReport
from rollplex_rollout.loaded import LentWeights
from rollplex_rollout.transformers_engine import TransformersEngine
from support.segments import HostSegments
from support.tiny import FILM, NEVER_SAMPLED, PICTURE, PICTURES, WORDS, Prompt, make_prompts, write_model

VERSION = 5


class Node:
    """Weights and inputs as segments, and what an engine or a service needs to use them."""

    def __init__(self, folder: Path, stock: Any) -> None:
        self.folder, self.stock = folder, stock
        self.shape = read_shape(folder)
        self.table = parameter_table(self.shape, dtype="float32", freeze_vision=False)
        self.segments = HostSegments()
        self.actor_ref = self.segments.create(Kind.ACTOR_WEIGHTS, self.table.total_bytes)
        self.actor = self.segments.map_again(self.actor_ref)
        fill(self.table, views(self.actor, self.table), folder)
        self.header = HeaderPage(self.actor, run_id=self.segments.run_id, table_hash=self.table.hash)
        self.header.initialise(VERSION, digest(self.actor, self.table))
        self.prompts = make_prompts(folder, [PICTURE, WORDS, PICTURES, FILM])
        content = bytearray(64)

        def put(value: Tensor) -> int:
            offset = len(content)
            content.extend(value.contiguous().numpy().tobytes())
            content.extend(bytes(-len(content) % 64))
            return offset

        self.slots = tuple(_placed(prompt, put) for prompt in self.prompts)
        self.inputs_ref = self.segments.create(Kind.INPUTS, len(content))
        self.inputs = self.segments.map_again(self.inputs_ref)
        self.inputs.write(0, bytes(content))

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec(
            path=str(self.folder),
            dtype="float32",
            freeze_vision=False,
            table_hash=self.table.hash,
            never_sampled=NEVER_SAMPLED,
        )

    @property
    def setup(self) -> Setup:
        weights = LentWeights(self.segments, self.actor_ref)
        return Setup(
            spec=self.spec, shape=self.shape, table=self.table, weights=weights, engine=EngineSpec(), run_dir=None
        )

    def sampling(self, **changes: Any) -> Sampling:
        values = {"seed": 3, "purpose": "train", "group_size": 3, "max_new_tokens": 8, "temperature": 1.0}
        return Sampling(**{**values, **changes})

    def unit(self, groups: Sequence[int] = (0, 1, 2, 3), *, step: int = 2, **changes: Any) -> Unit:
        prompts = tuple(self.slots[group] for group in groups)
        return Unit(
            step=step,
            prompts=prompts,
            sampling=self.sampling(**changes),
            inputs=self.inputs,
            inputs_fd=self.segments.descriptor(self.inputs_ref),
        )

    def parameter(self, name: str) -> Tensor:
        """The stored tensor itself, as a trainer maps it."""
        return views(self.actor, self.table)[name]

    def full_logits(self, group: int, response: Sequence[int]) -> Tensor:
        """Logits [len(response), vocab] of one unsplit, unpadded forward of stock transformers."""
        prompt = self.prompts[group]
        tokens = torch.tensor(response)
        self.stock.model.rope_deltas = None
        with torch.no_grad():
            out = self.stock(
                input_ids=torch.cat([prompt.ids, tokens])[None],
                mm_token_type_ids=torch.cat([prompt.kinds, torch.zeros_like(tokens)])[None],
                use_cache=False,
                **prompt.media,
            )
        logits: Tensor = out.logits[0, len(prompt.ids) - 1 : -1]
        return logits


def _placed(prompt: Prompt, put: Callable[[Tensor], int]) -> PromptSlot:
    """The slot of a prompt that `put` has written."""
    start = 0 if prompt.pixels is None else put(prompt.pixels)
    media = tuple(replace(item, offset=item.offset + start) for item in prompt.slot.media)
    ids, positions = put(prompt.ids), put(prompt.positions)
    return replace(prompt.slot, ids_offset=ids, positions_offset=positions, media=media)


class Run:
    """What one unit gave, by group and sample."""

    def __init__(self, engine: TransformersEngine, unit: Unit) -> None:
        self.groups: list[FinishedGroup] = []
        self.report: UnitReport = engine.generate(unit, self.groups.append)
        self.by_group = {group.group: group for group in self.groups}

    def responses(self, group: int) -> list[list[int]]:
        finished = self.by_group[group]
        ends = np.cumsum(finished.lengths)[:-1]
        return [[int(token) for token in part] for part in np.split(finished.tokens, ends)]

    def logprobs(self, group: int) -> list[Any]:
        finished = self.by_group[group]
        return list(np.split(finished.logprobs, np.cumsum(finished.lengths)[:-1]))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, tied=False)
    return folder


@pytest.fixture(scope="session")
def stock(model_folder: Path) -> Any:
    return Qwen2_5_VLForConditionalGeneration.from_pretrained(model_folder, dtype=torch.float32).train(False)


@pytest.fixture(scope="session")
def shared_node(model_folder: Path, stock: Any) -> Iterator[Node]:
    """For tests that leave the weights alone."""
    made = Node(model_folder, stock)
    yield made
    made.segments.close()


@pytest.fixture
def node(model_folder: Path, stock: Any) -> Iterator[Node]:
    """For tests that change weights or header."""
    made = Node(model_folder, stock)
    yield made
    made.segments.close()


@pytest.fixture(scope="session")
def engine(shared_node: Node) -> Iterator[TransformersEngine]:
    made = TransformersEngine(shared_node.setup)
    yield made
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def generate(engine: TransformersEngine) -> Callable[[Unit], Run]:
    return lambda unit: Run(engine, unit)


@pytest.fixture
def run_with() -> Callable[[TransformersEngine, Unit], Run]:
    return Run
