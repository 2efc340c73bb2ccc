"""The SVG: valid, the same every time, and no text over another or out of its box."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollplex.errors import ConfigError
from rollplex.trace.marks import Chapter
from rollplex.trace.palette import BOXES
from rollplex.trace.picture import WIDTH, draw
from rollplex.trace.source import Source
from rollplex.trace.steps import Steps
from rollplex.trace.svg import Canvas, text_width
from support.journals import JournalScript, run_of

SVG = "{http://www.w3.org/2000/svg}"


def chapters(journal: Path) -> list[Chapter]:
    with Source(journal) as source:
        return [chapter for chapter in source.chapters(Steps()) if chapter.done]


def parsed(text: str) -> ET.Element:
    return ET.fromstring(text)  # noqa: S314 - our own text


def texts(root: ET.Element) -> list[tuple[float, float, float, str]]:
    """Left, right, baseline and words of every text."""
    found = []
    for element in root.iter(f"{SVG}text"):
        words = element.text or ""
        x, y, width = float(element.attrib["x"]), float(element.attrib["y"]), text_width(words)
        shift = {"n": -width, "m": -width / 2}.get(element.attrib["class"], 0.0)
        found.append((x + shift, x + shift + width, y, words))
    return found


def assert_readable(root: ET.Element) -> None:
    height = float(root.attrib["height"])
    found = texts(root)
    for left, right, y, words in found:
        assert left >= 0, words
        assert right <= WIDTH, words
        assert 8 <= y <= height, words
    for number, (left, right, y, words) in enumerate(found):
        for other_left, other_right, other_y, other in found[number + 1 :]:
            assert abs(y - other_y) >= 11 or right <= other_left or other_right <= left, (words, other)


def test_the_picture_has_a_lane_for_each_service_and_a_box_for_each_slice(tmp_path: Path) -> None:
    root = parsed(draw(chapters(run_of(tmp_path, 2)), "digits-1 (overlap)"))
    words = [text for *_, text in texts(root)]
    assert words.count("prefix") == words.count("rollout") - 2 == words.count("trainer") == 1  # two phases are rollout
    boxes = [rect.attrib["class"] for rect in root.iter(f"{SVG}rect")]
    counts = {kind: boxes.count(f"k-{kind}") - 1 for kind in BOXES}  # one is the legend's
    assert counts == {
        "prefill": 2,
        "decode": 2,
        "reference_prefix": 2,
        "actor_prefix": 4,
        "score": 4,
        "prefix_backward": 4,
        "suffix": 4,
        "vote": 2,
        "optimizer": 2,
        "reward": 4,
    }
    assert boxes.count("w") == 2
    assert "digits-1 (overlap), iterations 0 to 1: 100% of prefix forward time in the rollout's window" in words


def test_boxes_are_where_their_times_are(tmp_path: Path) -> None:
    root = parsed(draw(chapters(run_of(tmp_path, 1)), "r"))
    (decode, _legend) = [r for r in root.iter(f"{SVG}rect") if r.attrib["class"] == "k-decode"]
    ticks = {text: (left + right) / 2 for left, right, _, text in texts(root) if text.isdigit()}
    per_ms = (ticks["100"] - ticks["0"]) / 100  # 0 is the beginning of ROLLOUT, 10 ms after the iteration's
    assert float(decode.attrib["x"]) == pytest.approx(ticks["0"] + 30 * per_ms, abs=0.02)
    assert float(decode.attrib["width"]) == pytest.approx(60 * per_ms, abs=0.02)


def test_nothing_is_fetched_or_run_and_both_colour_schemes_are_there(tmp_path: Path) -> None:
    text = draw(chapters(run_of(tmp_path, 1)), "r")
    root = parsed(text)
    tags = {element.tag.removeprefix(SVG) for element in root.iter()}
    assert tags == {"svg", "title", "style", "rect", "line", "text"}
    assert "prefers-color-scheme:dark" in text
    assert "url(" not in text
    assert "@import" not in text
    assert text.count("http") == 1  # the namespace
    assert next(iter(root.iter(f"{SVG}rect"))).attrib["class"] == "bg"


def test_the_same_iterations_give_the_same_bytes(tmp_path: Path) -> None:
    journal = run_of(tmp_path, 3)
    assert draw(chapters(journal), "r") == draw(chapters(journal), "r")


@pytest.mark.parametrize("iterations", [1, 2, 7, 20])
def test_texts_neither_overlap_nor_leave_the_picture(tmp_path: Path, iterations: int) -> None:
    name = "digits-quick-20260101-120000-abcdef (overlap)"
    assert_readable(parsed(draw(chapters(run_of(tmp_path, iterations)), name)))


def test_a_long_name_is_shortened_so_that_the_share_stays_readable(tmp_path: Path) -> None:
    root = parsed(draw(chapters(run_of(tmp_path, 1)), "n" * 200))
    assert_readable(root)
    end = "n…, iteration 0: 100% of prefix forward time in the rollout's window"
    assert any(words.endswith(end) for *_, words in texts(root))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=150), st.lists(st.floats(0.2, 3_000.0), min_size=1, max_size=6))
def test_whatever_the_name_and_the_pace_it_stays_valid_and_readable(
    tmp_path_factory: pytest.TempPathFactory, name: str, pauses: list[float]
) -> None:
    with JournalScript(tmp_path_factory.mktemp("run")) as script:
        at_s = 5.0
        for step, pause in enumerate(pauses):
            script.iteration(step, at_s)
            at_s += pause
    assert_readable(parsed(draw(chapters(script.path), name)))


def test_a_label_is_left_out_where_its_box_is_too_narrow(tmp_path: Path) -> None:
    words = [text for *_, text in texts(parsed(draw(chapters(run_of(tmp_path, 1)), "r")))]
    assert "reference" in words
    many = [text for *_, text in texts(parsed(draw(chapters(run_of(tmp_path / "many", 20)), "r")))]
    assert "reference" not in many
    assert "actor" not in many


def test_a_journal_that_does_not_tell_prefill_shows_the_unit_as_decode(tmp_path: Path) -> None:
    told = chapters(run_of(tmp_path, 1))
    for chapter in told:
        chapter.marks = [mark for mark in chapter.marks if mark.kind not in {"prefill", "decode"}]
    boxes = [rect.attrib["class"] for rect in parsed(draw(told, "r")).iter(f"{SVG}rect")]
    assert boxes.count("k-decode") == 2  # the unit and the legend
    assert "k-prefill" not in boxes


def test_no_iteration_and_too_many_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="0 finished"):
        draw([], "r")
    with pytest.raises(ConfigError, match="21 finished.*1 to 20"):
        draw(chapters(run_of(tmp_path, 21)), "r")


def test_texts_and_titles_are_escaped() -> None:
    canvas = Canvas()
    canvas.text(0, 0, "<b>&\x00\ud800")
    canvas.rect(0, 0, (1, 1), "c", title="a<b")
    root = parsed(canvas.document((10, 10), [], '"quoted" <title>'))
    assert [element.text for element in root.iter(f"{SVG}text")] == ["<b>&??"]
    assert root.attrib["aria-label"] == '"quoted" <title>'
