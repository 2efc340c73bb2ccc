from __future__ import annotations

import math
from typing import get_args

import pytest

from rollplex.errors import JournalError
from rollplex.journal import events
from rollplex.journal.events import Event, StopWhen, UnitKind, decode, encode, step_of, type_of
from rollplex.protocol.common import Device, ErrorReport, Kind, Role

DEVICE = Device(node=0, index=1)
ALL: list[Event] = [
    events.RunStarted(
        run="r1",
        pid=7,
        host="h",
        boot_id="b",
        seed=3,
        schedule="overlap",
        share_prefix=True,
        config_digest="d",
        iterations_wanted=5,
    ),
    events.RunEnded(run="r1", exit_code=0, reason="stopped over HTTP"),
    events.StopRequested(when=StopWhen.NOW, exit=True, source="http"),
    events.ErrorRaised(error=ErrorReport(kind="WaitError", what="no answer"), phase="TRAIN", step=4, service="prefix"),
    events.JournalReplaced(moved_to="/run/journal.sqlite.corrupt-1", why="malformed"),
    events.DeviceReady(
        device=DEVICE,
        gpu=1,
        uuid="GPU-1234",
        name="NVIDIA H200",
        driver="580.159",
        total_bytes=150_754_820_096,
        free_bytes=150_000_000_000,
        sharing_asked="mps",
        sharing_used="turns",
        why="the MPS daemon is not installed",
    ),
    events.ServiceStarted(service="prefix[0:1]", role=Role.PREFIX, device=DEVICE, incarnation=1, pid=12),
    events.StageDone(name="data check", start_s=1.0, end_s=1.25),
    events.ServiceReady(service="prefix[0:1]", role=Role.PREFIX, incarnation=1),
    events.ServiceDied(
        service="prefix[0:1]", role=Role.PREFIX, incarnation=1, pid=12, how="killed by SIGKILL", phase="SCORE"
    ),
    events.WeightsLoaded(version=0, digest="aa"),
    events.WorkersRestarting(
        number=1,
        allowed=3,
        service="prefix[0:1]",
        role=Role.PREFIX,
        error=ErrorReport(kind="ServiceDied", what="it died"),
        phase="SCORE",
        version=4,
        step=4,
        log_path="logs/prefix-1.log",
    ),
    events.WorkersRestarted(number=1, version=4, digest="bb", took_s=2.5, step=4),
    events.ServiceSwapped(
        role=Role.ROLLOUT, command=("serve",), replaced=("python",), incarnation=2, step=3, version=3, took_s=2.5
    ),
    events.SwapRefused(role=Role.ROLLOUT, command=("serve",), case="drain", got="a unit", needed="none"),
    events.PhaseEntered(phase="ROLLOUT", start_s=1.5, step=4),
    events.IterationStarted(step=4, version=4, rows=(8, 9)),
    events.UnitDone(
        step=4, kind=UnitKind.ACTOR_PREFIX, unit=0, service="prefix[0:1]", start_s=1.0, end_s=2.0, groups=(0, 1)
    ),
    events.GroupFinished(step=4, group=0, row=8, lengths=(3, 5), end_s=2.0),
    events.GroupRewarded(step=4, group=0, row=8, mean=0.5, std=None, start_s=2.0, end_s=2.5),
    events.GroupSkipped(step=4, group=1, row=9, function="reward", problem="raised"),
    events.IterationDone(step=4, version=5, metrics={"reward": 0.5, "kl": None}),
    events.EvalStarted(step=4, version=5, name="held-out", rows=12),
    events.EvalDone(step=4, version=5, name="held-out", metrics={"accuracy": 1.0}),
    events.LeaseGranted(lease=3, kind=Kind.INPUTS, owner="input", device=DEVICE, size_bytes=64, segment=2, step=4),
    events.LeaseWaiting(kind=Kind.WORKSPACE, owner="trainer", device=DEVICE, size_bytes=64, free_bytes=1),
    events.LeaseReleased(lease=3, kind=Kind.INPUTS, owner="input", device=DEVICE, size_bytes=64, held_bytes=64),
    events.MemoryObserved(
        device=DEVICE,
        phase="TRAIN",
        step=3,
        used_bytes=3 * 2**30,
        segments_bytes=2**31,
        private_bytes={"prefix": 2**29},
        held_bytes={"prefix": 2**28},
        overhead_bytes=2**29,
        difference_bytes=-1,
    ),
    events.UpdateBegin(step=4, version=4),
    events.UpdateCommitted(step=4, version=5, digest="abc", start_s=3.0, end_s=3.5),
    events.UpdateSkipped(step=4, version=4, reason="a gradient is not finite"),
    events.CheckpointSaved(step=4, version=5, folder="/run/checkpoints/step_4", size_bytes=1_000),
]


def test_the_examples_cover_every_event() -> None:
    assert {type(event) for event in ALL} == set(get_args(Event))


@pytest.mark.parametrize("event", ALL, ids=type_of)
def test_every_event_comes_back_from_its_json_unchanged(event: Event) -> None:
    payload = encode(event)
    assert "\n" not in payload
    assert decode(payload) == event


def test_an_event_knows_its_step_where_it_has_one() -> None:
    assert step_of(events.UpdateBegin(step=4, version=4)) == 4
    assert step_of(ALL[0]) is None


def test_a_number_that_is_not_finite_is_kept_as_none() -> None:
    done = events.IterationDone(step=1, version=1, metrics={"loss": math.nan, "grad_norm": math.inf, "reward": 1.0})
    assert decode(encode(done)) == events.IterationDone(
        step=1, version=1, metrics={"loss": None, "grad_norm": None, "reward": 1.0}
    )


def test_text_that_utf8_cannot_carry_does_not_hide_the_error_it_is_in() -> None:
    bad_name = b"caf\xe9.png".decode("utf-8", "surrogateescape")
    event = events.ErrorRaised(error=ErrorReport(kind="DataError", what="no image", where=bad_name), phase="LOAD")
    read = decode(encode(event))
    assert isinstance(read, events.ErrorRaised)
    assert read.error.where == "caf\\udce9.png"


@pytest.mark.parametrize(
    "payload",
    [
        '{"type":"NoSuchEvent"}',
        '{"type":"UpdateBegin","step":-1,"version":0}',
        "[" * 100_000,
        "",
        '{"type":"RunEnded"}',
    ],
    ids=["unknown type", "value out of range", "nested", "empty", "field missing"],
)
def test_a_payload_that_is_no_event_is_a_journal_error(payload: str) -> None:
    with pytest.raises(JournalError, match="an event in the journal cannot be read"):
        decode(payload)
