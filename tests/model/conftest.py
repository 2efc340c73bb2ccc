"""Tiny random models, prompts with images and videos, and an independent reference: stock transformers, unsplit.

Everything is reached through the `kit` fixture, because test modules cannot import each other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as stock
from transformers.models.qwen2_vl import modeling_qwen2_vl as older

from rollplex.layout.parameters import ParameterTable, gradient_table, parameter_table
from rollplex.layout.shape import ModelShape, read_shape
from rollplex.model import build, weights
from rollplex.model.batch import PromptBatch, prompt_batch
from rollplex.model.prefix import PrefixState
from rollplex.protocol.common import MediaSlot, PromptSlot

IMAGE, VIDEO, START, END, PAD, EOS = 430, 431, 432, 433, 434, 429
NEVER = (IMAGE, VIDEO, START, END, PAD)
VOCAB = 435
"""Not a multiple of 64, so that the stored vocabulary is padded."""
TEXT = 420
"""Ordinary ids are below this."""

# name: (hidden, layers, heads, kv heads, intermediate, mrope section, vision hidden, vision heads, vision intermediate)
MODELS = {
    "tiny": (64, 2, 2, 1, 128, [4, 6, 6], 64, 2, 128),
    "gpu": (256, 2, 4, 2, 320, [8, 12, 12], 64, 2, 252),
    "deep": (48, 4, 3, 3, 80, [2, 3, 3], 32, 4, 60),
    "qwen2": (64, 2, 2, 1, 128, [4, 6, 6], 48, 3, 96),
    "wide": (64, 2, 8, 4, 160, [1, 1, 2], 64, 4, 60),
    "qwen2-wide": (64, 2, 8, 4, 160, [1, 1, 2], 64, 4, 128),
}
"""qwen2 and qwen2-wide are Qwen2-VLs."""
OLDER = {"qwen2", "qwen2-wide"}


def model_class(name: str) -> Any:
    return Qwen2VLForConditionalGeneration if name in OLDER else Qwen2_5_VLForConditionalGeneration


def model_config(name: str, *, tied: bool) -> Any:
    hidden, layers, heads, kv, wide, section, v_hidden, v_heads, v_wide = MODELS[name]
    vision: dict[str, Any] = {
        "depth": 2, "hidden_size": v_hidden, "num_heads": v_heads, "intermediate_size": v_wide,
        "out_hidden_size": hidden, "window_size": 56, "fullatt_block_indexes": [1], "tokens_per_second": 2,
    }  # fmt: skip
    if name in OLDER:
        ratio = v_wide // v_hidden
        vision = {"depth": 2, "embed_dim": v_hidden, "hidden_size": hidden, "num_heads": v_heads, "mlp_ratio": ratio}
    make: Any = Qwen2VLConfig if name in OLDER else Qwen2_5_VLConfig
    return make(
        text_config={
            "vocab_size": VOCAB, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv, "intermediate_size": wide, "max_position_embeddings": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": section},
            "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": None, "tie_word_embeddings": tied,
        },
        vision_config=vision,
        image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END,
        tie_word_embeddings=tied,
    )  # fmt: skip


@dataclass
class Sample:
    """One prompt. media: (token id, (t, h, w), seconds per grid step) in order."""

    ids: Tensor
    kinds: Tensor
    media: list[tuple[int, tuple[int, int, int], float]]
    pixels: list[Tensor]
    positions: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def next_position(self) -> int:
        return int(self.positions.max()) + 1

    def of(self, token: int) -> dict[str, Any]:
        """transformers' arguments for images or videos."""
        mine = [n for n, m in enumerate(self.media) if m[0] == token]
        if not mine:
            return {}
        pixels = torch.cat([self.pixels[n] for n in mine])
        grids = torch.tensor([self.media[n][1] for n in mine])
        if token == IMAGE:
            return {"pixel_values": pixels, "image_grid_thw": grids}
        seconds = torch.tensor([self.media[n][2] for n in mine])
        return {"pixel_values_videos": pixels, "video_grid_thw": grids, "second_per_grid_ts": seconds}


@dataclass
class Store:
    """A model over stored views, with gradients."""

    table: ParameterTable
    views: dict[str, Tensor]
    gradients: dict[str, Tensor]
    model: Any
    shape: ModelShape
    folder: Path

    def grads(self) -> dict[str, Tensor]:
        return {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}

    def zero(self) -> None:
        for grad in self.gradients.values():
            grad.zero_()


