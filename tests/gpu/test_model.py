"""The passes on a GPU: its numbers against the host's, its fast path against its slow one, the same bits each time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, autograd

from rollplex.errors import BudgetError
from rollplex.layout.optimizer import optimizer_table
from rollplex.layout.parameters import ParameterTable, gradient_table, parameter_table
from rollplex.layout.shape import ModelShape, read_shape
from rollplex.memory import predict
from rollplex.memory.tensors import KvViews, OptimizerViews
from rollplex.model.batch import PromptBatch, prompt_batch
from rollplex.model.build import build
from rollplex.model.device import limit_private, private_memory
from rollplex.model.measure import GraphMeter
from rollplex.model.packed import PackedContext, packing
from rollplex.model.prefix import PrefixState, export_state, prefix_backward, prefix_forward
from rollplex.model.setup import prepare_torch
from rollplex.model.suffix import suffix_forward
from rollplex.model.weights import fill
from rollplex.model.whole import whole_forward
from rollplex.protocol.common import Memory, ModelSpec
from rollplex_trainer.optimizer import SegmentOptimizer, all_finite, global_norm
from support.optimizers import ADAMW
from support.tiny import FILM, NEVER_SAMPLED, PICTURE, PICTURES, WORDS, Prompt, make_prompts, write_model

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
HOST = torch.device("cpu")
LENGTHS = (4, 1, 6, 2, 5, 3, 1, 1, 1, 9, 3, 4)
"""Three responses of each of four prompts; one prompt's feed nothing."""


@pytest.fixture(autouse=True, scope="module")
def _as_a_worker() -> Iterator[None]:
    spec = ModelSpec(
        path="", dtype="bfloat16", freeze_vision=False, table_hash="", never_sampled=(), device=Memory.CUDA
    )
    prepare_torch(spec)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("wide")
    write_model(made, wide=True, tied=False)
    return made


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[Prompt]:
    return make_prompts(folder, (PICTURE, WORDS, PICTURES, FILM))


@dataclass
class Store:
    """A model over weights and gradients somewhere."""

    table: ParameterTable
    shape: ModelShape
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
    model: Any
    folder: Path

    def plain(self) -> Any:
        table, weights, gradients = self.table, self.weights, self.gradients
        return build(self.folder, table, weights, gradients=gradients, freeze_vision=False, plain=True)

    def zero(self) -> None:
        for gradient in self.gradients.values():
            gradient.zero_()


def store_of(folder: Path, dtype: str, device: torch.device) -> Store:
    shape = read_shape(folder)
    table = parameter_table(shape, dtype=dtype, freeze_vision=False)
    kind = getattr(torch, dtype)
    weights = {e.name: torch.empty(e.shape, dtype=kind, device=device) for e in table.entries}
    fill(table, weights, folder)
    gradients = {e.name: torch.zeros(e.shape, dtype=kind, device=device) for e in gradient_table(table).entries}
    model = build(folder, table, weights, gradients=gradients, freeze_vision=False)
    return Store(table, shape, weights, gradients, model, folder)


def batch_of(prompts: Sequence[Prompt], width: int, device: torch.device) -> PromptBatch:
    """One prompt after the other, then padded together: the prompts' places in a segment are not looked at."""
    arena = bytearray()
    slots = []

    def put(value: Tensor) -> int:
        arena.extend(bytes(-len(arena) % 64))
        arena.extend(value.contiguous().numpy().tobytes())
        return len(arena) - value.nbytes

    from msgspec.structs import replace

    for prompt in prompts:
        start = put(prompt.pixels) if prompt.pixels is not None else 0
        media = tuple(replace(m, offset=m.offset + start) for m in prompt.slot.media)
        places = {"ids_offset": put(prompt.ids), "positions_offset": put(prompt.positions), "media": media}
        slots.append(replace(prompt.slot, **places))

    def source(offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        count = torch.Size(shape).numel()
        return torch.frombuffer(arena, dtype=dtype, count=count, offset=offset).view(shape)

    return prompt_batch(source, slots, width, device=device)


def responses(device: torch.device) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 60, (len(LENGTHS), max(LENGTHS)), generator=draw)
    return tokens.to(device), torch.tensor(LENGTHS, device=device)


