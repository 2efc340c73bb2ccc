"""What units ask the ledger for: sizes, owners, lifetimes."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from rollplex.config.wire import train_sampling
from rollplex.journal.phases import Phase
from rollplex.layout.kv import KvLayout
from rollplex.protocol.common import Kind, Responses, Role
from rollplex.protocol.prefix import Which
from rollplex_coordinator.memory.names import PREFIX_BACKWARD, TRAIN_WORKSPACE
from rollplex_coordinator.memory.sizes import Sizes
from support.checked_rows import uniform
from support.core import make_config


def test_replicated_prefixes_are_as_large_as_so_many_prompts(model_folder: Path) -> None:
    shared, replicated = (Sizes(make_config(model_folder, run={"share_prefix": share})) for share in (True, False))
    slots, _ = uniform(make_config(model_folder), 60, 80)
    tripled = [item for item in slots for _ in range(3)]
    for which in Which:
        ours = [want.size_bytes for want in replicated.wants.prefix_unit(which, slots, 0)]
        assert ours == [want.size_bytes for want in shared.wants.prefix_unit(which, tripled, 0)]


def test_a_unit_asks_for_its_blocks_with_their_owners_and_lifetimes(model_folder: Path) -> None:
    stream = Sizes(make_config(model_folder, run={"schedule": "stream"}))
    overlap = Sizes(make_config(model_folder, run={"schedule": "overlap"}))
    slots, _ = uniform(make_config(model_folder), 20, 8)
    some = (Responses(group=0, lengths=(1, 2, 3), tokens=b""),)
    activations, segment = overlap.wants.prefix_unit(Which.ACTOR, slots, 5)
    assert (activations.segment, activations.owner, activations.last_consumer) == (False, Role.PREFIX, Role.PREFIX)
    assert (segment.segment, segment.owner, segment.last_consumer) == (True, Role.PREFIX, Role.TRAINER)
    assert segment.size_bytes == KvLayout(overlap.wants.passes.shape, 4, 20, "float32").total_bytes
    (reference,) = overlap.wants.prefix_unit(Which.REFERENCE, slots, 5)
    assert (reference.first, reference.last, reference.reservation) == (Phase.ROLLOUT, Phase.SCORE, None)
    assert {(w.first, w.last) for w in (activations, segment)} == {(Phase.ROLLOUT, Phase.TRAIN)}
    for sizes, first in ((stream, Phase.ROLLOUT), (overlap, Phase.SCORE)):
        score = sizes.wants.score_workspace(some, 0)
        assert (score.owner, score.first, score.last) == (Role.PREFIX, first, Phase.SCORE)
        for train in sizes.wants.train_workspace(slots, some, 0):
            assert (train.owner, train.first, train.last) == (Role.TRAINER, first, Phase.TRAIN)
            assert train.reservation == TRAIN_WORKSPACE
    sampling = train_sampling(make_config(model_folder), stop_ids=())
    assert overlap.wants.rollout_kv(slots, sampling, 0).first is Phase.ROLLOUT
    assert overlap.wants.rollout_kv(slots, replace(sampling, temperature=0.0), 0).last is Phase.EVAL


@pytest.mark.parametrize(("kept", "recomputed"), [("keep", "recompute"), ("layers", "recompute_layers")])
@pytest.mark.parametrize("share_prefix", [True, False], ids=["shared", "replicated"])
def test_what_a_recomputed_unit_does_not_ask_for_its_backward_asks_for(
    model_folder: Path, share_prefix: bool, kept: str, recomputed: str
) -> None:
    sections = {"run": {"share_prefix": share_prefix}}
    keep = Sizes(make_config(model_folder, **sections, memory={"prefix_activations": kept}))
    again = Sizes(make_config(model_folder, **sections, memory={"prefix_activations": recomputed}))
    slots, _ = uniform(make_config(model_folder), 60, 80)
    activations, segment = keep.wants.prefix_unit(Which.ACTOR, slots, 0)
    assert again.wants.prefix_unit(Which.ACTOR, slots, 0) == (segment,)
    assert keep.wants.backward_workspace(slots, 0) is None
    workspace = again.wants.backward_workspace(slots, 0)
    assert workspace is not None
    assert workspace.size_bytes == activations.size_bytes
    assert (workspace.kind, workspace.reservation) == (Kind.WORKSPACE, PREFIX_BACKWARD)
