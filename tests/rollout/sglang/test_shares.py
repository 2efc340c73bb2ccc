"""Two sets of decode graphs over a stand-in for SGLang's graph backend: what is captured, what is replayed when."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from rollplex.multiprocessors import Beside
from rollplex_rollout.sglang import shares
from rollplex_rollout.sglang.shares import LimitedDecoding, limit_decoding, watch
from support.live_sglang import KERNELS, unavailable


class Stream:
    """Waits for others, in the story."""

    def __init__(self, name: str, story: list[str]) -> None:
        self.name, self._story = name, story

    def wait_stream(self, other: Stream) -> None:
        self._story.append(f"{self.name} waits for {other.name}")


class Graph:
    """Replays into the story."""

    def __init__(self, name: str, story: list[str]) -> None:
        self._name, self._story = name, story

    def replay(self) -> None:
        self._story.append(f"replay {self._name}")


class Backend:
    """FullCudaGraphBackend, as far as it is relied upon."""

    def __init__(self, story: list[str]) -> None:
        self.story = story
        self._capture_stream = Stream("whole", story)
        self._graphs: dict[int, Graph] = {}
        self._outputs: dict[int, str] = {}

    def capture_one(self, shape_key: int, forward_fn: Callable[[], str], *, post_warmup_hook: Any = None) -> None:
        name = f"{forward_fn()} {shape_key} on {self._capture_stream.name}"
        self.story.append(f"capture {name}")
        self._graphs[shape_key], self._outputs[shape_key] = Graph(name, self.story), f"logits of {name}"

    def replay(self, shape_key: int, static_forward_batch: Any) -> str:
        self._graphs[shape_key].replay()
        return self._outputs[shape_key]


class World:
    """Hooks as SGLang's registry would put them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.story: list[str] = []
        self.beside = False
        self.backend = Backend(self.story)
        stream: Any = Stream("limited", self.story)
        monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
        self.hooks = LimitedDecoding(stream, lambda: self.beside)

    def capture(self, *sizes: int) -> None:
        for size in sizes:
            self.hooks.capture_one(Backend.capture_one, self.backend, size, lambda: "decode", post_warmup_hook=None)

    def replay(self, size: int) -> str:
        output: str = self.hooks.replay(Backend.replay, self.backend, size, None)
        return output


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_every_decode_graph_is_captured_twice_each_time_after_the_other_stream(world: World) -> None:
    world.hooks.capture(lambda: world.capture(8, 4))
    each = [
        "capture decode {} on whole",
        "limited waits for whole",
        "capture decode {} on limited",
        "whole waits for limited",
    ]
    assert world.story == [line.format(size) for size in (8, 4) for line in each]
    assert world.backend._capture_stream.name == "whole"


def test_a_step_beside_prefix_work_replays_the_limited_graph_and_any_other_the_whole_one(world: World) -> None:
    world.hooks.capture(lambda: world.capture(8))
    world.story.clear()
    outputs = []
    for world.beside in (False, True, True, False):
        outputs.append(world.replay(8))
    where = ["whole", "limited", "limited", "whole"]
    assert world.story == [f"replay decode 8 on {name}" for name in where]
    assert outputs == [f"logits of decode 8 on {name}" for name in where]


def test_graphs_that_are_not_of_decoding_stay_as_they_are(world: World) -> None:
    world.capture(8)
    world.beside = True
    assert world.replay(8) == "logits of decode 8 on whole"
    assert world.story == ["capture decode 8 on whole", "replay decode 8 on whole"]


def test_a_capture_that_fails_leaves_sglang_its_stream(world: World) -> None:
    def broken() -> str:
        if world.backend._capture_stream.name == "limited":
            raise RuntimeError("no memory")
        return "decode"

    def capture() -> None:
        world.hooks.capture_one(Backend.capture_one, world.backend, 8, broken)

    with pytest.raises(RuntimeError, match="no memory"):
        world.hooks.capture(capture)
    assert world.backend._capture_stream.name == "whole"
    world.capture(4)
    assert world.story[-1] == "capture decode 4 on whole", "the capture of decode graphs is over"


def test_with_the_whole_device_nothing_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("nothing is to be set up")

    monkeypatch.setattr(shares, "Multiprocessors", refuse)
    limit_decoding(1.0, "")


def test_what_the_coordinator_says_is_what_is_looked_at(tmp_path: Path) -> None:
    beside = Beside(tmp_path)
    look = watch(str(tmp_path))
    assert not look()
    beside.say(beside=True)
    assert look()


def test_where_nobody_says_anything_decoding_is_always_limited(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert watch(str(tmp_path))()
    assert "keeps to its share always" in caplog.text
    assert watch("")()


SCRIPT = """
from sglang.srt.plugins.hook_registry import HookRegistry
from rollplex.errors import EngineError
from rollplex_rollout.sglang import shares
hooks = shares.LimitedDecoding(None, lambda: True)
shares.install(hooks)
print(sorted(HookRegistry._patched) == sorted((shares.CAPTURE, shares.CAPTURE_ONE, shares.REPLAY)))
shares.REPLAY += "ed"
try:
    shares.install(hooks)
except EngineError as error:
    print(error.got)
"""


@pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "-")
def test_the_hooks_fit_the_real_sglang() -> None:
    path = os.pathsep.join([str(KERNELS), *(entry for entry in sys.path if entry)])
    environment = {**os.environ, "PYTHONPATH": path, "SGLANG_USE_CPU_ENGINE": "1"}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=110, env=environment).stdout
    fits, refused = told.splitlines()[-2:]
    assert fits == "True"
    assert refused.endswith("FullCudaGraphBackend.replayed")
