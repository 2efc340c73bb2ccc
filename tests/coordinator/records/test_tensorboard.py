"""The file is read back with another implementation of its format: tensorboardX's messages and checksums."""

from __future__ import annotations

import logging
import math
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import SessionLog  # type: ignore[import-untyped]
from tensorboardX.proto.types_pb2 import DT_STRING  # type: ignore[import-untyped]

from rollplex_coordinator.records.tensorboard import FLUSH_PERIOD_S, TensorBoard
from support.files import events_in, scalars_in


def test_each_row_is_one_event_with_all_its_numbers(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path / "tensorboard")
    first = {"reward": 0.25, "kl": -(2.0**-30), "completions/mean_length": 3.0, "updated": 1, "sampling/größe": 2.0}
    board.scalars(0, first)
    board.scalars(2**40 + 300, {"reward": 0.5})
    board.scalars(200, {f"metric_{n}": float(n) for n in range(100)}, "eval/held_out/")
    board.close()
    version, *rest = events_in(tmp_path)
    assert version.file_version == "brain.Event:2"
    assert all(abs(event.wall_time - version.wall_time) < 3600 for event in rest)
    one, two, three = scalars_in(tmp_path)
    assert one == (0, first)
    assert two == (2**40 + 300, {"reward": 0.5})
    assert three == (200, {f"eval/held_out/metric_{n}": float(n) for n in range(100)})


def test_what_is_no_finite_number_is_left_out(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path / "tensorboard")
    board.scalars(1, {"a": math.nan, "b": math.inf, "c": None, "d": "text", "e": 1e300, "f": 1.0})
    board.scalars(2, {"a": math.nan})
    board.close()
    assert scalars_in(tmp_path) == [(1, {"f": 1.0})]


def test_a_text_is_a_tensor_of_one_string_for_the_text_plugin(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path / "tensorboard")
    board.text(300, "samples", "**größe** 🙂 " + "x" * 1000)
    board.close()
    event = events_in(tmp_path)[-1]
    (value,) = event.summary.value
    assert (event.step, value.tag, value.WhichOneof("value")) == (300, "samples", "tensor")
    assert value.metadata.plugin_data.plugin_name == "text"
    assert value.tensor.dtype == DT_STRING
    assert [dim.size for dim in value.tensor.tensor_shape.dim] == [1]
    assert [text.decode() for text in value.tensor.string_val] == ["**größe** 🙂 " + "x" * 1000]


def test_an_image_is_there_with_its_size(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path / "tensorboard")
    board.image(7, "samples/group_0", b"\x89PNG" + bytes(300), 96, 200)
    board.close()
    event = events_in(tmp_path)[-1]
    (value,) = event.summary.value
    assert (event.step, value.tag) == (7, "samples/group_0")
    image = value.image
    assert (image.width, image.height, image.colorspace) == (96, 200, 3)
    assert image.encoded_image_string == b"\x89PNG" + bytes(300)


def test_a_resumed_run_declares_later_steps_void(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path / "tensorboard")
    board.restart(300)
    board.close()
    event = events_in(tmp_path)[-1]
    assert (event.step, event.session_log.status) == (300, SessionLog.START)


def test_readers_see_rows_after_a_while_also_when_none_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("rollplex_coordinator.records.tensorboard.time.monotonic", lambda: now[0])
    board = TensorBoard(tmp_path / "tensorboard")
    board.scalars(1, {"reward": 1.0})
    board.tick()
    assert scalars_in(tmp_path) == []
    now[0] += FLUSH_PERIOD_S
    board.tick()
    assert scalars_in(tmp_path) == [(1, {"reward": 1.0})]
    board.close()


def test_a_disk_that_refuses_is_told_once_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = open("/dev/full", "wb")  # noqa: PTH123, SIM115 - Path.open is what is replaced, and it is closed below
    monkeypatch.setattr(Path, "open", lambda *_: file)
    with caplog.at_level(logging.WARNING):
        board = TensorBoard(tmp_path / "tensorboard")
        for step in range(100):
            board.scalars(step, {f"metric_{n}": 1.0 for n in range(20)})
        board.tick()
        board.close()
    (warning,) = caplog.messages
    assert "No space left on device" in warning
    assert "set run.tensorboard to false" in warning
    assert file.closed


def test_a_folder_that_cannot_be_made_is_told_once_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tensorboard").write_text("a file")
    board = TensorBoard(tmp_path / "tensorboard")
    board.scalars(1, {"reward": 1.0})
    board.restart(2)
    board.tick()
    board.close()
    assert len(caplog.messages) == 1
    assert (tmp_path / "tensorboard").read_text() == "a file"


def test_the_writer_needs_neither_torch_nor_tensorboardx() -> None:
    code = (
        "import sys, rollplex_coordinator.run; sys.exit(bool({'torch', 'tensorboardX', 'google'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
