"""What the journal's last events say about the weights after a crash."""

from __future__ import annotations

import pytest

from rollplex.errors import StateError
from rollplex.journal.events import IterationStarted, RunStarted, UpdateBegin, UpdateCommitted
from rollplex_coordinator.decisions.crash import after_crash

STARTED = RunStarted(
    run="r", pid=1, host="h", boot_id="b", seed=0, schedule="serial", share_prefix=True, config_digest="c"
)


def begin(version: int, step: int = 0) -> UpdateBegin:
    return UpdateBegin(step=step, version=version)


def commit(version: int, step: int = 0) -> UpdateCommitted:
    return UpdateCommitted(step=step, version=version, digest="d", start_s=0.0, end_s=1.0)


def test_a_begin_without_commit_poisons_the_weights() -> None:
    between = IterationStarted(step=1, version=1, rows=(0,))
    assert after_crash([]) == "clean"
    assert after_crash([STARTED, begin(0), commit(1), between]) == "clean"
    assert after_crash([STARTED, begin(0), commit(1), between, begin(1, 1)]) == "poisoned"
    assert after_crash([commit(1), begin(1, 1), STARTED]) == "poisoned"
    assert after_crash([begin(1, 1), STARTED, begin(1, 1), commit(2, 1)]) == "clean"


@pytest.mark.parametrize("wrong", [commit(1, 3), commit(2), commit(0)])
def test_a_commit_that_does_not_belong_to_its_begin_is_refused(wrong: UpdateCommitted) -> None:
    with pytest.raises(StateError, match="does not belong to its BEGIN"):
        after_crash([begin(0), wrong])
