"""Standing blocks from shapes, and whose copies of a prompt units are of."""

from __future__ import annotations

from pathlib import Path

from rollplex.layout.optimizer import optimizer_table
from rollplex.layout.parameters import gradient_table, reference_table
from rollplex.protocol.prefix import Which
from rollplex_coordinator.memory.sizes import Sizes
from support.checked_rows import uniform
from support.core import make_config


def test_standing_blocks_are_as_large_as_their_tables(model_folder: Path) -> None:
    config = make_config(model_folder, model={"dtype": "bfloat16", "freeze_vision": True})
    sizes = Sizes(config)
    assert sizes.gradient_bytes == gradient_table(sizes.table).total_bytes < sizes.table.total_bytes
    assert sizes.reference_bytes == reference_table(sizes.table).total_bytes
    assert sizes.optimizer_bytes == optimizer_table(sizes.table, name="adamw", momentum=0.0).total_bytes


def test_other_copies_of_a_prompt_are_asked_for_without_changing_the_sizes_they_come_from(model_folder: Path) -> None:
    sizes = Sizes(make_config(model_folder))
    replicated = Sizes(make_config(model_folder, run={"share_prefix": False}))
    slots, _ = uniform(make_config(model_folder), 60, 80)
    other = sizes.with_copies(replicated.copies)
    assert (sizes.copies, other.copies) == (1, 3)
    assert other.wants.prefix_unit(Which.ACTOR, slots, 0) == replicated.wants.prefix_unit(Which.ACTOR, slots, 0)