def leaves(state: PrefixState) -> PrefixState:
    def leaf(value: Tensor) -> Tensor:
        out = value.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
        out.grad = torch.zeros_like(out)
        return out

    return PrefixState(
        keys=[leaf(key) for key in state.keys],
        values=[leaf(value) for value in state.values],
        last_hidden=leaf(state.last_hidden),
        lengths=state.lengths,
        next_positions=state.next_positions,
    )


Passes = dict[str, Tensor]


def passes(store: Store, prompts: Sequence[Prompt], device: torch.device, *, packed: bool | None = None) -> Passes:
    """Both passes and backwards: log-probabilities, K/V and their gradients, parameters' gradients, on the host."""
    store.zero()
    batch = batch_of(prompts, store.shape.row_width, device)
    state = prefix_forward(store.model, batch, grad=True)
    prefix = leaves(state)
    tokens, lengths = responses(device)
    out = suffix_forward(
        store.model, prefix, tokens, lengths, temperature=0.9, never_sampled=NEVER_SAMPLED, entropy=True, packed=packed
    )
    assert out.entropy is not None
    weight = torch.linspace(-1, 1, out.logprobs.numel(), device=device).view(out.logprobs.shape)
    autograd.backward((weight * out.logprobs).sum() + 0.1 * (weight * out.entropy).sum())
    d_keys, d_values = ([leaf.grad for leaf in part] for part in (prefix.keys, prefix.values))
    assert prefix.last_hidden.grad is not None
    prefix_backward(state, d_keys, d_values, prefix.last_hidden.grad)  # type: ignore[arg-type]
    found = {
        "logprobs": out.logprobs,
        "entropy": out.entropy,
        "hidden": prefix.last_hidden,
        "key": prefix.keys[-1],
        "d_key": d_keys[0],
        "d_value": d_values[-1],
        "d_hidden": prefix.last_hidden.grad,
        **store.gradients,
    }
    return {name: value.detach().to(HOST, torch.float64) for name, value in found.items() if value is not None}


def worst(ours: Passes, theirs: Passes) -> tuple[float, str]:
    """Largest relative distance (norms), among those that are not all rounding."""
    gradients = [b for name, b in theirs.items() if "." in name]
    floor = 1e-4 * max(float(b.norm()) for b in gradients)
    return max(
        (float((ours[name] - b).norm()) / max(float(b.norm()), floor if "." in name else 1e-12), name)
        for name, b in theirs.items()
    )


def test_in_float32_its_numbers_are_the_hosts(folder: Path, prompts: list[Prompt]) -> None:
    """And so no TF32 anywhere."""
    ours = passes(store_of(folder, "float32", CUDA), prompts, CUDA)
    theirs = passes(store_of(folder, "float32", HOST), prompts, HOST)
    distance, name = worst(ours, theirs)
    assert distance < 2e-5, name


@pytest.mark.parametrize("packed", [True, False])
def test_in_bfloat16_both_suffix_passes_are_near_float32(folder: Path, prompts: list[Prompt], packed: bool) -> None:
    """float32 on the same weights, rounded to bfloat16."""
    half = store_of(folder, "bfloat16", CUDA)
    truth = store_of(folder, "float32", HOST)
    for name, weight in half.weights.items():
        truth.weights[name].copy_(weight)
    ours, theirs = passes(half, prompts, CUDA, packed=packed), passes(truth, prompts, HOST)
    for name in ("logprobs", "entropy", "hidden", "key"):
        assert float((ours[name] - theirs[name]).norm() / theirs[name].norm()) < 2e-2, name
    distance, name = worst(ours, theirs)
    assert distance < 6e-2, name


def test_packed_is_padded_in_bfloat16_and_is_what_runs(folder: Path, prompts: list[Prompt]) -> None:
    store = store_of(folder, "bfloat16", CUDA)
    packed, padded = (passes(store, prompts, CUDA, packed=way) for way in (True, False))
    for name in ("logprobs", "entropy"):
        assert float((packed[name] - padded[name]).norm() / padded[name].norm()) < 2e-2, name
    distance, name = worst(packed, padded)
    assert distance < 5e-2, name
    by_default = passes(store, prompts, CUDA)
    assert all(torch.equal(by_default[name], value) for name, value in packed.items()), "and it is deterministic"


