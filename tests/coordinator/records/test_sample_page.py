"""The page of samples: everything is in it, and nothing in it does anything, whatever the texts are."""

from __future__ import annotations

import base64
import hashlib
from html.parser import HTMLParser

import pytest
from msgspec.structs import replace

from rollplex.protocol.inputs import Thumbnail
from rollplex_coordinator.records.sample_page import MAX_CHARS, MAX_RESPONSES, page
from rollplex_coordinator.records.sample_table import SampleTable
from support.files import PNG, sample_response, sample_table

EVIL = "</pre></td><script>alert(1)</script> | <img src=x onerror=alert(1)> \"'&lt;"
TAGS = {
    *("html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "section", "div", "figure", "figcaption"),
    *("img", "span", "pre", "table", "thead", "tbody", "tr", "th", "td"),
}


class Read(HTMLParser):
    """Tags with their attributes, and the texts between."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def policy(self) -> str:
        (found,) = [m["content"] for m in self.of("meta") if m.get("http-equiv") == "Content-Security-Policy"]
        assert found is not None
        return found


def evil(text: str) -> SampleTable:
    """The same text wherever a text stands."""
    broken = Thumbnail(name=text, problem=text)
    table = sample_table(text, prompt=text, media=[Thumbnail(name=text, png=PNG, width=9, height=9), broken])
    (group,) = table.groups
    group = replace(group, responses=(replace(group.responses[0], rewards={text: 1.0}),))
    groups = (group, replace(group, missing=text, prompt="", media=()), replace(group, skipped=text))
    return replace(table, functions=(text,), groups=groups)


def test_texts_stay_texts_wherever_they_stand() -> None:
    read = Read(page(evil(EVIL)))
    assert {tag for tag, _ in read.tags} == TAGS
    assert not [name for _, attributes in read.tags for name in attributes if name.startswith("on") or name == "style"]
    assert all(image["src"] == f"data:image/png;base64,{base64.b64encode(PNG).decode()}" for image in read.of("img"))
    places = {"picture": 2 * 3, "prompt": 2, "missing": 1, "response": 2, "function": 2, "skipped": 1}
    assert sum(text.count(EVIL) for text in read.texts) == sum(places.values())
    assert all(image["alt"] == EVIL for image in read.of("img"))


def test_the_policy_allows_this_style_and_pictures_in_the_page_and_nothing_else() -> None:
    read = Read(page(sample_table("seven")))
    (style,) = [text for text in read.texts if ":root" in text]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert read.policy == (
        f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )
    assert "url(" not in style
    assert "@import" not in style
    assert "prefers-color-scheme: dark" in style


def test_a_response_has_its_reward_its_parts_and_its_advantage() -> None:
    table = sample_table("seven")
    (group,) = table.groups
    good, bad = (replace(sample_response(text), advantage=value) for text, value in (("seven", 1.25), ("six", -0.5)))
    none = replace(sample_response("…"), reward=None, rewards={"right": None}, stopped=False)
    read = Read(page(replace(table, groups=(replace(group, responses=(good, bad, none)),))))
    cells = [text for text in read.texts if text.strip()]
    at = cells.index("seven")
    assert cells[at : at + 5] == ["seven", "+1.250", "0.5", "1", "2"]
    at = cells.index("six")
    assert cells[at : at + 5] == ["six", "-0.500", "0.5", "1", "2"]
    at = cells.index("…")
    assert [cell.strip() for cell in cells[at : at + 6]] == ["…", "none", "none", "none", "2", "cut"]
    assert "what?" in cells
    assert any("mean reward 0.5" in cell for cell in cells)


def test_what_is_missing_says_why() -> None:
    table = sample_table("seven", media=[Thumbnail(name="image 1", problem="This is not an image; got 'a.png'")])
    (group,) = table.groups
    groups = (
        replace(group, left_out=3),
        replace(group, missing="no such row", media=()),
        replace(group, skipped="score: it raised", responses=()),
    )
    text = " ".join(Read(page(replace(table, groups=groups))).texts)
    for said in (
        "image 1 is not shown: This is not an image; got 'a.png'",
        "and 3 more",
        "Prompt and pictures are not shown: no such row",
        "Skipped: score: it raised",
    ):
        assert said in text


def test_control_characters_are_seen_and_long_texts_are_cut() -> None:
    text = page(sample_table("a\x00b\x1bc\x7fd\n\te" + "x" * MAX_CHARS))
    assert "a␀b␛c␡d\n\tex" in text
    assert "… and 10 more characters" in text
    assert not {chr(code) for code in (*range(32), 127)} - {"\n", "\t"} & set(text)


@pytest.mark.parametrize("count", [MAX_RESPONSES, MAX_RESPONSES + 5])
def test_a_large_group_is_cut(count: int) -> None:
    table = sample_table("")
    (group,) = table.groups
    group = replace(group, responses=tuple(sample_response(f"r{n}") for n in range(count)))
    read = Read(page(replace(table, groups=(group,))))
    assert len(read.of("tr")) == 1 + MAX_RESPONSES
    assert any("and 5 more responses" in text for text in read.texts) == (count > MAX_RESPONSES)


def test_small_pictures_are_enlarged_pixel_by_pixel() -> None:
    media = [Thumbnail(name="image 1", png=PNG, width=size, height=28) for size in (28, 96)]
    assert [image.get("class") for image in Read(page(sample_table("", media=media))).of("img")] == ["small", None]
