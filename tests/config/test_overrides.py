"""`--set a.b=v`."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollplex.config import load
from rollplex.errors import ConfigError


def test_overrides_are_applied_in_order_and_read_as_yaml(config_file: Path) -> None:
    config = load(
        config_file,
        [
            "run.seed=1",
            "run.seed=2",
            "optimizer.lr=1e-3",
            "optimizer.betas=[0.8, 0.9]",
            "rollout.never_sample=['<|im_start|>', 'a=b.c']",
            "run.share_prefix=false",
            "memory.budget=4GiB",
            "memory.overhead=0",
        ],
    )
    assert config.run.seed == 2
    assert config.optimizer.lr == 1e-3
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.rollout.never_sample == ("<|im_start|>", "a=b.c")
    assert config.run.share_prefix is False
    assert config.memory.budget == 4 * 2**30


def test_items_of_lists_are_reached_by_number_and_lists_as_a_whole(config_file: Path) -> None:
    config = load(config_file, ["eval.0.limit=5", "rewards.functions.0.weight=0.5"])
    assert config.eval[0].limit == 5
    assert config.rewards.functions[0].weight == 0.5
    assert load(config_file, ["eval=[]"]).eval == ()


def test_null_takes_an_optional_key_back(config_file: Path) -> None:
    assert load(config_file, ["data.image_dir=other", "data.image_dir=null"]).data.image_dir is None


def test_the_file_itself_stays_as_it_is(config_file: Path) -> None:
    before = config_file.read_bytes()
    load(config_file, ["eval.0.limit=5"])
    assert config_file.read_bytes() == before


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("run.seed", "not of the form"),
        ("=1", "not of the form"),
        ("run..seed=1", "not of the form"),
        ("eval.1.limit=5", "is a list"),
        ("eval.x.limit=5", "is a list"),
        ("eval.-1.limit=5", "is a list"),
        ("eval.².limit=5", "is a list"),
        ("model.path.x=5", "is a plain value"),
        ("run.seed=[1", "not YAML"),
        ("run.seed=*x", "Anchors"),
    ],
)
def test_an_override_that_cannot_be_applied_is_refused(config_file: Path, override: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part) as caught:
        load(config_file, [override])
    assert caught.value.where.startswith("--set")


@pytest.mark.parametrize("override", ["run.sede=1", "run.seed=x", "rollout.group_size=1", "optimizer.momentum=0.9"])
def test_a_mistake_in_an_override_is_blamed_on_the_override(config_file: Path, override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(config_file, ["run.name=x", override])
    assert caught.value.where == f"--set {override}"
