"""What is judged of a conversation that a test makes up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from rollplex.conformance.judging import require_received
from rollplex.conformance.line import Heard
from rollplex.conformance.sitting import Limits, Violation
from rollplex.protocol.common import DigestReply, Received


def conversation(received_s: float, late_s: float) -> Any:
    """Two instructions at once; the second is acknowledged only when the first has been answered."""
    done = late_s - 0.1
    told = [
        (0.0, Received(cause=1)),
        (done, DigestReply(cause=1, version=0, digest="d")),
        (late_s, Received(cause=2)),
        (late_s, DigestReply(cause=2, version=0, digest="d")),
    ]
    line = SimpleNamespace(heard=[Heard(message=message, at_s=at_s) for at_s, message in told])
    limits = Limits(received_s=received_s)
    return cast("Any", SimpleNamespace(line=line, sent_s={1: 0.0, 2: 0.0}, limits=limits, kind_of=lambda cause: "X"))


def test_who_acknowledges_only_when_it_has_computed_is_late() -> None:
    require_received(conversation(5.0, 0.9))
    with pytest.raises(Violation, match=r"after 1.20 s, and only when what ran had ended, needed within 1 s"):
        require_received(conversation(5.0, 1.2))


def test_beside_a_run_there_is_more_time_for_that_too() -> None:
    require_received(conversation(15.0, 2.5))
    with pytest.raises(Violation, match="within 3 s"):
        require_received(conversation(15.0, 3.5))
