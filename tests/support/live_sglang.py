"""Real SGLang over a segment that the test owns: on the CPU over host memory, or on a GPU."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from rollplex.layout.parameters import parameter_table
from rollplex.layout.shape import media_ids, read_shape
from rollplex.memory.digest import digest
from rollplex.memory.header import HeaderPage
from rollplex.memory.tensors import tensor, views
from rollplex.model.batch import prompt_batch
from rollplex.model.build import build
from rollplex.model.device import torch_device
from rollplex.model.prefix import prefix_forward
from rollplex.model.suffix import suffix_forward
from rollplex.model.weights import fill
from rollplex.presets import write_preset
from rollplex.protocol.common import Kind, MediaSlot, Memory, ModelSpec, PromptSlot
from rollplex.protocol.rollout import EngineSpec, Sampling
from rollplex_rollout.engine import FinishedGroup, Setup, Unit
from rollplex_rollout.loaded import LentWeights
from support.segments import HostSegments

KERNELS = Path(__file__).parent / "cpu_kernels"
VERSION = 7
KV_TOKENS = 4096
CONTEXT = 512


def unavailable() -> str:
    """Why real SGLang cannot run here on the CPU; empty if it can."""
    if tuple(sys.version_info) < (3, 12):
        return "SGLang's kernels are built for Python 3.12"
    missing = [name for name in ("sglang", "torchvision", "triton", "uvloop") if not importlib.util.find_spec(name)]
    return f"{', '.join(missing)} not installed" if missing else ""


@contextlib.contextmanager
def kernels(device: Memory) -> Iterator[None]:
    """Stand-ins for SGLang's kernels, where there is no GPU: its processes get this path, too. SGLang decides once per
    process what it computes on, so that tests with and without a GPU need a run of pytest each."""
    before = list(sys.path)
    if device is Memory.HOST:
        sys.path.insert(0, str(KERNELS))
    yield
    sys.path[:] = before


def processes(name: str = "sglang::") -> list[int]:
    """Of SGLang, below this one."""
    import psutil  # type: ignore[import-untyped]

    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # or a zombie, which has no command line
            if name in " ".join(child.cmdline()):
                found.append(child.pid)
    return found


def listening(pids: Sequence[int]) -> set[str]:
    """Addresses at which processes wait for TCP connections."""
    import psutil

    return {
        place.laddr.ip
        for pid in pids
        for place in psutil.Process(pid).net_connections(kind="inet")
        if place.status == psutil.CONN_LISTEN
    }


class LiveNode:
    """Weights and prompts as segments, and the engine's setup."""

    def __init__(self, folder: Path, run_dir: Path, dtype: str, device: Memory = Memory.HOST) -> None:
        write_preset("tiny-gpu", folder, seed=5)
        self.folder, self.run_dir, self.dtype, self.device = folder, run_dir, dtype, device
        self.shape = read_shape(folder)
        self.table = parameter_table(self.shape, dtype=dtype, freeze_vision=False)
        self.segments = HostSegments(device)
        self.ref = self.segments.create(Kind.ACTOR_WEIGHTS, self.table.total_bytes)
        self.actor = self.segments.map_again(self.ref)
        self.actor.clear()
        fill(self.table, views(self.actor, self.table), folder)
        self.header = HeaderPage(self.actor, run_id=self.segments.run_id, table_hash=self.table.hash)
        self.header.initialise(VERSION, digest(self.actor, self.table))
        self.never_sampled = (*media_ids(self.shape), 77)
        self._content = bytearray(64)
        self._rope: Any = _rope_index(folder)
        self.slots = tuple(self._prompt(number, *written) for number, written in enumerate(self._written()))
        self.inputs_ref = self.segments.create(Kind.INPUTS, len(self._content))
        self.inputs = self.segments.map_again(self.inputs_ref)
        self.inputs.write(0, bytes(self._content))
        self.model = build(folder, self.table, views(self.actor, self.table), gradients=None, freeze_vision=False)

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec(
            path=str(self.folder),
            dtype=self.dtype,
            freeze_vision=False,
            table_hash=self.table.hash,
            never_sampled=self.never_sampled,
            device=self.device,
        )

    @property
    def engine_spec(self) -> EngineSpec:
        return EngineSpec(
            name="sglang",
            kv_tokens=KV_TOKENS,
            max_running=16,
            context_tokens=CONTEXT,
            prefill_tokens=1024,
            seed=11,
        )

    @property
    def setup(self) -> Setup:
        return Setup(
            spec=self.spec,
            shape=self.shape,
            table=self.table,
            weights=LentWeights(self.segments, self.ref),
            engine=self.engine_spec,
            run_dir=self.run_dir,
        )

    def unit(self, groups: Sequence[int], **changes: Any) -> Unit:
        values = {"seed": 3, "purpose": "train", "group_size": 4, "max_new_tokens": 24, "temperature": 1.0}
        sampling = Sampling(**{**values, **changes})
        return Unit(
            step=2,
            prompts=tuple(self.slots[g] for g in groups),
            sampling=sampling,
            inputs=self.inputs,
            inputs_fd=self.segments.descriptor(self.inputs_ref),
        )

    def parameter(self, name: str) -> Tensor:
        """The stored tensor itself, as a trainer maps it."""
        return views(self.actor, self.table)[name]

    def trainer_logprobs(self, finished: FinishedGroup, temperature: float = 1.0) -> Any:
        """What the trainer's split computation gives for a group, float64 [sum of lengths]."""
        batch = prompt_batch(
            lambda offset, shape, dtype: tensor(self.inputs, offset, shape, dtype),
            [self.slots[finished.group]],
            self.shape.row_width,
            device=torch_device(self.device),
        )
        lengths = torch.tensor(finished.lengths)
        parts = [
            torch.from_numpy(part.astype(np.int64))
            for part in np.split(finished.tokens, np.cumsum(finished.lengths)[:-1])
        ]
        tokens = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
        with torch.no_grad():
            state = prefix_forward(self.model, batch, grad=False)
            there = torch_device(self.device)
            out = suffix_forward(
                self.model,
                state,
                tokens.to(there),
                lengths.to(there),
                temperature=temperature,
                never_sampled=self.never_sampled,
            )
        return out.logprobs[out.mask].double().cpu().numpy()

    def _written(self) -> list[tuple[list[int], list[tuple[int, int, int]], int]]:
        """Ids, grids of media, and the placeholder of each prompt: words; one image that is not square; two images; a
        video; a longer text."""
        shape = self.shape
        start, end = shape.vision_start_id, shape.vision_end_id

        def marks(mark: int, grid: tuple[int, int, int]) -> list[int]:
            return [start, *[mark] * (grid[0] * grid[1] * grid[2] // 4), end]

        wide, small, tall, film = (1, 4, 10), (1, 4, 4), (1, 8, 4), (2, 4, 6)
        return [
            ([11, 12, 13, 40], [], 0),
            ([3, *marks(shape.image_id, wide), 9, 10], [wide], shape.image_id),
            ([5, *marks(shape.image_id, small), 8, *marks(shape.image_id, tall), 1, 30], [small, tall], shape.image_id),
            ([*marks(shape.video_id, film), 2, 7, 40], [film], shape.video_id),
            ([int(token) for token in np.arange(60) % 250 + 1], [], 0),
        ]

    def _prompt(self, number: int, tokens: list[int], grids: list[tuple[int, int, int]], mark: int) -> PromptSlot:
        ids = torch.tensor(tokens)
        kinds = (ids == self.shape.image_id).int() + 2 * (ids == self.shape.video_id).int()
        places: dict[str, Any] = {}
        if mark == self.shape.image_id:
            places = {"image_grid_thw": torch.tensor(grids)}
        elif grids:
            places = {"video_grid_thw": torch.tensor(grids), "second_per_grid_ts": torch.ones(len(grids))}
        positions = self._rope(ids[None], mm_token_type_ids=kinds[None], **places)[0][:, 0]
        draw = torch.Generator().manual_seed(number)
        media = tuple(
            MediaSlot(
                offset=self._put(torch.randn(t * h * w, self.shape.row_width, generator=draw)),
                frames=t,
                height=h,
                width=w,
            )
            for t, h, w in grids
        )
        return PromptSlot(
            group=number,
            row=100 + number,
            tokens=len(tokens),
            ids_offset=self._put(ids),
            positions_offset=self._put(positions),
            next_position=int(positions.max()) + 1,
            media=media,
        )

    def _put(self, value: Tensor) -> int:
        offset = len(self._content)
        self._content.extend(value.contiguous().numpy().tobytes())
        self._content.extend(bytes(-len(self._content) % 64))
        return offset


def _rope_index(folder: Path) -> Any:
    with torch.device("meta"):
        made: Any = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder))  # type: ignore[no-untyped-call]
    return made.model.get_rope_index
