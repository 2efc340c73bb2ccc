"""A program whose standard streams its starter had closed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = """
import os, sys
from rollplex.streams import open_standard_streams
open_standard_streams()
with open({file!r}, "w") as file:
    file.write(f"{{file.fileno()}} {{[os.readlink(f'/proc/self/fd/{{n}}') for n in (0, 1, 2)]}}")
print("out"); print("err", file=sys.stderr); sys.stdin.read()
"""


@pytest.mark.parametrize("closed", ["0<&- 1>&- 2>&-", "2>&-", "1>&-", "0<&-"])
def test_no_file_gets_the_place_of_a_standard_stream(tmp_path: Path, closed: str) -> None:
    file = tmp_path / "file"
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM.format(file=str(file)))
    command = f"exec {sys.executable} {program} </dev/null >/dev/null {closed}"
    code = subprocess.call(["sh", "-c", command], timeout=60)
    assert code == 0
    number, _, streams = file.read_text().partition(" ")
    assert int(number) > 2
    assert str(file) not in streams


def test_streams_that_are_there_stay(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM.format(file=str(tmp_path / "file")))
    done = subprocess.run([sys.executable, program], input="", capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("out\n", "err\n")
