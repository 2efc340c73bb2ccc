"""A prefix service over segments of this process, the trainer's part of a step, and transformers' own models to compare
with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, autograd
from transformers import Qwen2_5_VLForConditionalGeneration

from rollplex.layout.kv import KvLayout
from rollplex.layout.parameters import gradient_table, parameter_table, reference_table
from rollplex.layout.shape import read_shape
from rollplex.memory.digest import digest
from rollplex.memory.header import HeaderPage
from rollplex.memory.tensors import KvViews, hf_views, kv_views, views
from rollplex.model.build import build
from rollplex.model.prefix import leaf_state
from rollplex.model.responses import response_batch
from rollplex.model.suffix import suffix_forward
from rollplex.model.weights import fill
from rollplex.protocol.codec import CHANNELS
from rollplex.protocol.common import Kind, LeaseRef, Memory, ModelSpec, Responses, Role, SegmentRef
from rollplex.protocol.prefix import LoadPrefix, PrefixBackward, PrefixForward, PrefixReady, ScoreSuffix, Which
from rollplex_prefix.service import PrefixService
from support.inputs import write_inputs
from support.segments import HostSegments
from support.tiny import NEVER_SAMPLED, Prompt

VERSION = 3
STEP = 5
TEMPERATURE = 0.7
WORKSPACE = LeaseRef(lease=9, kind=Kind.WORKSPACE, size_bytes=2**20)


class World:
    """One service, loaded. The reference's weights are those of another folder, so that nobody can mix the two up.

    Args:
        folder, reference: model folders of one architecture.
        prompts: groups 0, 1, ... of every step.
        dtype, freeze_vision, with_reference: of the configuration.
        memory: where it computes.
    """

    def __init__(
        self,
        folder: Path,
        reference: Path,
        prompts: list[Prompt],
        *,
        dtype: str = "float32",
        freeze_vision: bool = False,
        with_reference: bool = True,
        memory: Memory = Memory.HOST,
    ) -> None:
        self.folder, self.reference_folder = folder, reference
        self.prompts, self.dtype, self.freeze_vision = prompts, dtype, freeze_vision
        self.shape = read_shape(folder)
        self.table = parameter_table(self.shape, dtype=dtype, freeze_vision=freeze_vision)
        self.segments = HostSegments(memory)
        create = self.segments.create
        actor = create(Kind.ACTOR_WEIGHTS, self.table.total_bytes)
        pages = self.segments.map_again(actor)
        self.weights = views(pages, self.table)
        fill(self.table, self.weights, folder)
        self.header = HeaderPage(pages, run_id=self.segments.run_id, table_hash=self.table.hash)
        self.header.initialise(VERSION, digest(pages, self.table))
        self.pages = pages
        other = create(Kind.REFERENCE_WEIGHTS, reference_table(self.table).total_bytes) if with_reference else None
        if other is not None:
            table = reference_table(self.table)
            self.reference_weights = views(self.segments.map_again(other), table)
            fill(table, self.reference_weights, reference)
        arena = create(Kind.GRADIENTS, gradient_table(self.table).total_bytes)
        self.gradients = views(self.segments.map_again(arena), gradient_table(self.table))
        for gradient in self.gradients.values():
            gradient.fill_(float("nan"))  # whoever trusts an arena to come zeroed is found out
        self.slots, self.inputs = write_inputs(self.segments, self.prompts)
        self.load = LoadPrefix(
            cause=1,
            model=ModelSpec(
                path=str(folder),
                dtype=dtype,
                freeze_vision=freeze_vision,
                table_hash=self.table.hash,
                never_sampled=NEVER_SAMPLED,
                device=memory,
            ),
            actor=actor,
            reference=other,
            gradients=arena,
            temperature=TEMPERATURE,
        )
        self.service = PrefixService(self.segments)
        self.kv: dict[int, tuple[SegmentRef, KvLayout]] = {}
        self.loaded = self.send(self.load)

    def send(self, message: Any) -> Any:
        """The one answer to an instruction; both survive the wire."""
        answers: list[Any] = []
        channel = CHANNELS[Role.PREFIX]
        self.service.handle(channel.to_worker.decode(channel.to_worker.encode(message)), answers.append)
        (answer,) = answers
        assert answer.cause == message.cause
        assert channel.from_worker.decode(channel.from_worker.encode(answer)) == answer
        return answer

    # --- instructions ---------------------------------------------------------------------------------------------

    def forward(self, which: Which, groups: Sequence[int], unit: int, **changes: Any) -> PrefixReady:
        """A prefix forward; the actor's gets a segment, full of bytes that are no numbers."""
        answer: PrefixReady = self.send(self.forward_message(which, groups, unit, **changes))
        return answer

    def forward_message(self, which: Which, groups: Sequence[int], unit: int, **changes: Any) -> PrefixForward:
        prompts = tuple(self.slots[group] for group in groups)
        copies = changes.get("copies", 1)
        kv = None
        if which is Which.ACTOR:
            layout = KvLayout(self.shape, len(prompts) * copies, max(p.tokens for p in prompts), self.dtype)
            kv = self.segments.create(Kind.ACTOR_PREFIX_KV, layout.total_bytes)
            self.segments.map_again(kv).write(0, b"\xff" * layout.total_bytes)
            self.kv[unit] = (kv, layout)
        kind = Kind.PREFIX_ACTIVATIONS if which is Which.ACTOR else Kind.REFERENCE_PREFIX_KV
        given: dict[str, Any] = {
            "cause": 10 + unit,
            "step": STEP,
            "version": VERSION,
            "unit": unit,
            "which": which,
            "inputs": self.inputs,
            "prompts": prompts,
            "copies": copies,
            "lease": LeaseRef(lease=20 + unit, kind=kind, size_bytes=2**20),
            "kv": kv,
        }
        return PrefixForward(**{**given, **changes})

    def score(self, unit: int, responses: Sequence[Responses], **changes: Any) -> Any:
        given: dict[str, Any] = {
            "cause": 30,
            "step": STEP,
            "unit": unit,
            "suffix_unit": 0,
            "responses": tuple(responses),
            "workspace": WORKSPACE,
            "release": False,
        }
        return self.send(ScoreSuffix(**{**given, **changes}))

    def backward(self, unit: int, **changes: Any) -> Any:
        given = {"cause": 40 + unit, "step": STEP, "version": VERSION, "unit": unit}
        return self.send(PrefixBackward(**{**given, **changes}))

    def unit_views(self, unit: int) -> KvViews:
        """The unit's segment as the trainer maps it."""
        ref, layout = self.kv[unit]
        return kv_views(self.segments.map_again(ref), layout)

    def publish(self, version: int) -> None:
        """What the trainer does at an update, without moving a weight."""
        self.header.begin_update(version - 1)
        self.header.publish(version, digest(self.pages, self.table))

    # --- what it is compared with ---------------------------------------------------------------------------------

    def stock(self, which: Which) -> Any:
        """transformers' own model with the weights that this process should use."""
        folder = self.folder if which is Which.ACTOR else self.reference_folder
        model = Qwen2_5_VLForConditionalGeneration.from_pretrained(
            folder, dtype=getattr(torch, self.dtype), attn_implementation="eager"
        )
        if self.freeze_vision:
            actor = self.stock(Which.ACTOR) if which is Which.REFERENCE else model
            model.model.visual = actor.model.visual.requires_grad_(requires_grad=False)
        return model.train(False)

    def gradients_by_name(self) -> dict[str, Tensor]:
        """The arena under transformers' names."""
        return hf_views(self.gradients, gradient_table(self.table))

    def logprobs(self, model: Any, group: int, tokens: Sequence[int]) -> Tensor:
        """[R] of one response, from one forward of prompt and response together, with a graph."""
        prompt, response = self.prompts[group], torch.tensor(tokens)
        model.model.rope_deltas = None
        logits = model(
            input_ids=torch.cat([prompt.ids, response])[None],
            mm_token_type_ids=torch.cat([prompt.kinds, torch.zeros_like(response).int()])[None],
            use_cache=False,
            **prompt.media,
        ).logits[0, len(prompt.ids) - 1 : -1]
        allowed = [i for i in range(self.shape.vocab) if i not in NEVER_SAMPLED]
        logprobs = torch.log_softmax(logits[:, allowed] / TEMPERATURE, -1)
        return logprobs[torch.arange(len(tokens)), [allowed.index(token) for token in tokens]]

    def prefix(self, model: Any, group: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Per layer K after rope and V [kv, P, D], and the last hidden state [hidden], with their graphs."""
        prompt = self.prompts[group]
        model.model.rope_deltas = None
        out = model.model(
            input_ids=prompt.ids[None], mm_token_type_ids=prompt.kinds[None], use_cache=True, **prompt.media
        )
        layers = out.past_key_values.layers
        return [layer.keys[0] for layer in layers], [layer.values[0] for layer in layers], out.last_hidden_state[0, -1]


def weights_for(responses: Sequence[Responses]) -> Tensor:
    """A loss weight for each response token [rows, R], 0 at padding."""
    _, lengths = response_batch(responses)
    draw = torch.Generator().manual_seed(11)
    values = torch.randn(len(lengths), int(lengths.max()), generator=draw)
    return values * (torch.arange(values.shape[1]) < lengths[:, None])


class Trainer:
    """The other half of the loss: a suffix pass over a unit's segment, with a gradient arena of its own."""

    def __init__(self, world: World) -> None:
        self.world = world
        table = gradient_table(world.table)
        self.gradients = {entry.name: torch.zeros(entry.shape) for entry in table.entries}
        self.model = build(
            world.folder, world.table, world.weights, gradients=self.gradients, freeze_vision=world.freeze_vision
        )

    def train(self, unit: int, groups: Sequence[int], responses: Sequence[Responses], weights: Tensor) -> None:
        """Backward of sum(weights * logprobs); the gradients of K, V and the last hidden state go to the segment."""
        world = self.world
        kv = world.unit_views(unit)
        kv.gradients.zero_()
        copies = kv.last_hidden.shape[0] // len(groups)
        slots = [world.slots[group] for group in groups for _ in range(copies)]
        prefix = leaf_state(kv, torch.tensor([s.tokens for s in slots]), torch.tensor([s.next_position for s in slots]))
        tokens, lengths = response_batch(responses)
        out = suffix_forward(self.model, prefix, tokens, lengths, temperature=TEMPERATURE, never_sampled=NEVER_SAMPLED)
        autograd.backward((out.logprobs * weights).sum())

    def total(self) -> dict[str, Tensor]:
        """Both arenas, as they are summed at the gate."""
        world = self.world
        both = {name: value + world.gradients[name] for name, value in self.gradients.items()}
        return hf_views(both, gradient_table(world.table))


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Worst parameter of max |a - b| / max(max |b|, 1e-3 of the largest gradient of the model)."""
    assert ours.keys() == theirs.keys()
    floor = 1e-3 * max(float(b.abs().max()) for b in theirs.values())
    return max(float((ours[n] - b).abs().max()) / max(float(b.abs().max()), floor) for n, b in theirs.items())
