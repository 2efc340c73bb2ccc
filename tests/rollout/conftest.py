"""A tiny random model over a host segment, prompts in an inputs segment, and stock transformers to compare with."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from rollplex.layout.parameters import parameter_table
from rollplex.layout.shape import read_shape
from rollplex.memory.digest import digest
from rollplex.memory.header import HeaderPage
from rollplex.memory.segment import Mapping, backend
from rollplex.memory.tensors import views
from rollplex.model.weights import fill
from rollplex.protocol.common import MediaSlot, ModelSpec, PromptSlot
from rollplex.protocol.rollout import Sampling
from rollplex_rollout.engine import FinishedGroup, Setup, Unit, UnitReport
from rollplex_rollout.transformers_engine import TransformersEngine

IMAGE, VIDEO, START, END, PAD, EOS = 190, 191, 192, 193, 194, 189
NEVER = (IMAGE, VIDEO, START, END, PAD)
VOCAB, TEXT = 195, 180
RUN_ID = "run-of-a-test"
Part = int | tuple[str, tuple[int, int, int]]

PROMPTS: tuple[tuple[Part, ...], ...] = (
    (7, ("image", (1, 4, 4)), 5),
    (23,),
    (3, ("image", (1, 4, 6)), 2, ("image", (1, 2, 4)), 4),
    (2, ("video", (2, 4, 4)), 6),
)


def model_config() -> Qwen2_5_VLConfig:
    return Qwen2_5_VLConfig(
        text_config={
            "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3,
            "num_key_value_heads": 1, "intermediate_size": 80, "max_position_embeddings": 1024,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
            "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": None, "tie_word_embeddings": False,
        },
        vision_config={
            "depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 48,
            "window_size": 56, "fullatt_block_indexes": [1], "tokens_per_second": 2,
        },
        image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END,
        tie_word_embeddings=False,
    )  # fmt: skip


@dataclass(frozen=True)
class Prompt:
    """One prompt as the input child would have made it; media: (token, (t, h, w), pixel rows)."""

    ids: Tensor
    kinds: Tensor
    media: list[tuple[int, tuple[int, int, int], Tensor]]
    positions: Tensor

    def of(self, token: int) -> dict[str, Tensor]:
        """transformers' arguments for images or videos."""
        mine = [(grid, rows) for kind, grid, rows in self.media if kind == token]
        if not mine:
            return {}
        grids, pixels = torch.tensor([grid for grid, _ in mine]), torch.cat([rows for _, rows in mine])
        if token == IMAGE:
            return {"pixel_values": pixels, "image_grid_thw": grids}
        return {"pixel_values_videos": pixels, "video_grid_thw": grids, "second_per_grid_ts": torch.ones(len(mine))}


