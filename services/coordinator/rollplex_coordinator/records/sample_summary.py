"""A table of samples as TensorBoard's text plugin takes it: Markdown, a table for each group.

Texts are not ours, and TensorBoard renders Markdown (with links and images): every character but letters, digits and
spaces becomes a numeric entity, which is text wherever it stands, also in a cell. Owns that and the lengths.
"""

from __future__ import annotations

from rollplex_coordinator.records.sample_table import SampleGroup, SampleTable

MAX_PROMPT = 500
MAX_RESPONSE = 300
MAX_RESPONSES = 16


def markdown(table: SampleTable) -> str:
    """All groups, one after the other."""
    return "\n\n".join(_group(group, table.functions) for group in table.groups)


def escaped(text: str, most: int) -> str:
    """A text on one line, that means nothing in Markdown or HTML."""
    shown = text if len(text) <= most else f"{text[:most]}…"
    return "".join(
        char if char.isalnum() or char == " " else "⏎" if char == "\n" else f"&#{ord(char)};"
        for char in shown
        if char.isprintable() or char == "\n"
    )


def _group(group: SampleGroup, functions: tuple[str, ...]) -> str:
    given = f"*not shown:* {escaped(group.missing, MAX_PROMPT)}" if group.missing else escaped(group.prompt, MAX_PROMPT)
    lines = [f"**Group {group.group}, row {group.row}:** {given}", ""]
    if group.skipped:
        return "\n".join((*lines, f"*skipped:* {escaped(group.skipped, MAX_PROMPT)}"))
    names = ["response", "advantage", "reward", *(escaped(name, MAX_PROMPT) for name in functions), "tokens"]
    lines += [_row(names), _row(["---", *("--:" for _ in names[1:])])]
    for item in group.responses[:MAX_RESPONSES]:
        numbers = [item.advantage, item.reward, *(item.rewards[name] for name in functions)]
        tokens = f"{item.tokens}" if item.stopped else f"{item.tokens} cut"
        lines.append(_row([escaped(item.completion, MAX_RESPONSE), *map(_number, numbers), tokens]))
    return "\n".join(lines)


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
