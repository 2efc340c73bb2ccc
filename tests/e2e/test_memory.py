"""One budget: prompts wait instead of failing, what cannot fit is refused early, and the weights exist once."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from rollplex.journal.events import LeaseGranted, LeaseReleased, LeaseWaiting, ServiceReady, UpdateCommitted
from rollplex.layout.parameters import parameter_table
from rollplex.layout.shape import read_shape
from rollplex.protocol.common import Kind
from support.nodes import Finished, Project, Start

ITERATIONS = 2
TWO = 2


def numbers_of(table: str, name: str) -> list[int]:
    """The numbers of one line of a memory table."""
    line = next(line for line in table.splitlines() if name in line)
    return [int(number.replace(",", "")) for number in re.findall(r"\d{1,3}(?:,\d{3})+|\d{4,}", line)]


@pytest.fixture(scope="module")
def refused(start: Start) -> Finished:
    """A budget far below the minimum."""
    return start("--iterations", "1", overrides={"memory.budget": "1MiB"}).wait()


@pytest.fixture(scope="module")
def ample(start: Start) -> Finished:
    return start("--iterations", str(ITERATIONS)).wait()


@pytest.fixture(scope="module")
def scarce(start: Start, refused: Finished) -> Finished:
    """A budget at which at most two prompts' actor prefixes fit at once."""
    return start("--iterations", str(ITERATIONS), overrides={"memory.budget": room_for_two(refused)}).wait()


def room_for_two(refused: Finished) -> int:
    """In the fullest phase one unit fits; once the rollout's K/V is given back, two."""
    return max(numbers_of(refused.stderr, "minimum")) + max(numbers_of(refused.stderr, "units that can wait")) // 8


def test_a_budget_below_the_minimum_is_refused_before_anything_loads_with_the_table(refused: Finished) -> None:
    assert refused.code == 2
    assert "does not fit into the memory budget" in refused.stderr
    for word in ("actor_weights", "minimum", "budget", "short by", "ROLLOUT", "TRAIN"):
        assert word in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not refused.of(ServiceReady)
    assert not refused.of(LeaseGranted)


@pytest.mark.timeout(200)
def test_prompts_wait_for_memory_and_the_bits_are_those_of_an_ample_budget(ample: Finished, scarce: Finished) -> None:
    assert (ample.code, scarce.code) == (0, 0), scarce.stderr
    assert not ample.of(LeaseWaiting)
    assert {w.kind for w in scarce.of(LeaseWaiting)} >= {Kind.PREFIX_ACTIVATIONS, Kind.ACTOR_PREFIX_KV}
    assert most_held(ample, Kind.ACTOR_PREFIX_KV) == 4
    assert most_held(scarce, Kind.ACTOR_PREFIX_KV) == TWO
    assert scarce.checkpoint() == ample.checkpoint()
    assert [e.digest for e in scarce.of(UpdateCommitted)] == [e.digest for e in ample.of(UpdateCommitted)]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("activations", ["layers", "recompute"])
def test_prefixes_that_are_computed_again_give_the_bits_of_those_that_are_kept(
    start: Start, ample: Finished, activations: str
) -> None:
    again = start("--iterations", str(ITERATIONS), overrides={"memory.prefix_activations": activations}).wait()
    assert (ample.code, again.code) == (0, 0), again.stderr
    assert (Kind.PREFIX_ACTIVATIONS in {lease.kind for lease in again.of(LeaseGranted)}) == (activations == "layers")
    held = {lease.lease: lease.held_bytes for lease in again.of(LeaseReleased)}
    purposes = [lease for lease in again.of(LeaseGranted) if lease.kind is Kind.WORKSPACE and lease.owner == "prefix"]
    assert all(held[lease.lease] for lease in purposes), "backwards too say what they held"
    assert again.checkpoint() == ample.checkpoint()
    assert [e.digest for e in again.of(UpdateCommitted)] == [e.digest for e in ample.of(UpdateCommitted)]


