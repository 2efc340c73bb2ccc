"""Which part of an engine a process starts, and what is told to whom when that comes to nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from rollplex.errors import EngineError
from rollplex.protocol.common import Parallel
from rollplex_rollout.sglang import starting
from rollplex_rollout.sglang.starting import meeting_file, start
from support.scripted_sglang import SPEC

if TYPE_CHECKING:
    from rollout.conftest import Node


class Line:
    """To the other ranks."""

    def __init__(self) -> None:
        self.failed: list[BaseException] = []

    @contextmanager
    def failing(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.failed.append(error)
            raise


class Made:
    """What was made of what."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.line, self.lines, self.files = Line(), list[Any](), list[Any]()
        self.closed = 0
        made = self

        class Runtime:
            def __init__(self, folder: Path, meeting: Path | None) -> None:
                made.files.append(meeting)

            def close(self) -> None:
                made.closed += 1

        def met(*_: Any) -> Line:
            return self.line

        monkeypatch.setattr(starting, "SglangRuntime", Runtime)
        monkeypatch.setattr(starting, "make_folder", lambda _: Path("unused"))
        monkeypatch.setattr(starting, "_met", met)
        monkeypatch.setattr(starting, "_up", lambda *_: ("remote", "actor"))
        monkeypatch.setattr(starting, "SglangEngine", lambda *given: ("leads", *given[2:]))
        monkeypatch.setattr(starting, "FollowingEngine", lambda *given: ("follows", *given[2:]))


def setup_of(node: Node, parallel: Parallel) -> Any:
    return dataclasses.replace(node.setup, engine=replace(SPEC), parallel=parallel)


def test_rank_0_leads_the_others_follow_and_one_alone_meets_nobody(
    shared_node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Made(monkeypatch)
    ranks = [
        Parallel(training=2, rollout=2, rank=rank, device=rank, replica=1, replicas=2, meet="/r/meet.rollout.1")
        for rank in (0, 1)
    ]
    found: list[Any] = [start(setup_of(shared_node, parallel)) for parallel in ranks]
    assert found == [("leads", "remote", "actor", made.line), ("follows", "remote", "actor", made.line)]
    assert made.files == [Path("/r/meet.rollout.1.sglang.1")] * 2
    alone: Any = start(setup_of(shared_node, Parallel(training=2, rollout=1, replica=1, replicas=2, meet="/r/meet")))
    assert alone == ("leads", "remote", "actor")
    assert made.files[2] is None
    assert made.closed == 0


def test_a_start_that_fails_is_told_to_the_other_ranks_and_leaves_nothing(
    shared_node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Made(monkeypatch)

    def fail(*_: Any) -> None:
        raise EngineError("SGLang has failed")

    monkeypatch.setattr(starting, "_up", fail)
    with pytest.raises(EngineError) as caught:
        start(setup_of(shared_node, Parallel(training=2, rollout=2, meet="/r/meet")))
    assert made.line.failed == [caught.value]
    assert made.closed == 1


def test_a_meeting_file_of_a_run_that_was_killed_is_out_of_the_way_before_anybody_meets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    class Runtime:
        def require_alive(self) -> None: ...

    for rank in (1, 0):
        parallel = Parallel(training=2, rollout=2, rank=rank, meet=str(tmp_path / "meet.rollout.1"))
        file = meeting_file(parallel)
        file.write_bytes(b"old")

        class Groups:
            tensor = None

        def meet(_: Any, degree: int, file: Path = file) -> Groups:
            assert degree == 2
            seen.append(file.exists())
            return Groups()

        monkeypatch.setattr(starting, "meet", meet)
        runtime: Any = Runtime()
        starting._met(parallel, runtime)
    assert seen == [True, False], "rank 0 sees to it"
