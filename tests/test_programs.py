"""What Python runs for a command of ours is ours, wherever the user is."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from rollplex.programs import own

SECONDS = 60.0


@pytest.mark.parametrize("name", ["random", "dis", "evaluate", "rollplex_coordinator"])
def test_a_file_of_the_user_s_in_the_current_folder_is_not_run(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the user was run')\n")
    command = own("rollplex_coordinator", "--help")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert (done.returncode, "--run-dir" in done.stdout) == (0, True), done.stderr
