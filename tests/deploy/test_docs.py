"""The pages of docs/: links that lead somewhere, keys that exist, a navigation that leads to pages."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from rollplex.cli.app import app
from rollplex.config.reference import reference

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
LINK = re.compile(r"(?<!\\)!?\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)


class Loader(yaml.SafeLoader):
    """mkdocs.yml names Python functions of its theme."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda _loader, suffix, _node: suffix)


def text_of(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def slugs(page: Path) -> set[str]:
    """The anchors of a page's headings, as mkdocs and code hosts make them."""
    found = set()
    for heading in re.findall(r"^#{1,6} (.+)$", text_of(page), re.MULTILINE):
        plain = re.sub(r"[^\w\s-]", "", re.sub(r"[`*]", "", heading).lower()).strip()
        found |= {re.sub(r"[-\s]+", "-", plain), re.sub(r"\s", "-", plain)}
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_every_link_leads_to_a_page_and_a_heading_that_is_there(page: Path) -> None:
    for target in LINK.findall(text_of(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        there = (page.parent / name).resolve() if name else page
        assert there.exists(), f"{page.name}: {target}"
        assert not anchor or there.suffix != ".md" or anchor in slugs(there), f"{page.name}: {target}"


def test_a_link_that_leads_nowhere_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A heading, of `code`\n\n[there](#a-heading-of-code) and [not](#elsewhere)\n\n```\n[no](link.md)\n```\n"
    )
    assert LINK.findall(text_of(page)) == ["#a-heading-of-code", "#elsewhere"]
    assert "a-heading-of-code" in slugs(page)
    assert "elsewhere" not in slugs(page)


@pytest.mark.parametrize("name", ["coming-from-trl", "coming-from-verl", "coming-from-easyr1"])
def test_what_a_page_for_newcomers_calls_our_key_is_one(name: str) -> None:
    keys = set(re.findall(r"^\| `([a-z_.]+)`", reference(), re.MULTILINE))
    sections = {key.rpartition(".")[0] for key in keys}
    rows = [line.split("|") for line in (DOCS / f"{name}.md").read_text(encoding="utf-8").splitlines()]
    ours = [key for row in rows if len(row) == 5 for key in re.findall(r"`([a-z_.]+)`", row[2])]
    assert len(ours) > 25
    assert [key for key in ours if key not in keys | sections] == []


def nav(items: list[Any]) -> list[str]:
    found: list[str] = []
    for item in items:
        value = next(iter(item.values())) if isinstance(item, dict) else item
        found += nav(value) if isinstance(value, list) else [value]
    return found


def test_the_navigation_leads_to_pages_each_once() -> None:
    site = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)  # noqa: S506 - a safe loader
    listed = nav(site["nav"])
    assert len(listed) == len(set(listed))
    assert set(listed) <= {str(page.relative_to(DOCS)) for page in PAGES}


def test_the_site_loads_nothing_from_elsewhere() -> None:
    site = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)  # noqa: S506 - a safe loader
    assert site["theme"]["font"] is False
    assert not {"extra_javascript", "extra_css"} & set(site)


def test_every_page_is_in_the_navigation_but_decisions_and_plans_in_full() -> None:
    site = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)  # noqa: S506 - a safe loader
    pages = {str(page.relative_to(DOCS)) for page in PAGES}
    assert {page for page in pages if not page.startswith(("decisions/", "plans/"))} == set(nav(site["nav"]))


COMMAND = re.compile(r"^(?:\.venv/bin/)?rollplex ((?:\\\n|[^#\n])*)", re.MULTILINE)


def commands_of(page: Path) -> list[list[str]]:
    """The command lines in a page's blocks of code, without what is optional in them."""
    blocks = [found.group() for found in FENCE.finditer(page.read_text(encoding="utf-8"))]
    return [
        shlex.split(re.sub(r"\[.*?\]", "", line.replace("\\\n", " ")))
        for block in blocks
        for line in COMMAND.findall(block)
    ]


def parsed(words: list[str]) -> None:
    """Raises UsageError: there is no such command, argument or option."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        command, words = command.commands[words[0]], words[1:]
    command.make_context(command.name, list(words))


TOLD = [
    (page, words)
    for page in (ROOT / "README.md", ROOT / "deploy" / "README.md", *PAGES)
    for words in commands_of(page)
    if not {"FOLDER", "..."} & set(words)
]


@pytest.mark.parametrize(("page", "words"), TOLD, ids=lambda value: value.name if isinstance(value, Path) else value[0])
def test_every_command_that_a_page_tells_is_one(page: Path, words: list[str]) -> None:
    parsed(words)


def test_a_command_that_is_none_is_seen() -> None:
    assert len(TOLD) > 30
    with pytest.raises(KeyError):
        parsed(["upp", "my.yaml"])
    with pytest.raises(Exception, match="No such option"):
        parsed(["up", "my.yaml", "--dry"])


def gpu_settings(page: Path) -> dict[str, Any]:
    """The page's block of keys for a node on a GPU."""
    blocks = re.findall(r"^```yaml\n(device: .*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (found,) = [yaml.safe_load(block) for block in blocks]
    assert isinstance(found, dict)
    return found


def test_the_quickstart_and_the_readme_run_a_gpu_with_the_same_keys() -> None:
    assert gpu_settings(DOCS / "quickstart.md") == gpu_settings(ROOT / "README.md")
