"""Differences between a run as it was and as it is configured now."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollplex.checkpoint.compare import (
    HARMLESS,
    Effect,
    config_differences,
    fingerprint_differences,
    library_differences,
)
from rollplex.config.config import Config
from rollplex.config.loading import from_mapping

REFUSE, WARN = Effect.REFUSE, Effect.WARN


def _plain(tmp_path: Path, **sections: dict[str, object]) -> dict[str, object]:
    base: dict[str, dict[str, object]] = {
        "model": {"path": str(tmp_path / "model")},
        "data": {"path": str(tmp_path / "rows.jsonl")},
        "rewards": {"functions": [{"function": "a.b:c"}]},
    }
    merged = {name: {**base.get(name, {}), **sections.get(name, {})} for name in {*base, *sections}}
    dumped: dict[str, object] = from_mapping(merged).model_dump(mode="json")
    return dumped


def test_a_configuration_does_not_differ_from_itself(tmp_path: Path) -> None:
    assert config_differences(_plain(tmp_path), _plain(tmp_path)) == ()


@pytest.mark.parametrize(
    ("section", "key", "value", "effect"),
    [
        ("run", "seed", 7, REFUSE),
        ("run", "schedule", "serial", WARN),
        ("run", "share_prefix", False, REFUSE),
        ("run", "threads", 2, REFUSE),
        ("run", "name", "other", WARN),
        ("optimizer", "lr", 0.5, REFUSE),
        ("algorithm", "beta", 0.5, REFUSE),
        ("batching", "prefix_prompts", 1, REFUSE),
        ("data", "prompts_per_iteration", 3, REFUSE),
        ("rollout", "temperature", 0.5, REFUSE),
        ("memory", "budget", "4GiB", WARN),
        ("deadlines", "unit_s", 7.0, WARN),
        ("checkpoint", "every", 7, WARN),
        ("http", "port", 7000, WARN),
    ],
)
def test_what_changes_the_result_is_refused_and_the_rest_is_told(
    tmp_path: Path, section: str, key: str, value: object, effect: Effect
) -> None:
    (found,) = config_differences(_plain(tmp_path), _plain(tmp_path, **{section: {key: value}}))
    assert (found.key, found.effect) == (f"{section}.{key}", effect)
    assert found.was != found.now


def test_the_number_of_iterations_matters_unless_the_rate_is_constant(tmp_path: Path) -> None:
    for schedule, effect in (("linear", REFUSE), ("constant", WARN)):
        before = _plain(tmp_path, optimizer={"schedule": schedule})
        after = _plain(tmp_path, optimizer={"schedule": schedule}, run={"iterations": 7})
        (found,) = config_differences(before, after)
        assert (found.key, found.effect, found.now) == ("run.iterations", effect, "7")


def test_an_accepted_key_or_section_warns(tmp_path: Path) -> None:
    before, after = _plain(tmp_path), _plain(tmp_path, optimizer={"lr": 0.5, "eps": 0.5})
    assert [d.effect for d in config_differences(before, after)] == [REFUSE, REFUSE]
    assert [d.effect for d in config_differences(before, after, accepted=["optimizer.lr"])] == [REFUSE, WARN]
    assert [d.effect for d in config_differences(before, after, accepted=["optimizer"])] == [WARN, WARN]


def test_a_list_of_functions_is_compared_by_place(tmp_path: Path) -> None:
    two = [{"function": "a.b:c"}, {"function": "a.b:d", "weight": 2.0}]
    found = config_differences(_plain(tmp_path), _plain(tmp_path, rewards={"functions": two}))
    keys = {difference.key for difference in found}
    assert {"rewards.functions.1.function", "rewards.functions.1.weight"} <= keys
    assert all(difference.effect is REFUSE and difference.was == "(nothing)" for difference in found)


def test_a_difference_reads_as_a_sentence(tmp_path: Path) -> None:
    (found,) = config_differences(_plain(tmp_path), _plain(tmp_path, run={"seed": 7}))
    assert str(found) == "run.seed: was 0, now 7"


def test_every_harmless_key_exists(tmp_path: Path) -> None:
    """A key that was renamed must not stay on the list unnoticed."""
    known = set(Config.model_fields) | {
        f"{section}.{key}"
        for section, field in Config.model_fields.items()
        for key in getattr(field.annotation, "model_fields", {})
    }
    assert set(HARMLESS) <= known


def test_data_to_learn_from_is_refused_and_that_of_evaluations_told() -> None:
    was = {"data.train": "a" * 64, "data.held_out": "b" * 64, "model": "c" * 64}
    now = {"data.train": "d" * 64, "data.held_out": "e" * 64, "model": "c" * 64}
    found = {difference.key: difference for difference in fingerprint_differences(was, now)}
    assert {key: difference.effect for key, difference in found.items()} == {
        "data.train": REFUSE,
        "data.held_out": WARN,
    }
    assert str(found["data.train"]) == "data.train: was aaaaaaaaaaaa…, now dddddddddddd…"
    (accepted,) = (d for d in fingerprint_differences(was, now, accepted=["data.train"]) if d.key == "data.train")
    assert accepted.effect is WARN


def test_a_fingerprint_that_was_not_there_is_a_difference() -> None:
    (found,) = fingerprint_differences({}, {"reward.right": "a"})
    assert (found.was, found.now, found.effect) == ("(nothing)", "a", REFUSE)


def test_other_versions_of_libraries_warn() -> None:
    (found,) = library_differences({"torch": "2.13", "x": "1"}, {"torch": "2.12", "x": "1"})
    assert str(found) == "version of torch: was 2.13, now 2.12"
    assert found.effect is WARN