@pytest.mark.parametrize("dim", [32, 64, 80, 128])
@pytest.mark.parametrize("kv", [1, 2, 4])
def test_the_merged_attention_is_one_softmax(dim: int, kv: int) -> None:
    """bfloat16 on the GPU against float64 on the host, of the same numbers: GQA, ragged, a response without tokens."""
    draw = torch.Generator().manual_seed(dim + kv)
    fed, prompt_lengths = torch.tensor([130, 0, 7, 64, 1, 200]), torch.tensor([150, 300, 33])
    total = int(fed.sum())

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(torch.bfloat16)

    given = [numbers(total, 4, dim), numbers(total, kv, dim), numbers(total, kv, dim)]
    given += [numbers(3, kv, 300, dim), numbers(3, kv, 300, dim)]
    d_out = numbers(total, 4, dim)

    def run(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        q, k, v, keys, values = (t.to(device, dtype).requires_grad_() for t in given)
        plan = packing(fed.to(device), prompt_lengths.to(device))
        context = PackedContext(keys=[keys], values=[values], packing=plan)
        query, key, value = (t.transpose(0, 1)[None] for t in (q, k, v))
        out = context.attend(0, query, key, value, scaling=dim**-0.5)[0]
        grads = autograd.grad(out, (q, k, v, keys, values), d_out.to(device, dtype))
        return [t.detach().to(HOST, torch.float64) for t in (out, *grads)]

    for ours, theirs in zip(run(CUDA, torch.bfloat16), run(HOST, torch.float64), strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-2


def test_the_graphs_are_as_large_as_predicted(folder: Path, prompts: list[Prompt]) -> None:
    store = store_of(folder, "bfloat16", CUDA)
    batch = batch_of(prompts, store.shape.row_width, CUDA)
    with GraphMeter() as meter:
        state = prefix_forward(store.model, batch, grad=True)
    outside = (*store.weights.values(), *store.model.parameters())
    held = meter.held_bytes((*state.keys, *state.values, state.last_hidden), excluding=outside)
    said = predict.prefix_activation_bytes(
        store.shape,
        rows=batch.rows,
        tokens=batch.tokens,
        grids=batch.grids,
        freeze_vision=False,
        dtype="bfloat16",
        fused=True,
    )
    assert held == pytest.approx(said, rel=0.05)
    prefix = leaves(state)
    tokens, lengths = responses(CUDA)
    with GraphMeter() as meter:
        out = suffix_forward(
            store.model, prefix, tokens, lengths, temperature=1.0, never_sampled=NEVER_SAMPLED, entropy=True
        )
    assert out.entropy is not None
    known = (*outside, *prefix.keys, *prefix.values, prefix.last_hidden)
    held = meter.held_bytes((out.logprobs, out.entropy), excluding=known)
    said = predict.packed_suffix_saved_bytes(
        store.shape, prompts=batch.rows, lengths=LENGTHS, entropy=True, dtype="bfloat16", fused=True
    )
    assert held == pytest.approx(said, rel=0.05)


def test_split_is_whole_in_float32(folder: Path, prompts: list[Prompt]) -> None:
    """Gradients of prefix and suffix against one forward of transformers' own model for each sequence."""
    store = store_of(folder, "float32", CUDA)
    batch = batch_of(prompts, store.shape.row_width, CUDA)
    state = prefix_forward(store.model, batch, grad=True)
    prefix = leaves(state)
    tokens, lengths = responses(CUDA)
    out = suffix_forward(store.model, prefix, tokens, lengths, temperature=0.9, never_sampled=NEVER_SAMPLED)
    autograd.backward(out.logprobs.sum())
    grads = [leaf.grad for leaf in (*prefix.keys, *prefix.values, prefix.last_hidden)]
    count = len(prefix.keys)
    prefix_backward(state, grads[:count], grads[count:-1], grads[-1])  # type: ignore[arg-type]
    split = {name: value.to(HOST, torch.float64) for name, value in store.gradients.items()}
    store.zero()
    plain = store.plain()
    for row, (length, values) in enumerate(zip(LENGTHS, out.logprobs.detach(), strict=True)):
        one = batch_of([prompts[row // 3]], store.shape.row_width, CUDA)
        whole, _ = whole_forward(plain, one, tokens[row, :length], temperature=0.9, never_sampled=NEVER_SAMPLED)
        assert torch.allclose(whole.detach(), values[:length], rtol=1e-4, atol=1e-5)
        autograd.backward(whole.sum())
    whole_grads = {name: value.to(HOST, torch.float64) for name, value in store.gradients.items()}
    distance, name = worst(split, whole_grads)
    assert distance < 1e-4, name


def test_recomputed_is_kept_bit_for_bit(folder: Path, prompts: list[Prompt]) -> None:
    store = store_of(folder, "bfloat16", CUDA)
    batch = batch_of(prompts, store.shape.row_width, CUDA)
    kept = prefix_forward(store.model, batch, grad=True)

    def blocks() -> KvViews:
        def like(tensors: Sequence[Tensor]) -> list[Tensor]:
            return [torch.full(t.shape, float("nan"), dtype=t.dtype, device=CUDA) for t in tensors]

        hidden, gradients = like([kept.last_hidden]), torch.empty(0, dtype=torch.uint8, device=CUDA)
        return KvViews(
            keys=like(kept.keys),
            values=like(kept.values),
            last_hidden=hidden[0],
            d_keys=[],
            d_values=[],
            d_last_hidden=hidden[0],
            gradients=gradients,
        )

    exported, written = blocks(), blocks()
    export_state(kept, exported)
    prefix_forward(store.model, batch, grad=False, into=written)
    for one, other in zip((*exported.keys, *exported.values), (*written.keys, *written.values), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(exported.last_hidden, written.last_hidden)
    grads = []
    for state in (kept, prefix_forward(store.model, batch, grad=True)):
        store.zero()
        prefix_backward(
            state,
            [torch.ones_like(key) for key in state.keys],
            [torch.ones_like(value) for value in state.values],
            torch.ones_like(state.last_hidden),
        )
        grads.append([gradient.clone() for gradient in store.gradients.values()])
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_optimizer_steps_as_on_a_host(folder: Path, dtype: str) -> None:
    def stepped(device: torch.device) -> dict[str, Tensor]:
        store = store_of(folder, dtype, device)
        states = optimizer_table(store.table, name="adamw", momentum=0.0)
        made: dict[str, dict[str, Tensor]] = {}
        kind = getattr(torch, states.dtype)
        for state in states.states:
            made.setdefault(state.kind, {})[state.parameter] = torch.zeros(state.shape, dtype=kind, device=device)
        views = OptimizerViews(step=torch.zeros((), dtype=torch.int64, device=device), states=made)
        optimizer = SegmentOptimizer(
            ADAMW, store.table, weights=store.weights, gradients=store.gradients, state=views, chunk_bytes=2**16
        )
        optimizer.reset()
        draw = torch.Generator().manual_seed(4)
        for _ in range(3):
            for gradient in store.gradients.values():
                gradient.copy_(torch.randn(gradient.shape, generator=draw))
            optimizer.step(0.01)
        assert optimizer.steps_made == 3
        assert all(all_finite(weight) for weight in store.weights.values())
        return {name: value.to(HOST, torch.float64) for name, value in store.weights.items()}

    ours, theirs = stepped(CUDA), stepped(HOST)
    for name, value in theirs.items():
        assert torch.allclose(ours[name], value, rtol=1e-5 if dtype == "float32" else 8e-3, atol=1e-6), name


def test_the_norm_of_an_arena_is_the_hosts() -> None:
    arena = torch.randn(2**23 + 17, generator=torch.Generator().manual_seed(0))
    assert global_norm(arena.to(CUDA)) == pytest.approx(global_norm(arena), rel=1e-12)
    arena[5] = float("inf")
    assert not all_finite(arena.to(CUDA))


@pytest.fixture
def capped() -> Iterator[Callable[[int], None]]:
    yield lambda more_bytes: limit_private(CUDA, torch.cuda.memory_reserved() + more_bytes)
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_private_memory_beyond_the_cap_is_refused_by_name(capped: Callable[[int], None]) -> None:
    torch.cuda.empty_cache()
    capped(256 * 2**20)
    with private_memory("suffix unit 3", asked_bytes=123, cap_bytes=456):
        assert torch.zeros(2**20, dtype=torch.uint8, device=CUDA).numel() == 2**20
    with (
        pytest.raises(
            BudgetError, match="suffix unit 3 needs more private memory.*123 bytes as predicted, at most 456"
        ),
        private_memory("suffix unit 3", asked_bytes=123, cap_bytes=456),
    ):
        torch.zeros(2**30, dtype=torch.uint8, device=CUDA)


def test_a_cap_above_the_gpu_is_refused() -> None:
    with pytest.raises(BudgetError, match="more private memory than its GPU has"):
        limit_private(CUDA, 2**50)
