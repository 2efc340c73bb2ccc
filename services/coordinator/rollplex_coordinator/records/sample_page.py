"""A table of samples as a page for people: one HTML file that needs nothing else and runs nothing.

Prompts, responses and errors are not ours: every text is escaped, control characters are made visible, and the page's
policy allows no script, no request, and no style but its own (by digest). Owns the look, light and dark, and how much
of a long text or a large group is shown; the JSON file beside it has all.
"""

from __future__ import annotations

import base64
import hashlib
import html
import math
from collections.abc import Iterator

from rollplex.protocol.inputs import Thumbnail
from rollplex_coordinator.records.sample_table import SampleGroup, SampleResponse, SampleTable

MAX_CHARS = 4_000
MAX_RESPONSES = 32
SMALL_SIDE = 48
"""Pictures up to this many pixels are enlarged pixel by pixel."""

STYLE = """
:root { color-scheme: light dark; --line: #d5d8dd; --soft: #61666e; --good: #12703a; --bad: #ad1f1f; --box: #f5f6f8;
  --page: #ffffff; --text: #16181c; }
@media (prefers-color-scheme: dark) { :root { --line: #3a3f47; --soft: #a2a8b1; --good: #63d08c; --bad: #ff8d85;
  --box: #1e2126; --page: #131518; --text: #e6e8eb; } }
body { margin: 2rem auto; max-width: 72rem; padding: 0 1rem; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: 0 0 .2rem; } h2 { font-size: 1rem; margin: 0 0 .6rem; }
.soft { color: var(--soft); } section { border-top: 1px solid var(--line); padding: 1.2rem 0; }
.given { display: flex; gap: 1rem; flex-wrap: wrap; margin-bottom: .8rem; }
.media { display: flex; gap: .6rem; flex-wrap: wrap; align-items: flex-start; } figure { margin: 0; width: 96px; }
figure img { display: block; width: 96px; height: auto; border: 1px solid var(--line); }
img.small { image-rendering: pixelated; } figcaption { font-size: .75rem; color: var(--soft); overflow-wrap: anywhere; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.45 ui-monospace, monospace; margin: 0; }
.prompt { flex: 1 1 20rem; background: var(--box); padding: .6rem .8rem; border-radius: 4px; max-height: 16rem;
  overflow: auto; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; } th, td { text-align: left;
  vertical-align: top; padding: .35rem .6rem; border-bottom: 1px solid var(--line); } th { font-weight: 600;
  font-size: .8rem; color: var(--soft); } td.number, th.number { text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums; } td.answer { min-width: 16rem; } .good { color: var(--good); font-weight: 600; }
.bad { color: var(--bad); font-weight: 600; }
"""
_POLICY = (
    "default-src 'none'; img-src data:; style-src 'sha256-"
    f"{base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()}'; base-uri 'none'; form-action 'none'"
)
_VISIBLE = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"} | {0x7F: "\u2421"}
"""Control characters to their pictures."""


def page(table: SampleTable) -> str:
    """The whole file."""
    title = f"Samples of step {table.step}"
    rewards = [r.reward for group in table.groups for r in group.responses if r.reward is not None]
    mean = f", mean reward {_number(math.fsum(rewards) / len(rewards))}" if rewards else ""
    return "".join(
        (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n',
            '<meta name="referrer" content="no-referrer">\n',
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
            f"<title>{title}</title><style>{STYLE}</style></head><body>\n",
            f"<h1>{title}</h1>\n",
            f'<p class="soft">weights at version {table.version}, groups: {len(table.groups)}{mean}</p>\n',
            *(_section(group, table.functions) for group in table.groups),
            "</body></html>\n",
        )
    )


def _section(group: SampleGroup, functions: tuple[str, ...]) -> str:
    return "".join(
        (
            f"<section><h2>Group {group.group} ",
            f'<span class="soft">row {group.row}</span></h2><div class="given">',
            _media(group),
            _given(group),
            "</div>",
            f'<p class="bad">Skipped: {_text(group.skipped)}</p>' if group.skipped else _responses(group, functions),
            "</section>\n",
        )
    )


def _media(group: SampleGroup) -> str:
    figures = [_figure(item) for item in group.media]
    if group.left_out:
        figures.append(f"<figure><figcaption>and {group.left_out} more</figcaption></figure>")
    return f'<div class="media">{"".join(figures)}</div>' if figures else ""


def _figure(item: Thumbnail) -> str:
    name = _text(item.name)
    if not item.png:
        return f"<figure><figcaption>{name} is not shown: {_text(item.problem)}</figcaption></figure>"
    small = ' class="small"' if max(item.width, item.height) <= SMALL_SIDE else ""
    data = base64.b64encode(item.png).decode()
    image = f'<img{small} alt="{name}" width="{item.width}" height="{item.height}" src="data:image/png;base64,{data}">'
    return f"<figure>{image}<figcaption>{name}</figcaption></figure>"


def _given(group: SampleGroup) -> str:
    if group.missing:
        return f'<p class="bad">Prompt and pictures are not shown: {_text(group.missing)}</p>'
    return f'<pre class="text prompt" dir="auto">{_text(group.prompt)}</pre>'


def _responses(group: SampleGroup, functions: tuple[str, ...]) -> str:
    names = "".join(f'<th class="number">{_text(name)}</th>' for name in functions)
    more = len(group.responses) - MAX_RESPONSES
    return "".join(
        (
            '<div class="wide"><table><thead><tr><th>response</th><th class="number">advantage</th>',
            f'<th class="number">reward</th>{names}<th class="number">tokens</th></tr></thead><tbody>',
            *_lines(group.responses[:MAX_RESPONSES], functions),
            "</tbody></table></div>",
            f'<p class="soft">and {more} more responses, in the JSON file</p>' if more > 0 else "",
        )
    )


def _lines(responses: tuple[SampleResponse, ...], functions: tuple[str, ...]) -> Iterator[str]:
    for item in responses:
        advantage = item.advantage or 0.0
        kind = " good" if advantage > 0 else " bad" if advantage < 0 else ""
        parts = "".join(_cell(_number(item.rewards[name])) for name in functions)
        tokens = str(item.tokens) if item.stopped else f'{item.tokens} <span class="soft">cut</span>'
        yield (
            f'<tr><td class="answer"><pre class="text" dir="auto">{_text(item.completion)}</pre></td>'
            f"{_cell(_signed(item.advantage), kind)}{_cell(_number(item.reward))}{parts}{_cell(tokens)}</tr>"
        )


def _cell(content: str, kind: str = "") -> str:
    return f'<td class="number{kind}">{content}</td>'


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


def _signed(value: float | None) -> str:
    return "none" if value is None else "0" if value == 0 else f"{value:+.3f}"


def _text(text: str) -> str:
    """Escaped, and cut where it is long."""
    more = len(text) - MAX_CHARS
    shown = text if more <= 0 else f"{text[:MAX_CHARS]}… and {more} more characters"
    return html.escape(shown.translate(_VISIBLE))