def make_prompt(stock: Any, parts: Sequence[Part], seed: int) -> Prompt:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = []
    kinds: list[int] = []
    media = []
    for part in parts:
        if isinstance(part, int):
            ids += torch.randint(0, TEXT, (part,), generator=generator).tolist()
            kinds += [0] * part
            continue
        token, kind, grid = (IMAGE, 1, part[1]) if part[0] == "image" else (VIDEO, 2, part[1])
        patches = grid[0] * grid[1] * grid[2]
        ids += [START, *[token] * (patches // 4), END]
        kinds += [0, *[kind] * (patches // 4), 0]
        media.append((token, grid, torch.randn(patches, 1176, generator=generator)))
    draft = Prompt(torch.tensor(ids), torch.tensor(kinds), media, torch.empty(0))
    grids = {k: v for t in (IMAGE, VIDEO) for k, v in draft.of(t).items() if not k.startswith("pixel")}
    positions = stock.model.get_rope_index(draft.ids[None], mm_token_type_ids=draft.kinds[None], **grids)[0][:, 0]
    return Prompt(draft.ids, draft.kinds, media, positions)


class Pages:
    """An inputs segment: what was put in, and where."""

    def __init__(self) -> None:
        self.content = bytearray(64)

    def put(self, value: Tensor) -> int:
        offset = len(self.content)
        self.content.extend(value.contiguous().numpy().tobytes())
        self.content.extend(bytes(-len(self.content) % 64))
        return offset

    def slot(self, prompt: Prompt, group: int) -> PromptSlot:
        return PromptSlot(
            group=group,
            row=1000 + group,
            tokens=len(prompt.ids),
            ids_offset=self.put(prompt.ids),
            positions_offset=self.put(prompt.positions),
            next_position=int(prompt.positions.max()) + 1,
            media=tuple(
                MediaSlot(offset=self.put(rows), frames=grid[0], height=grid[1], width=grid[2])
                for _, grid, rows in prompt.media
            ),
        )


def host_segment(size_bytes: int, name: str) -> Mapping:
    """A new mapped segment of host memory."""
    host = backend("host")
    fd = host.create(size_bytes, name)
    try:
        return host.map(fd, size_bytes)
    finally:
        os.close(fd)


class Node:
    """Weights and inputs as segments, and what an engine or a service needs to use them."""

    RUN_ID, NEVER, VOCAB, TEXT, EOS = RUN_ID, NEVER, VOCAB, TEXT, EOS

    def __init__(self, folder: Path, stock: Any) -> None:
        self.folder, self.stock = folder, stock
        self.shape = read_shape(folder)
        self.table = parameter_table(self.shape, dtype="float32", freeze_vision=False)
        self.actor = host_segment(self.table.total_bytes, "actor")
        fill(self.table, views(self.actor, self.table), folder)
        self.header = HeaderPage(self.actor, run_id=RUN_ID, table_hash=self.table.hash)
        self.header.initialise(5, digest(self.actor, self.table))
        self.prompts = [make_prompt(stock, parts, seed) for seed, parts in enumerate(PROMPTS)]
        pages = Pages()
        self.slots = tuple(pages.slot(prompt, group) for group, prompt in enumerate(self.prompts))
        self.inputs = host_segment(len(pages.content), "inputs")
        self.inputs.write(0, bytes(pages.content))

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec(
            path=str(self.folder),
            dtype="float32",
            freeze_vision=False,
            table_hash=self.table.hash,
            never_sampled=NEVER,
        )

    @property
    def setup(self) -> Setup:
        return Setup(spec=self.spec, shape=self.shape, table=self.table, actor=self.actor)

    def sampling(self, **changes: Any) -> Sampling:
        values = {"seed": 3, "purpose": "train", "group_size": 3, "max_new_tokens": 8, "temperature": 1.0}
        return Sampling(**{**values, **changes})

    def unit(self, groups: Sequence[int] = (0, 1, 2, 3), *, step: int = 2, **changes: Any) -> Unit:
        prompts = tuple(self.slots[group] for group in groups)
        return Unit(step=step, prompts=prompts, sampling=self.sampling(**changes), inputs=self.inputs)

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
                **prompt.of(IMAGE),
                **prompt.of(VIDEO),
            )
        logits: Tensor = out.logits[0, len(prompt.ids) - 1 : -1]
        return logits


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
    torch.manual_seed(4)
    model: Any = Qwen2_5_VLForConditionalGeneration(model_config())
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.1)
    model.lm_head.weight.data.normal_(0, 0.3)
    for module in model.modules():
        if type(module).__name__ == "Qwen2_5_VLRMSNorm":
            module.weight.data.add_(1.0)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def stock(model_folder: Path) -> Any:
    return Qwen2_5_VLForConditionalGeneration.from_pretrained(model_folder, dtype=torch.float32).train(False)


@pytest.fixture(scope="session")
def shared_node(model_folder: Path, stock: Any) -> Node:
    """For tests that leave the weights alone."""
    return Node(model_folder, stock)


@pytest.fixture
def node(model_folder: Path, stock: Any) -> Node:
    """For tests that change weights or header."""
    return Node(model_folder, stock)


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
