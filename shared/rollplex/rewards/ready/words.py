"""Rewards for answers in words: the right text, the right letter, the right form. Pure."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from rollplex.rewards.ready.texts import Columns, Completion, answer_in, keeps, right_answer, text_of

LETTERS = "ABCDEFGHIJ"
THINK_ANSWER = r"<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>"
_SPACES = re.compile(r"\s+")
_END = ".!?;,:"


@keeps("column", "ignore_case")
def exact(
    completions: Sequence[Completion], *, column: str = "", ignore_case: bool = True, **columns: Columns
) -> list[float]:
    """1 if the answer is the right text, 0 if not.

    Not told apart: upper and lower case (unless `ignore_case` is false), widths of Unicode, kinds and numbers of
    blanks, a full stop or the like at the end. A number is its text: 7 is "7", not "7.0". If the row has a list, each
    of its items is right.

    Raises:
        ValueError, RewardError: the row has no right answer.
    """
    right = right_answer(columns, column)
    wanted = {_plain(str(item), ignore_case=ignore_case) for item in (right if isinstance(right, list) else [right])}
    return [float(_plain(answer_in(text_of(c)), ignore_case=ignore_case) in wanted) for c in completions]


@keeps("column", "letters")
def choice(
    completions: Sequence[Completion], *, column: str = "", letters: str = LETTERS, **columns: Columns
) -> list[float]:
    """1 if the answer names the right letter, 0 if it names another, none, or several.

    A letter is named, by the first of these rules that finds one: the answer is the letter alone, in any case and with
    any of ( ) [ ] . : around it; it begins with the letter and one of ) ] . : behind it; the letter stands behind
    "answer is", "answer:", "option" or "choice", the last such place counts; it is the only capital letter that stands
    alone, "A" and "I" before a word in small letters left out.

    Args:
        letters: those that there are.

    Raises:
        ValueError, RewardError: the row has no right answer, or one that names no letter.
    """
    right = right_answer(columns, column)
    wanted = named_letter(str(right), letters)
    if wanted is None:
        raise ValueError(f"the right answer of this row names none of the letters {letters}: {right!r}")
    return [float(named_letter(answer_in(text_of(completion)), letters) == wanted) for completion in completions]


@keeps("pattern")
def format(completions: Sequence[Completion], *, pattern: str = THINK_ANSWER, **_: Columns) -> list[float]:  # noqa: A001 - a name that users write
    """1 if the whole text, without blanks around it, has the form, 0 if not.

    Args:
        pattern: a regular expression in which a dot is any character, line breaks too. As it stands:
            <think>…</think><answer>…</answer>, each once, in this order, with nothing but blanks between them.

    Raises:
        re.error: a pattern that is none.
    """
    form = re.compile(pattern, re.DOTALL)
    return [float(form.fullmatch(text_of(completion).strip()) is not None) for completion in completions]


def named_letter(text: str, letters: str = LETTERS) -> str | None:
    """The letter that an answer names, or None."""
    some = f"[{re.escape(letters)}]"
    alone = re.fullmatch(rf"[(\[\s]*({some})[)\].:\s]*", text, re.IGNORECASE)
    if alone is None:
        alone = re.match(rf"[(\[\s]*({some})[)\].:]", text)
    if alone is not None:
        return alone[1].upper()
    said = re.findall(rf"(?i:answer\s+is|answer\s*:|option|choice)[\s:*(\[]*({some})\b", text)
    if said:
        return str(said[-1])
    capitals = set(re.findall(rf"\b(?![AI] [a-z])({some})\b", text))
    return str(capitals.pop()) if len(capitals) == 1 else None


def _plain(text: str, *, ignore_case: bool) -> str:
    text = _SPACES.sub(" ", unicodedata.normalize("NFKC", text)).strip().rstrip(_END).rstrip()
    return text.casefold() if ignore_case else text
