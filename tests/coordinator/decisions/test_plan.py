"""Units are a pure function of numbers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollplex_coordinator.decisions.plan import plan_step

sizes = st.integers(0, 9)


@given(st.integers(1, 20), sizes, sizes, sizes)
def test_every_group_is_in_one_unit_of_each_kind_and_in_order(
    groups: int, decode: int, prefix: int, suffix: int
) -> None:
    plan = plan_step(groups, decode_prompts=decode, prefix_prompts=prefix, suffix_prompts=suffix)
    everything = list(range(groups))
    assert [g for unit in plan.decode for g in unit] == everything
    assert [g for unit in plan.prefix for g in unit.groups] == everything
    assert [g for unit in plan.suffix for g in unit.groups] == everything
    assert plan.num_groups == groups


@given(st.integers(1, 20), sizes, sizes)
def test_suffix_units_are_pieces_of_their_prefix_unit(groups: int, prefix: int, suffix: int) -> None:
    plan = plan_step(groups, decode_prompts=0, prefix_prompts=prefix, suffix_prompts=suffix)
    for unit in plan.prefix:
        assert tuple(g for index in unit.suffix for g in plan.suffix[index].groups) == unit.groups
        assert all(plan.suffix[index].prefix == unit.index for index in unit.suffix)
        assert len(unit.groups) <= (prefix or groups)


def test_zero_means_everything_together() -> None:
    plan = plan_step(5, decode_prompts=0, prefix_prompts=0, suffix_prompts=0)
    assert len(plan.decode) == len(plan.prefix) == len(plan.suffix) == 1


@given(st.integers(1, 20), sizes, sizes, sizes, st.integers(1, 5), st.integers(1, 5))
def test_every_unit_belongs_to_one_engine_or_replica_and_suffixes_follow_their_prefix(
    groups: int, decode: int, prefix: int, suffix: int, engines: int, replicas: int
) -> None:
    plan = plan_step(
        groups,
        decode_prompts=decode,
        prefix_prompts=prefix,
        suffix_prompts=suffix,
        engines=engines,
        replicas=replicas,
    )
    alone = plan_step(groups, decode_prompts=decode, prefix_prompts=prefix, suffix_prompts=suffix)
    assert (plan.decode, plan.prefix, plan.suffix) == (alone.decode, alone.prefix, alone.suffix)
    decoded = [plan.decode_of(engine) for engine in range(engines)]
    assert sorted(unit for units in decoded for unit in units) == list(range(len(plan.decode)))
    assert all(plan.engine_of(unit) == engine for engine, units in enumerate(decoded) for unit in units)
    for replica in range(replicas):
        units = plan.prefix_of(replica)
        assert all(plan.replica_of(unit) == replica for unit in units)
        assert plan.suffix_of(replica) == tuple(s.index for s in plan.suffix if s.prefix in units)
    assert sum(len(plan.prefix_of(replica)) for replica in range(replicas)) == len(plan.prefix)


@given(st.integers(1, 30), st.integers(1, 5))
def test_a_share_for_each_replica_makes_one_unit_of_each(groups: int, replicas: int) -> None:
    plan = plan_step(
        groups, decode_prompts=0, prefix_prompts=-(-groups // replicas), suffix_prompts=0, replicas=replicas
    )
    assert all(len(plan.prefix_of(replica)) <= 1 for replica in range(replicas))
