"""The files of samples: both forms, replaced as a whole, and never a reason to fail."""

from __future__ import annotations

import base64
import json
import logging
import math
from pathlib import Path

import pytest
from msgspec.structs import replace

from rollplex.protocol.inputs import RowShown, Thumbnail
from rollplex_coordinator.records.sample_files import SampleFiles
from rollplex_coordinator.records.sample_table import NOT_YET, table_of, with_rows
from support.files import PNG, completion, sample_table


def test_a_table_is_a_page_and_an_object_with_all_of_it(tmp_path: Path) -> None:
    files = SampleFiles(tmp_path)
    assert list(tmp_path.iterdir()) == []
    files.write(sample_table("<b>" + "x" * 10_000))
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == ["step_50.html", "step_50.json"]
    found = json.loads((tmp_path / "samples/step_50.json").read_text())
    assert (found["step"], found["version"], found["functions"], found["shown"]) == (50, 50, ["right"], True)
    (group,) = found["groups"]
    assert (group["row"], group["prompt"]) == (9, "what?")
    assert base64.b64decode(group["media"][0]["png"]) == PNG
    (response,) = group["responses"]
    assert response["completion"] == "<b>" + "x" * 10_000
    assert (response["reward"], response["rewards"], response["advantage"]) == (0.5, {"right": 1.0}, None)
    assert "&lt;b&gt;x" in (tmp_path / "samples/step_50.html").read_text()


def test_a_later_write_of_the_same_step_replaces_the_earlier(tmp_path: Path) -> None:
    files = SampleFiles(tmp_path)
    for text in ("first", "second"):
        files.write(sample_table(text))
    assert len(list((tmp_path / "samples").iterdir())) == 2
    page = (tmp_path / "samples/step_50.html").read_text()
    assert "second" in page
    assert "first" not in page


def test_a_folder_that_cannot_be_made_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "samples").write_text("a file")
    files = SampleFiles(tmp_path)
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            files.write(sample_table("", step=step))
    (warning,) = caplog.messages
    assert "set run.sample_every to 0" in warning
    assert (tmp_path / "samples").read_text() == "a file"


def test_a_number_that_was_not_given_is_none_in_a_table() -> None:
    given = replace(completion("a"), rewards={"right": math.nan}, advantage=-0.25)
    groups = table_of(
        step=3,
        version=3,
        rows=(9,),
        functions=("right",),
        completions=[given, replace(given, reward=math.nan, advantage=math.nan)],
        skipped={},
    ).groups
    (first, second) = groups[0].responses
    assert (first.reward, first.rewards, first.advantage) == (0.5, {"right": None}, -0.25)
    assert (first.sample, first.completion, first.tokens, first.stopped) == (1, "a", 2, True)
    assert (second.reward, second.rewards, second.advantage) == (None, {"right": None}, None)


def test_a_table_has_the_responses_of_its_groups_and_then_what_their_rows_look_like() -> None:
    table = table_of(
        step=3, version=3, rows=(9, 4), functions=("right",), completions=[completion("a")], skipped={1: "it raised"}
    )
    one, two = table.groups
    assert (one.row, one.missing, [item.completion for item in one.responses]) == (9, NOT_YET, ["a"])
    assert (two.row, two.skipped, two.responses) == (4, "it raised", ())
    assert not table.shown
    picture = Thumbnail(name="image 1", png=PNG, width=1, height=1)
    shown = with_rows(
        table, (RowShown(row=4, prompt="what?", media=(picture,), left_out=2), RowShown(row=9, problem="gone"))
    )
    one, two = shown.groups
    assert (one.missing, one.media, [item.completion for item in one.responses]) == ("gone", (), ["a"])
    assert (two.missing, two.prompt, two.media, two.left_out) == ("", "what?", (picture,), 2)
    assert shown.shown