class Kit:
    """What the tests of this folder share."""

    NEVER = NEVER
    IMAGE, VIDEO, START, END, PAD, EOS = IMAGE, VIDEO, START, END, PAD, EOS
    VOCAB = VOCAB
    TEXT = TEXT

    def __init__(self, folder_of: Callable[[str, bool], Path]) -> None:
        self.folder = folder_of
        self._stores: dict[Any, Store] = {}

    def shared_store(
        self, name: str = "tiny", *, tied: bool = False, frozen: bool = False, dtype: str = "float32"
    ) -> Store:
        """One store for all tests that change no weight; its gradients are zeroed."""
        key = (name, tied, frozen, dtype)
        if key not in self._stores:
            self._stores[key] = self.store(name, tied=tied, frozen=frozen, dtype=dtype)
        self._stores[key].zero()
        return self._stores[key]

    def store(self, name: str = "tiny", *, tied: bool = False, frozen: bool = False, dtype: str = "float32") -> Store:
        folder = self.folder(name, tied)
        shape = read_shape(folder)
        table = parameter_table(shape, dtype=dtype, freeze_vision=frozen)
        torch_dtype = getattr(torch, dtype)
        views = {e.name: torch.empty(e.shape, dtype=torch_dtype) for e in table.entries}
        weights.fill(table, views, folder)
        arena = {e.name: torch.zeros(e.shape, dtype=torch_dtype) for e in gradient_table(table).entries}
        model = build.build(folder, table, views, gradients=arena, freeze_vision=frozen)
        return Store(table=table, views=views, gradients=arena, model=model, shape=shape, folder=folder)

    def stock(self, name: str = "tiny", *, tied: bool = False, frozen: bool = False, dtype: str = "float32") -> Any:
        """transformers' own model of the same folder."""
        model: Any = model_class(name).from_pretrained(
            self.folder(name, tied), dtype=getattr(torch, dtype), attn_implementation="sdpa"
        )
        for parameter in model.model.visual.parameters():
            parameter.requires_grad_(not frozen)
        return model.train(False)

    def sample(self, parts: Sequence[Any], seed: int, name: str = "tiny") -> Sample:
        """parts: a number of text tokens, ("image", (1, h, w)) or ("video", (t, h, w), seconds). For the model `name`:
        the two architectures place videos differently."""
        generator = torch.Generator().manual_seed(seed)
        ids: list[int] = []
        kinds: list[int] = []
        media: list[tuple[int, tuple[int, int, int], float]] = []
        for part in parts:
            if isinstance(part, int):
                ids += torch.randint(0, TEXT, (part,), generator=generator).tolist()
                kinds += [0] * part
                continue
            kind, grid = (1, part[1]) if part[0] == "image" else (2, part[1])
            count = grid[0] * grid[1] * grid[2] // 4
            token = IMAGE if kind == 1 else VIDEO
            ids += [START, *[token] * count, END]
            kinds += [0, *[kind] * count, 0]
            media.append((token, grid, part[2] if kind == 2 else 1.0))
        pixels = [torch.randn(g[0] * g[1] * g[2], 1176, generator=generator) for _, g, _ in media]
        sample = Sample(torch.tensor(ids), torch.tensor(kinds), media, pixels)
        sample.positions = self._positions(sample, name)
        return sample

    def _positions(self, sample: Sample, name: str) -> Tensor:
        """transformers' own mrope positions, as the input child would write them."""
        kind: Any = older.Qwen2VLModel if name in OLDER else stock.Qwen2_5_VLModel
        model: Any = kind.__new__(kind)
        torch.nn.Module.__init__(model)
        model.config = model_config(name, tied=False)
        grids = {k: v for t in (IMAGE, VIDEO) for k, v in sample.of(t).items() if not k.startswith("pixel")}
        positions: Tensor = model.get_rope_index(sample.ids[None], mm_token_type_ids=sample.kinds[None], **grids)[0]
        return positions[:, 0]

    def batch(self, samples: Sequence[Sample], copies: int = 1) -> PromptBatch:
        """The samples written into a made-up inputs segment and read back."""
        arena = bytearray(64)
        slots = []

        def put(tensor: Tensor) -> int:
            offset = len(arena)
            arena.extend(tensor.contiguous().numpy().tobytes())
            arena.extend(bytes(-len(arena) % 64))
            return offset

        for row, sample in enumerate(samples):
            media = tuple(
                MediaSlot(offset=put(rows), frames=grid[0], height=grid[1], width=grid[2])
                for rows, (_, grid, _) in zip(sample.pixels, sample.media, strict=True)
            )
            slots.append(
                PromptSlot(
                    group=row,
                    row=row,
                    tokens=len(sample.ids),
                    ids_offset=put(sample.ids),
                    positions_offset=put(sample.positions),
                    next_position=sample.next_position,
                    media=media,
                )
            )

        def source(offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            count = torch.Size(shape).numel()
            return torch.frombuffer(arena, dtype=dtype, count=count, offset=offset).view(shape)

        return prompt_batch(source, slots, 1176, copies)

    def responses(self, lengths: Sequence[int], seed: int) -> tuple[Tensor, Tensor]:
        """Random tokens [rows, longest] and lengths [rows]."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, TEXT, (len(lengths), max(lengths)), generator=generator)
        return tokens, torch.tensor(lengths)

    def full_logprobs(
        self, model: Any, sample: Sample, response: Tensor, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of one response from one unsplit, unpadded forward of stock transformers."""
        ids = torch.cat([sample.ids, response])[None]
        kinds = torch.cat([sample.kinds, torch.zeros_like(response)])[None]
        model.model.rope_deltas = None
        media = sample.of(IMAGE) | sample.of(VIDEO)
        if model.config.model_type == "qwen2_vl":
            media.pop("second_per_grid_ts", None)
        out = model(input_ids=ids, mm_token_type_ids=kinds, use_cache=False, **media)
        logits = out.logits[0, len(sample.ids) - 1 : -1] / temperature
        keep = torch.ones(VOCAB, dtype=torch.bool)
        keep[list(NEVER)] = False
        places = keep.cumsum(0) - 1
        logp = torch.log_softmax(logits[:, keep], -1)
        picked = logp[torch.arange(len(response)), places[response]]
        return picked, -(logp.exp() * logp).sum(-1)

    def found_by_ranks(
        self, folder: Path, jobs: list[dict[str, Any]], ranks: int, deadline_s: float, **more: Any
    ) -> dict[str, list[dict[str, Any]]]:
        """By job: what each rank of `parallel_ranks.py` has found."""
        models = {(job["model"], job.get("tied", False)) for job in jobs if "model" in job}
        folders = {f"{name} {tied}": str(self.folder(name, tied)) for name, tied in sorted(models)}
        (folder / "jobs.json").write_text(json.dumps({"folders": folders, "jobs": jobs, **more}))
        script, log = Path(__file__).with_name("parallel_ranks.py"), folder / "log"
        with log.open("w") as to:
            code = subprocess.call(
                [sys.executable, str(script), str(folder), str(ranks), str(deadline_s)],
                stdout=to,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
                timeout=deadline_s + 20,
            )
        assert code == 0, log.read_text()[-6000:]
        results = [json.loads((folder / f"found.{rank}.json").read_text()) for rank in range(ranks)]
        return {job["name"]: [result[job["name"]] for result in results] for job in jobs}

    @staticmethod
    def leaves(state: PrefixState) -> PrefixState:
        """The state as a trainer gets it: contiguous leaves with gradients of their own."""

        def leaf(tensor: Tensor) -> Tensor:
            out = tensor.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
            out.grad = torch.zeros_like(out)
            return out

        return PrefixState(
            keys=[leaf(k) for k in state.keys],
            values=[leaf(v) for v in state.values],
            last_hidden=leaf(state.last_hidden),
            lengths=state.lengths,
            next_positions=state.next_positions,
        )

    @staticmethod
    def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
        """Worst parameter of max|a-b| / max(max|b|, 1e-3 * the model's largest gradient)."""
        assert ours.keys() == theirs.keys()
        largest = max(float(b.abs().max()) for b in theirs.values())
        return max(
            float((ours[n] - b).abs().max()) / max(float(b.abs().max()), 1e-3 * largest) for n, b in theirs.items()
        )


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    """As workers run (`rollplex.model.setup`)."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    made: dict[tuple[str, bool], Path] = {}

    def folder_of(name: str, tied: bool) -> Path:
        if (name, tied) not in made:
            folder = tmp_path_factory.mktemp(f"{name}-{'tied' if tied else 'untied'}")
            torch.manual_seed(2 * list(MODELS).index(name) + tied)
            model: Any = model_class(name)(model_config(name, tied=tied))
            for parameter in model.parameters():
                parameter.data.normal_(0, 0.8 / MODELS[name][0] ** 0.5)  # keeps hidden states of order one
            for module in model.modules():
                if type(module).__name__ in {"Qwen2_5_VLRMSNorm", "Qwen2VLRMSNorm", "LayerNorm"}:
                    module.weight.data.add_(1.0)
            model.save_pretrained(folder)
            made[name, tied] = folder
        return made[name, tied]

    return Kit(folder_of)


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """See `compute_exactly`."""
    compute_exactly(monkeypatch.setattr)


def compute_exactly(replace: Callable[[Any, str, Any], None]) -> None:
    """Takes out of transformers what casts to float32: RMSNorm and the vision rope. For float64 comparisons."""

    def norm(self: Any, hidden: Tensor) -> Tensor:
        variance = hidden.pow(2).mean(-1, keepdim=True)
        out: Tensor = self.weight * (hidden * torch.rsqrt(variance + self.variance_epsilon))
        return out

    def rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        half: Any = stock.rotate_half
        cos, sin = cos.unsqueeze(-2).to(query.dtype), sin.unsqueeze(-2).to(query.dtype)
        return query * cos + half(query) * sin, key * cos + half(key) * sin

    replace(stock.Qwen2_5_VLRMSNorm, "forward", norm)
    replace(older.Qwen2VLRMSNorm, "forward", norm)
    for module in (stock, older):
        replace(module, "apply_rotary_pos_emb_vision", rope)
