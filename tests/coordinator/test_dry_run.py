"""The report of a dry run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec.structs import replace

from rollplex_coordinator.decisions.peaks import plan_peak
from rollplex_coordinator.dry_run import report
from rollplex_coordinator.memory.budget import plan_memory, planned_blocks
from rollplex_coordinator.memory.sizes import Sizes
from support.core import DEVICE, NUM_ROWS, check_data, make_config, minimum_bytes


def lines(folder: Path, wanted: int = 100, **sections: Any) -> dict[str, str]:
    config = make_config(folder, **sections)
    return dict(report(config, check_data(config), wanted))


def test_it_says_what_would_run(model_folder: Path) -> None:
    found = lines(model_folder, run={"name": "job", "schedule": "stream"}, batching={"prefix_prompts": 2})
    assert found["run"] == "job: 100 iterations"
    assert found["schedule"] == "stream; prefixes are computed once per prompt"
    assert found["iteration"] == "4 prompts, 3 responses each, of at most 6 tokens"
    assert found["batching"] == "prompts that are computed together: 4 decoded, 2 prefixes, 2 suffixes"
    assert found["rewards"] == "score: imported"
    assert found["data"].startswith(f"train: {NUM_ROWS} rows, prompts of at most ")
    assert "evaluation" not in found
    assert found["checkpoints"] == "every 100 iterations and at the end; the newest 2 are kept"


def test_it_says_what_differs_from_the_ordinary(model_folder: Path) -> None:
    found = lines(
        model_folder,
        wanted=0,
        run={"share_prefix": False},
        algorithm={"beta": 0.0},
        checkpoint={"every": 0},
        eval=[{"name": "held_out", "data": "rows.jsonl"}],
    )
    assert found["run"] == "run: waits for `rollplex start N`"
    assert "once per response" in found["schedule"]
    assert found["reference"] == "no, algorithm.beta 0"
    assert found["evaluation"] == "held_out: at the end"
    assert found["checkpoints"] == "at the end; the newest 2 are kept"


def test_rows_that_were_left_out_are_counted(model_folder: Path) -> None:
    config = make_config(model_folder)
    data = check_data(config)
    (source,) = data.sources
    some = replace(data, sources=(replace(source, rejected=("row 3: no image", "row 7: no text")),))
    assert dict(report(config, some, 1))["data"].startswith(f"train: {NUM_ROWS} rows, 2 rejected, ")


def test_the_blocks_that_are_shown_are_those_that_are_checked(model_folder: Path) -> None:
    config = make_config(model_folder)
    sizes, data = Sizes(config), check_data(config)
    (peaks,) = plan_peak(planned_blocks(config, sizes, data, DEVICE))
    assert peaks.minimum_bytes == minimum_bytes(model_folder, {})
    assert plan_memory(config, sizes, data, DEVICE, peaks.minimum_bytes)