def most_held(run: Finished, kind: Kind) -> int:
    held: set[int] = set()
    most = 0
    for record in run.records:
        if isinstance(event := record.event, LeaseGranted) and event.kind is kind:
            held.add(event.lease)
        elif isinstance(event, LeaseReleased):
            held.discard(event.lease)
        most = max(most, len(held))
    return most


def test_leases_never_exceed_the_budget(scarce: Finished, refused: Finished) -> None:
    budget = room_for_two(refused)
    held: dict[int, int] = {}
    for record in scarce.records:
        if isinstance(event := record.event, LeaseGranted):
            held[event.lease] = event.size_bytes
        elif isinstance(event, LeaseReleased):
            del held[event.lease]
        assert sum(held.values()) <= budget


def test_the_first_steps_inputs_are_made_while_models_load(ample: Finished) -> None:
    events = [record.event for record in ample.records]
    inputs = next(n for n, event in enumerate(events) if isinstance(event, LeaseGranted) and event.kind is Kind.INPUTS)
    loaded = [n for n, event in enumerate(events) if isinstance(event, ServiceReady)]
    assert inputs < min(loaded)


def memfd_bytes(pid: int) -> dict[str, int]:
    """Names and sizes of the segments that a process holds, as the kernel sees them."""
    found = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(entry.readlink())
            if "memfd:rollplex" in target:
                found[target] = entry.stat().st_size
        except OSError:
            continue  # closed while we looked
    return found


@pytest.mark.timeout(200)
def test_segments_are_within_their_leases_whenever_one_looks_and_equal_them_at_rest(start: Start) -> None:
    node = start("--serve", "--iterations", "100000", overrides={"run.iterations": 100000})
    node.until_iterations(1)
    pid = node.pids()["coordinator"]
    with node.api() as api:
        for _ in range(20):
            before = api.get("/ledger").json()
            segments = memfd_bytes(pid)
            after = api.get("/ledger").json()
            possible = {lease["lease"]: lease for view in (before, after) for lease in view["leases"]}
            leased = sum(lease["size_bytes"] for lease in possible.values() if lease["segment"] is not None)
            assert sum(segments.values()) <= leased
            for view in (before, after):
                assert sum(lease["size_bytes"] for lease in view["leases"]) <= view["devices"][0]["budget_bytes"]
        api.post("/stop", json={"when": "after_iteration", "exit": False}).raise_for_status()
        node.until(lambda: api.get("/status").json()["phase"] == "IDLE", "idleness")
        leased = [lease["size_bytes"] for lease in api.get("/ledger").json()["leases"] if lease["segment"] is not None]
        assert sorted(memfd_bytes(pid).values()) == sorted(leased)
        node.process.terminate()
    assert node.wait().code == 0


@pytest.mark.timeout(200)
def test_one_element_changed_in_the_trainer_is_seen_by_rollout_and_prefix(start: Start, project: Project) -> None:
    poking = [sys.executable, str(Path(__file__).parents[1] / "support" / "poking_trainer.py")]
    node = start("--serve", overrides={"services.trainer": poking})
    with node.api() as api:
        node.until(lambda: api.get("/status").json()["phase"] == "IDLE", "the loaded node")
        before, _, after = (api.post("/services/digests", json={}).json()["digests"] for _ in range(3))
        leases = api.get("/ledger").json()["leases"]
        api.post("/stop", json={"when": "now", "exit": True}).raise_for_status()
    assert node.wait().code == 0
    assert {d["service"] for d in before} == {"trainer[0:0]", "prefix[0:0]", "rollout[0:0]"}
    # The trainer changes an element when it is asked for the second time; the messages carry no tensor.
    assert len({d["digest"] for d in before}) == len({d["digest"] for d in after}) == 1
    assert before[0]["digest"] != after[0]["digest"]
    weights = [lease for lease in leases if lease["kind"] == "actor_weights"]
    table = parameter_table(read_shape(project.folder / "model"), dtype="float32", freeze_vision=False)
    assert [lease["size_bytes"] for lease in weights] == [table.total_bytes]
