"""From a checked configuration to a loaded node: what each worker is given, and what it may not answer."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from rollplex.config import Config
from rollplex.errors import ModelError, RewardError, StateError
from rollplex.journal.events import LeaseGranted, LeaseReleased, ServiceReady, StageDone
from rollplex.journal.phases import Phase
from rollplex.memory.segment import backend
from rollplex.presets import write_preset
from rollplex.protocol.common import Device, ErrorReport, Failed, Kind, Loaded, Parallel, Role
from rollplex.protocol.inputs import OpenData
from rollplex.protocol.prefix import LoadPrefix
from rollplex.protocol.reward import OpenRewards, RequiredColumns, RewardsOpened
from rollplex.protocol.rollout import LoadRollout
from rollplex.protocol.trainer import LoadTrainer, Publish, Published, Shards
from rollplex_coordinator.decisions.fleet import fleet_of
from rollplex_coordinator.decisions.leases import Reservation
from rollplex_coordinator.decisions.ledger import Ledger
from rollplex_coordinator.memory.caps import Caps
from rollplex_coordinator.memory.device_sizes import sizes_of
from rollplex_coordinator.memory.holder import Holder
from rollplex_coordinator.memory.leasing import Memory
from rollplex_coordinator.memory.names import ROLLOUT_KV
from rollplex_coordinator.memory.sizes import Sizes
from rollplex_coordinator.processes.link import Link, WorkerFailed
from rollplex_coordinator.records.record import Record
from rollplex_coordinator.steps.loading import check_data, load_models, open_rewards
from support.core import AMPLE, DEVICE, FakeJournal, NoSupervisor, make_config
from support.core import check_data as data_of
from support.workers import FakeHub, Workers


@dataclass
class Loading:
    """What `loading` needs of a node, over workers without processes."""

    config: Config
    link: Link
    record: Record
    memory: Memory
    holder: Holder
    workers: Workers
    journal: FakeJournal
    story: list[tuple[Any, ...]]
    run_dir: Path

    def load(self, caps: Mapping[Device, Caps] | None = None) -> dict[Role, Loaded]:
        return load_models(
            self,  # type: ignore[arg-type] # has what is used of a node
            self.memory,
            sizes_of(self.config, self.link.fleet),
            data_of(self.config),
            caps=caps,
        ).loaded

    def sent(self, kind: type[Any]) -> Any:
        (message,) = self.all(kind)
        return message

    def all(self, kind: type[Any]) -> list[Any]:
        return [entry[2] for entry in self.story if isinstance(entry[2], kind)]


@pytest.fixture
def make_loading(model_folder: Path, tmp_path: Path) -> Iterator[Callable[..., Loading]]:
    made: list[Loading] = []

    def make(**sections: Any) -> Loading:
        config, rng, story = make_config(model_folder, **sections), random.Random(0), list[tuple[Any, ...]]()
        workers, journal, holder = Workers(rng), FakeJournal(story), Holder(backend("host"))
        fleet = fleet_of(config)
        table_bytes = sizes_of(config, fleet).weights_bytes
        for kind in (LoadTrainer, LoadPrefix, LoadRollout):
            workers.answers[kind] = lambda m: [Loaded(cause=m.cause, table_bytes=table_bytes)]
        hub = FakeHub(workers, rng, lambda _: None, story, fleet)
        link = Link(hub, NoSupervisor(), 10.0, clock=lambda: 0.0, fleet=fleet)  # type: ignore[arg-type] # fakes
        link.await_peers(Role, 10.0)
        record = Record(tmp_path, journal)  # type: ignore[arg-type] # has what Record uses of a journal
        ledger = Ledger(dict.fromkeys(fleet.devices, AMPLE))
        for device in fleet.devices:
            ledger.reserve(
                Reservation(name=ROLLOUT_KV, device=device, size_bytes=AMPLE // 4, phases=frozenset({Phase.LOAD}))
            )
        memory = Memory(ledger, holder, record, DEVICE)
        memory.enter(Phase.LOAD)
        made.append(Loading(config, link, record, memory, holder, workers, journal, story, tmp_path))
        return made[-1]

    yield make
    for each in made:
        each.holder.close_all()
        each.record.close()


def test_all_workers_map_one_copy_of_the_weights_and_the_trainer_sees_both_arenas(
    make_loading: Callable[..., Loading],
) -> None:
    loading = make_loading()
    answers = loading.load()
    assert set(answers) == {Role.TRAINER, Role.PREFIX, Role.ROLLOUT}
    trainer, prefix, rollout = (loading.sent(kind) for kind in (LoadTrainer, LoadPrefix, LoadRollout))
    sizes = Sizes(loading.config)
    assert trainer.actor == prefix.actor == rollout.actor
    assert (trainer.actor.kind, trainer.actor.size_bytes) == (Kind.ACTOR_WEIGHTS, sizes.table.total_bytes)
    assert trainer.reference == prefix.reference
    assert trainer.reference.size_bytes == sizes.reference_bytes
    assert trainer.prefix_gradients == prefix.gradients != trainer.gradients
    assert trainer.gradients.size_bytes == prefix.gradients.size_bytes == sizes.gradient_bytes
    assert trainer.optimizer_state.size_bytes == sizes.optimizer_bytes
    assert trainer.model == prefix.model == rollout.model
    assert (trainer.model.table_hash, trainer.model.never_sampled) == (sizes.table.hash, (1, 2))
    assert prefix.temperature == trainer.algorithm.temperature == loading.config.rollout.temperature
    granted = [event for event in loading.journal.events if isinstance(event, LeaseGranted)]
    assert sorted(event.kind for event in granted) == sorted(
        [Kind.ACTOR_WEIGHTS, Kind.REFERENCE_WEIGHTS, Kind.GRADIENTS, Kind.GRADIENTS, Kind.OPTIMIZER_STATE]
    )
    ready = [event for event in loading.journal.events if isinstance(event, ServiceReady)]
    assert {event.service for event in ready} == {"trainer[0:0]", "prefix[0:0]", "rollout[0:0]"}
    *roles, whole = [event for event in loading.journal.events if isinstance(event, StageDone)]
    assert {event.name for event in roles} == {"load trainer", "load prefix", "load rollout"}
    assert whole.name == "load model"
    assert all(event.start_s == roles[0].start_s <= event.end_s <= whole.end_s for event in roles)


def test_weights_of_the_engines_own_are_leased_as_its_private_memory_to_the_end(
    make_loading: Callable[..., Loading],
) -> None:
    loading = make_loading(
        device={"kind": "cuda"},
        model={"dtype": "bfloat16"},
        rollout={"engine": "sglang", "sglang": {"own_weights": True}},
    )
    loading.load()
    rollout = loading.sent(LoadRollout)
    assert (rollout.engine.name, rollout.engine.own_weights) == ("sglang", True)
    owners = [
        event.owner
        for event in loading.journal.events
        if isinstance(event, LeaseGranted) and event.kind is Kind.ACTOR_WEIGHTS
    ]
    assert owners == [Role.TRAINER, Role.ROLLOUT]
    size = Sizes(loading.config).table.total_bytes
    assert loading.memory.leased().private == ((Role.ROLLOUT, size),)
    assert len(loading.holder.measured()) == 5, "no segment of it"


def test_the_pool_that_an_engine_comes_up_with_is_leased_until_it_is_loaded(
    make_loading: Callable[..., Loading],
) -> None:
    loading = make_loading(device={"kind": "cuda"}, model={"dtype": "bfloat16"}, rollout={"engine": "sglang"})
    loading.load()
    granted = [e for e in loading.journal.events if isinstance(e, LeaseGranted) and e.kind is Kind.ROLLOUT_KV]
    assert [event.size_bytes for event in granted] == [Sizes(loading.config).wants.starting_pool().size_bytes]
    released = [e for e in loading.journal.events if isinstance(e, LeaseReleased)]
    assert [event.lease for event in released] == [granted[0].lease]
    assert loading.memory.leased().private == ()


def test_each_worker_is_told_how_much_private_memory_it_may_take(make_loading: Callable[..., Loading]) -> None:
    loading = make_loading()
    loading.load({DEVICE: Caps(rollout=1, prefix=2, trainer=3)})
    told = [loading.sent(LoadRollout).engine.private_bytes]
    told += [loading.sent(kind).private_bytes for kind in (LoadPrefix, LoadTrainer)]
    assert told == [1, 2, 3]


def test_what_is_loaded_stays_to_the_end(make_loading: Callable[..., Loading]) -> None:
    loading = make_loading()
    loading.load()
    held = loading.holder.measured()
    for phase in (Phase.ROLLOUT, Phase.UPDATE, Phase.IDLE, Phase.ROLLOUT, Phase.DRAIN):
        loading.memory.enter(phase)
    assert loading.holder.measured() == held
    assert len(held) == 5


def test_without_a_divergence_term_there_is_no_reference(make_loading: Callable[..., Loading]) -> None:
    loading = make_loading(algorithm={"beta": 0.0})
    loading.load()
    assert loading.sent(LoadTrainer).reference is None
    assert loading.sent(LoadPrefix).reference is None
    assert Kind.REFERENCE_WEIGHTS not in {e.kind for e in loading.journal.events if isinstance(e, LeaseGranted)}


@pytest.mark.parametrize(("kind", "role"), [(LoadTrainer, "trainer"), (LoadPrefix, "prefix"), (LoadRollout, "rollout")])
def test_a_worker_with_another_table_is_refused_with_both_sizes(
    make_loading: Callable[..., Loading], kind: type, role: str
) -> None:
    loading = make_loading()
    loading.workers.answers[kind] = lambda m: [Loaded(cause=m.cause, table_bytes=77)]
    size = Sizes(loading.config).table.total_bytes
    with pytest.raises(
        ModelError, match=f"the {role} service has another parameter table; got 77 bytes; needed {size}"
    ):
        loading.load()


def test_the_input_child_checks_every_source_with_the_tokens_that_the_configuration_names(
    make_loading: Callable[..., Loading], caplog: pytest.LogCaptureFixture
) -> None:
    loading = make_loading(
        eval=[{"name": "held_out", "data": "other.jsonl"}],
        rollout={"never_sample": ["<x>"], "stop_tokens": ["<end>"]},
        data={"on_bad_row": "skip"},
    )
    found = data_of(loading.config)
    rejected = (replace(found.sources[0], rejected=("row 3: no prompt",), warnings=("odd",)), found.sources[1])
    loading.workers.answers[OpenData] = lambda m: [replace(found, cause=m.cause, sources=rejected)]
    data = check_data(loading)  # type: ignore[arg-type] # a Loading has what is used of a Node
    m = loading.sent(OpenData)
    assert [source.name for source in m.sources] == ["train", "held_out"]
    assert all(source.skip_bad_rows for source in m.sources)
    assert (m.never_sample, m.stop_tokens) == (("<x>",), ("<end>",))
    assert data.sources == rejected
    assert "data train: row 3: no prompt" in caplog.text
    assert "data train: odd" in caplog.text


def test_a_dataset_that_cannot_be_used_ends_the_run_in_the_child_s_words(make_loading: Callable[..., Loading]) -> None:
    loading = make_loading()
    report = ErrorReport(kind="DataError", what="there is no image", where="rows.jsonl, row 3")
    loading.workers.answers[OpenData] = lambda m: [Failed(cause=m.cause, error=report)]
    with pytest.raises(WorkerFailed, match="rows.jsonl, row 3: there is no image"):
        check_data(loading)  # type: ignore[arg-type] # a Loading has what is used of a Node


def test_the_reward_child_gets_functions_weights_and_limits_and_says_how_it_takes_them(
    make_loading: Callable[..., Loading], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    functions = [{"function": "a.py:right", "weight": 0.5}, {"function": "b:short", "weight": 0.0}]
    loading = make_loading(rewards={"functions": functions, "time_limit_s": 3.0, "memory_limit": 1024, "workers": 3})
    loading.workers.answers[OpenRewards] = lambda m: [
        RewardsOpened(
            cause=m.cause, names=("right", "short"), fingerprints=("a", "b"), notes=("right is TRL's", "short too")
        )
    ]
    found = open_rewards(loading, data_of(loading.config))  # type: ignore[arg-type] # a Loading has what is used of a Node
    assert found == {"right": "a", "short": "b"}
    m = loading.sent(OpenRewards)
    assert [(f.spec.rpartition(":")[2], f.weight) for f in m.functions] == [("right", 0.5), ("short", 0.0)]
    assert (m.time_limit_s, m.memory_limit_bytes, m.workers) == (3.0, 1024, 3)
    said = [record.getMessage() for record in caplog.records if record.name == "rollplex.coordinator"]
    assert said[-2:] == ["rewards: right is TRL's", "rewards: short too"]


@pytest.mark.parametrize("on_error", ["fail", "skip_group"])
def test_a_column_that_a_function_requires_and_a_row_lacks_is_refused_or_told(
    make_loading: Callable[..., Loading], caplog: pytest.LogCaptureFixture, on_error: str
) -> None:
    functions = [{"function": "a.py:right"}, {"function": "b:short"}]
    loading = make_loading(rewards={"functions": functions, "on_error": on_error})
    required = (RequiredColumns(), RequiredColumns(names=("solution",)))
    loading.workers.answers[OpenRewards] = lambda m: [
        RewardsOpened(cause=m.cause, names=("right", "short"), fingerprints=("a", "b"), required=required)
    ]
    data = data_of(loading.config)
    with_columns = replace(data, sources=(replace(data.sources[0], columns=(), place="f:1"),))
    expected = r"f:1: .*argument 'solution' of b:short"
    if on_error == "skip_group":
        assert open_rewards(loading, with_columns)  # type: ignore[arg-type] # a Loading has what is used of a Node
        assert re.search(f"groups of such rows will be left out: {expected}", caplog.text)
        return
    with pytest.raises(RewardError, match=f"^{expected}"):
        open_rewards(loading, with_columns)  # type: ignore[arg-type] # a Loading has what is used of a Node


# --- several devices ----------------------------------------------------------------------------------------------

TWO_BY_TWO = {"devices": 4, "training": 2, "rollout": 1}
APART = {"devices": 3, "training": 2, "placement": "disaggregated", "rollout_devices": 1}


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_preset("tiny-wide", tmp_path_factory.mktemp("wide"))


def published(m: Publish) -> list[Published]:
    return [
        Published(
            cause=m.cause,
            version=m.version,
            digest="d",
            refreshed_bytes=2**20,
            rebuilt_bytes=0,
            start_s=0.0,
            end_s=1.0,
        )
    ]


@pytest.fixture
def make_several(make_loading: Callable[..., Loading], wide_folder: Path) -> Callable[..., Loading]:
    """make_several(**parallel): workers answer with the size of their own weights."""

    def make(**parallel: Any) -> Loading:
        loading = make_loading(model={"path": str(wide_folder)}, parallel=parallel)
        for kind in (LoadTrainer, LoadPrefix, LoadRollout):
            loading.workers.answers[kind] = lambda m: [Loaded(cause=m.cause, table_bytes=m.actor.size_bytes)]
        loading.workers.answers[Publish] = published
        return loading

    return make


def test_with_one_device_nobody_is_told_of_others(make_loading: Callable[..., Loading]) -> None:
    loading = make_loading()
    loading.load()
    assert [loading.sent(kind).parallel for kind in (LoadTrainer, LoadPrefix, LoadRollout)] == [Parallel()] * 3
    assert loading.sent(LoadTrainer).shards == Shards()
    assert not loading.all(Publish)


def test_each_rank_maps_the_segments_of_its_device_and_is_told_where_it_stands(
    make_several: Callable[..., Loading],
) -> None:
    loading = make_several(**TWO_BY_TWO)
    assert set(loading.load()) == {Role.TRAINER, Role.PREFIX, Role.ROLLOUT}
    trainers, prefixes, rollouts = (loading.all(kind) for kind in (LoadTrainer, LoadPrefix, LoadRollout))
    assert [m.actor for m in trainers] == [m.actor for m in prefixes] == [m.actor for m in rollouts]
    assert len({m.actor.segment for m in trainers}) == 4
    assert [m.prefix_gradients for m in trainers] == [m.gradients for m in prefixes]
    assert [(m.parallel.replica, m.parallel.rank, m.parallel.device) for m in trainers] == [
        (0, 0, 0),
        (0, 1, 1),
        (1, 0, 0),
        (1, 1, 1),
    ]
    assert [m.parallel.replica for m in rollouts] == [0, 1, 2, 3]
    meets = [{m.parallel.meet for m in messages} for messages in (trainers, prefixes, rollouts)]
    assert meets == [{str(loading.run_dir / f"meet.{role}.1")} for role in ("trainer", "prefix", "rollout")]
    deadlines = loading.config.deadlines
    longest = max(deadlines.load_s, deadlines.unit_s, deadlines.update_s, deadlines.checkpoint_s)
    assert {m.parallel.collective_s for m in trainers} == {longest + 30.0}, "whoever hangs is named before that"


def test_a_trainer_is_told_of_the_segments_of_its_group_and_of_no_other(make_several: Callable[..., Loading]) -> None:
    loading = make_several(**TWO_BY_TWO)
    loading.load()
    first, second, third, fourth = loading.all(LoadTrainer)
    for pair in ((first, second), (third, fourth)):
        for one in pair:
            assert one.shards.actors == tuple(m.actor for m in pair)
            assert one.shards.gradients == tuple(m.gradients for m in pair)
            assert one.shards.states == tuple(m.optimizer_state for m in pair)
            assert one.shards.targets == ()


def test_devices_that_only_sample_are_filled_by_the_ranks_of_the_first_replica_in_turn(
    make_several: Callable[..., Loading],
) -> None:
    loading = make_several(devices=7, training=2, placement="disaggregated", rollout_devices=3)
    loading.load()
    trainers, rollouts = loading.all(LoadTrainer), loading.all(LoadRollout)
    filled = [[target.actor for target in m.shards.targets] for m in trainers]
    assert filled == [[rollouts[0].actor, rollouts[2].actor], [rollouts[1].actor], [], []]
    assert {(t.parallel.training, t.parallel.rollout) for m in trainers for t in m.shards.targets} == {(1, 1)}
    assert len(loading.holder.measured()) == 4 * 5 + 3


def test_one_version_is_published_by_every_trainer_when_all_have_loaded(make_several: Callable[..., Loading]) -> None:
    loading = make_several(**APART)
    loading.load()
    kinds = [type(entry[2]) for entry in loading.story if entry[0] == "send"]
    assert kinds == [LoadTrainer] * 2 + [LoadPrefix] * 2 + [LoadRollout] + [Publish] * 2
    assert {m.version for m in loading.all(Publish)} == {0}
    stages = [event.name for event in loading.journal.events if isinstance(event, StageDone)]
    assert stages[-2:] == ["publish weights", "load model"]
    assert "load trainer[0:1]" in stages


def test_a_rank_whose_weights_have_another_size_is_named_by_its_device(make_several: Callable[..., Loading]) -> None:
    loading = make_several(**TWO_BY_TWO)
    loading.workers.answers[LoadRollout] = lambda m: [Loaded(cause=m.cause, table_bytes=m.parallel.replica)]
    with pytest.raises(ModelError, match=r"the rollout\[0:0\] service has another parameter table; got 0 bytes"):
        loading.load()


def test_a_role_is_on_policy_if_all_its_processes_are(make_several: Callable[..., Loading]) -> None:
    loading = make_several(**TWO_BY_TWO)
    loading.workers.answers[LoadRollout] = lambda m: [
        Loaded(cause=m.cause, table_bytes=m.actor.size_bytes, on_policy=m.parallel.replica != 2)
    ]
    found = loading.load()
    assert (found[Role.ROLLOUT].on_policy, found[Role.PREFIX].on_policy) == (False, True)


def test_a_file_that_an_earlier_attempt_left_is_met_by_no_more(make_several: Callable[..., Loading]) -> None:
    loading = make_several(**TWO_BY_TWO)
    (loading.run_dir / "meet.trainer.1").touch()
    loading.load()
    assert {Path(m.parallel.meet).name for m in loading.all(LoadTrainer)} == {"meet.trainer.2"}
    assert {Path(m.parallel.meet).name for m in loading.all(LoadPrefix)} == {"meet.prefix.1"}


def test_replicas_that_have_loaded_different_weights_are_refused(make_several: Callable[..., Loading]) -> None:
    loading = make_several(**TWO_BY_TWO)
    honest = loading.workers.answers[Publish]
    digests = iter(("a", "b", "a", "c"))
    loading.workers.answers[Publish] = lambda m: [replace(honest(m)[0], digest=next(digests))]
    with pytest.raises(StateError, match="Replicas have different weights; got digest c on device 0:3; needed b"):
        loading.load()


def test_each_process_gets_the_cap_of_its_device(make_several: Callable[..., Loading]) -> None:
    loading = make_several(**APART)
    caps = {Device(index=n): Caps(rollout=n + 1, prefix=n + 10, trainer=n + 100) for n in range(3)}
    loading.load(caps)
    assert [message.private_bytes for message in loading.all(LoadTrainer)] == [100, 101]
    assert [message.private_bytes for message in loading.all(LoadPrefix)] == [10, 11]
    assert [message.engine.private_bytes for message in loading.all(LoadRollout)] == [3]


def test_each_engine_comes_up_with_a_pool_on_its_own_device(make_loading: Callable[..., Loading]) -> None:
    loading = make_loading(
        device={"kind": "cuda"},
        model={"dtype": "bfloat16"},
        rollout={"engine": "sglang"},
        parallel={"devices": 2},
    )
    loading.workers.answers[Publish] = published
    loading.load()
    pools = [e for e in loading.journal.events if isinstance(e, LeaseGranted) and e.kind is Kind.ROLLOUT_KV]
    assert [event.device for event in pools] == [DEVICE, Device(index=1)]
    gone = [e.lease for e in loading.journal.events if isinstance(e, LeaseReleased)]
    assert gone == [event.lease for event in pools]
    assert [loading.memory.leased(event.device).private for event in pools] == [(), ()]
