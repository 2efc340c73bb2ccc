"""The passes of a verification: their messages, their memory, and that nothing is ever applied."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from rollplex.config import Config
from rollplex.errors import ConfigError
from rollplex.journal.phases import Phase
from rollplex.protocol.common import Committed, Drain
from rollplex.protocol.prefix import PrefixBackward, PrefixForward, ScoreSuffix
from rollplex.protocol.rollout import GenerateUnit
from rollplex.protocol.trainer import ApplyUpdate, PrepareUpdate, SkipUpdate, TrainSuffix, TrainWhole
from rollplex_coordinator.verify.check import checked, choose_row
from rollplex_coordinator.verify.passes import Passes, spread_rewards
from support.core import AMPLE, Core, check_data, make_config, minimum_of

GROUP = 3
SPLIT: list[type] = [PrefixForward, ScoreSuffix, PrefixForward, TrainSuffix, PrefixBackward, PrepareUpdate]
FORGET: list[type] = [Drain, Drain, SkipUpdate, Committed, Committed]
TEXT, ONE, TWO = 1, 0, 2
"""Rows without a picture, with one and with two (`support.workers.prompts_of`)."""


def config_of(folder: Path, **sections: Any) -> Config:
    """A user's configuration as a verification takes it: with batches, schedule and clipping that are not its own."""
    wanted: dict[str, Any] = {
        "run": {"schedule": "stream"},
        "batching": {"decode_prompts": 2, "prefix_prompts": 4, "suffix_prompts": 2},
        "eval": [{"name": "held_out", "data": "rows.jsonl"}],
    }
    return checked(make_config(folder, **{**wanted, **sections}))


@contextmanager
def core_of(config: Config, run_dir: Path, budget_bytes: int = AMPLE) -> Iterator[Core]:
    with Core(config, run_dir, budget_bytes=budget_bytes, whole=True) as core:
        yield core


def all_passes(core: Core, row: int = ONE) -> Passes:
    c = core.context
    c.feed.prepare(0, "train", (row,))
    inputs = c.feed.take(0)
    core.story.clear()
    passes = Passes(c, inputs)
    passes.rollout()
    passes.split(1)
    passes.forget()
    passes.whole()
    passes.forget()
    passes.split(GROUP)
    passes.forget()
    c.feed.done(inputs)
    return passes


def test_each_way_is_a_step_of_its_own_that_is_skipped_and_none_is_applied(model_folder: Path, tmp_path: Path) -> None:
    with core_of(config_of(model_folder), tmp_path) as core:
        all_passes(core)
        sent = [entry[2] for entry in core.story if entry[0] == "send"]
        assert [type(message) for message in sent] == [
            GenerateUnit, *SPLIT, *FORGET, TrainWhole, PrepareUpdate, *FORGET, *SPLIT, *FORGET
        ]  # fmt: skip
        assert not core.sent(ApplyUpdate)
        assert [m.copies for m in sent if isinstance(m, PrefixForward | TrainSuffix)] == [1] * 3 + [GROUP] * 3
        assert [m.step for m in core.sent(PrepareUpdate)] == [m.step for m in core.sent(SkipUpdate)] == [0, 1, 2]
        assert all(m.return_logprobs and m.first and m.release for m in core.sent(TrainSuffix))
        assert core.record.phase is Phase.IDLE
        assert core.leased == set()


def test_all_ways_get_the_same_responses_rewards_and_reference(model_folder: Path, tmp_path: Path) -> None:
    with core_of(config_of(model_folder, algorithm={"scale_rewards": "batch"}, run={}), tmp_path) as core:
        passes = all_passes(core)
        trained = [*core.sent(TrainSuffix), *core.sent(TrainWhole)]
        assert len(trained) == 3
        rewards = struct.pack("<3d", 0.0, 0.5, 1.0)
        for message in trained:
            assert message.responses == trained[0].responses
            assert message.responses[0].lengths == passes.lengths
            assert message.rollout_logprobs == trained[0].rollout_logprobs
            assert message.reference_logprobs == trained[0].reference_logprobs
            assert message.rewards == (rewards,)
            assert message.batch_rewards == rewards


def test_without_a_reference_nothing_is_scored(model_folder: Path, tmp_path: Path) -> None:
    with core_of(config_of(model_folder, algorithm={"beta": 0.0}), tmp_path) as core:
        all_passes(core)
        assert not core.sent(ScoreSuffix)
        assert len(core.sent(PrefixForward)) == 2
        assert [m.reference_logprobs for m in (*core.sent(TrainSuffix), *core.sent(TrainWhole))] == [()] * 3


@pytest.mark.parametrize("row", [TEXT, ONE, TWO, 24])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_budget_that_the_plan_accepts_is_enough_for_every_pass(
    model_folder: Path, tmp_path: Path, row: int, dtype: str
) -> None:
    config = config_of(model_folder, model={"dtype": dtype})
    budget = minimum_of(config, whole=True)
    with core_of(config, tmp_path, budget) as core:
        all_passes(core, row)
    assert budget > minimum_of(config), "the copy of the gradients, at least"


def test_the_plan_is_for_one_prompt_with_replicated_prefixes(model_folder: Path) -> None:
    config = config_of(model_folder)
    assert (config.run.schedule, config.run.share_prefix, config.optimizer.max_grad_norm) == ("serial", False, 0.0)
    assert (config.decode_prompts, config.prefix_prompts, config.suffix_prompts) == (1, 1, 1)
    assert config.eval == ()
    assert config.algorithm == make_config(model_folder).algorithm


def test_the_first_good_row_is_taken_or_the_one_that_is_wanted(model_folder: Path) -> None:
    data = check_data(make_config(model_folder))
    assert choose_row(data, None) == 0
    assert choose_row(data, 29) == 29
    for bad in (30, -1):
        with pytest.raises(ConfigError, match=r"--row: .*row -?\d+; needed a good row of 0 to 29"):
            choose_row(data, bad)


def test_a_row_that_was_left_out_is_not_taken(model_folder: Path) -> None:
    data = check_data(make_config(model_folder))
    some = replace(data, sources=(replace(data.sources[0], good_rows=(3, 5)),))
    assert choose_row(some, None) == 3
    assert choose_row(some, 5) == 5
    with pytest.raises(ConfigError, match="cannot be used"):
        choose_row(some, 4)
    with pytest.raises(ConfigError, match="no row"):
        choose_row(replace(data, sources=(replace(data.sources[0], good_rows=()),)), None)


def test_synthetic_rewards_spread_over_the_group() -> None:
    assert np.frombuffer(spread_rewards(5), dtype="<f8").tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]
