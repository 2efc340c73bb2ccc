"""The shapes of other trainers' rows: recognised, renamed, and all the same to the model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollplex.data.inputs import Prepared
from rollplex.data.processor import Rules
from rollplex.data.prompts import PromptMaker
from rollplex.data.rows import Rows
from rollplex.data.source import Source
from rollplex.errors import ConfigError, DataError
from rollplex.protocol.inputs import DataSource, ShapeName

FOLDER = Path(__file__).parent / "shapes"
FILES = {
    ShapeName.TRL: "trl.jsonl",
    ShapeName.VERL: "verl.jsonl",
    ShapeName.EASYR1: "easyr1.json",
    ShapeName.MS_SWIFT: "ms_swift.jsonl",
    ShapeName.LLAVA: "llava.json",
}
ANSWERS = ["red", "the second", "brown", "green"]
MESSAGES = [{"role": "user", "content": "q"}]
TURNS = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]

RowsOf = Callable[..., Rows]


@pytest.fixture
def rows_of(tmp_path: Path) -> RowsOf:
    """rows_of(row, row, …, **keywords of Rows)"""

    def make(*rows: dict[str, Any], **keywords: Any) -> Rows:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return Rows(path, **keywords)

    return make


def prepared(path: Path, images: Path, maker: PromptMaker, rules: Rules, **fields: Any) -> list[Prepared]:
    limits: dict[str, Any] = {"max_prompt_tokens": 0, "max_image_pixels": 2**24, "skip_bad_rows": False}
    source = Source(DataSource(name="train", path=str(path), image_dir=str(images), **limits, **fields), maker, rules)
    return [source.prepare(number) for number in range(source.check().num_rows)]


def same(ours: Sequence[Prepared], theirs: Sequence[Prepared]) -> bool:
    return len(ours) == len(theirs) and all(
        np.array_equal(a.prompt.ids, b.prompt.ids)
        and np.array_equal(a.prompt.positions, b.prompt.positions)
        and len(a.media) == len(b.media)
        and all(np.array_equal(x.numbers(), y.numbers()) for x, y in zip(a.media, b.media, strict=True))
        for a, b in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("name", FILES)
def test_a_shape_is_recognised_by_its_columns(name: ShapeName) -> None:
    rows = Rows(FOLDER / FILES[name])
    assert rows.shape.name is name
    assert Rows(FOLDER / FILES[name], shape=name).row(1) == rows.row(1)


@pytest.mark.parametrize("name", [name for name in FILES if name is not ShapeName.TRL])
def test_the_same_rows_in_another_shape_give_the_same_ids_and_pixels(
    name: ShapeName, maker: PromptMaker, rules: Rules
) -> None:
    ours = prepared(FOLDER / "trl.jsonl", FOLDER, maker, rules)
    assert [len(item.media) for item in ours] == [1, 2, 0, 1]
    assert same(prepared(FOLDER / FILES[name], FOLDER, maker, rules), ours)


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path / "rows.parquet")
    return path / "rows.parquet"


def write_saved(path: Path, rows: list[dict[str, Any]]) -> Path:
    import datasets as package

    datasets: Any = package
    datasets.disable_progress_bars()
    saved = datasets.Dataset.from_list(rows)
    saved = saved.cast_column("images", datasets.Sequence(datasets.Image()))
    datasets.DatasetDict({"train": saved}).save_to_disk(str(path / "saved"))
    return path / "saved"


@pytest.mark.parametrize("name", [ShapeName.VERL, ShapeName.EASYR1])
@pytest.mark.parametrize("write", [write_parquet, write_saved])
def test_images_inside_a_table_give_the_same_ids_and_pixels(
    name: ShapeName,
    write: Callable[[Path, list[dict[str, Any]]], Path],
    tmp_path: Path,
    maker: PromptMaker,
    rules: Rules,
) -> None:
    text = (FOLDER / FILES[name]).read_text()
    rows = json.loads(text) if FILES[name].endswith(".json") else [json.loads(line) for line in text.splitlines()]
    for row in rows:
        paths = [image["path"] if isinstance(image, dict) else image for image in row["images"]]
        row["images"] = [{"bytes": (FOLDER / path).read_bytes(), "path": None} for path in paths]
    split = {"split": "train"} if write is write_saved else {}
    theirs = prepared(write(tmp_path, rows), tmp_path, maker, rules, **split)
    assert same(theirs, prepared(FOLDER / "trl.jsonl", FOLDER, maker, rules))


@pytest.mark.parametrize("write", [write_parquet, write_saved])
def test_nothings_that_a_table_fills_in_are_no_part_of_a_message(
    write: Callable[[Path, list[dict[str, Any]]], Path], tmp_path: Path, maker: PromptMaker, rules: Rules
) -> None:
    parts = [{"type": "image"}, {"type": "text", "text": "what colour is the square?"}]
    first = {"role": "user", "content": parts}
    image = (FOLDER / "images" / "red.png").read_bytes()
    row: dict[str, Any] = {"prompt": [first], "images": [{"bytes": image, "path": None}], "answer": "red"}
    named = {**row, "prompt": [{**first, "name": "someone", "content": [*parts, {"type": "image", "text": None}]}]}
    split = {"split": "train"} if write is write_saved else {}
    found = prepared(write(tmp_path, [row, {**named, "images": row["images"] * 2}]), tmp_path, maker, rules, **split)
    assert same(found[:1], prepared(FOLDER / "trl.jsonl", FOLDER, maker, rules)[:1])
    assert len(found[1].media) == 2


@pytest.mark.parametrize(
    ("name", "column"),
    [
        (ShapeName.TRL, "answer"),
        (ShapeName.VERL, "ground_truth"),
        (ShapeName.EASYR1, "answer"),
        (ShapeName.EASYR1, "ground_truth"),
        (ShapeName.MS_SWIFT, "solution"),
        (ShapeName.LLAVA, "solution"),
    ],
)
def test_reward_functions_get_the_prompt_as_messages_and_the_answer(name: ShapeName, column: str) -> None:
    rows = [json.loads(Rows(FOLDER / FILES[name]).for_rewards(number)) for number in range(4)]
    assert [row[column] for row in rows] == ANSWERS
    assert rows[2]["prompt"] == [{"role": "user", "content": "what do red and green paint make?"}]


def test_reward_functions_get_the_columns_of_the_row_as_they_are() -> None:
    row = json.loads(Rows(FOLDER / "verl.jsonl").for_rewards(1))
    raw = json.loads((FOLDER / "verl.jsonl").read_text().splitlines()[1])
    assert row == {**raw, "ground_truth": "the second"}
    row = json.loads(Rows(FOLDER / "llava.json").for_rewards(0))
    assert row["conversations"][1] == {"from": "gpt", "value": "red"}
    assert (row["id"], row["image"]) == (0, "images/red.png")


def test_a_rows_own_column_goes_before_what_the_shape_adds(rows_of: RowsOf) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "a long answer"}]
    assert json.loads(rows_of({"messages": messages, "solution": "42"}).for_rewards(0))["solution"] == "42"


def test_bytes_are_not_passed_to_reward_functions(tmp_path: Path) -> None:
    path = write_parquet(tmp_path, [{"prompt": "q", "images": [{"bytes": b"123", "path": "a.png"}], "blob": b"4"}])
    assert json.loads(Rows(path).for_rewards(0))["images"] == [{"bytes": None, "path": "a.png"}]
    row = json.loads(Rows(path, binary=False).for_rewards(0))
    assert row == {"prompt": "q", "images": [{"path": "a.png"}]}


def test_a_conversation_without_answer_adds_no_solution(rows_of: RowsOf) -> None:
    rows = rows_of({"messages": MESSAGES, "n": 1})
    assert json.loads(rows.for_rewards(0)) == {"prompt": MESSAGES, "messages": MESSAGES, "n": 1}


def test_only_the_last_answer_is_left_out(rows_of: RowsOf) -> None:
    turns = [*TURNS, {"from": "human", "value": "and now?"}, {"from": "gpt", "value": "b"}]
    prompt = rows_of({"conversations": [{"from": "system", "value": "s"}, *turns]}).row(0).prompt
    assert isinstance(prompt, list)
    assert [(message["role"], message["content"]) for message in prompt] == [
        ("system", "s"),
        ("user", "q"),
        ("assistant", "a"),
        ("user", "and now?"),
    ]


NEEDS = (
    "trl: prompt; verl: prompt, data_source, reward_model; easyr1: problem, answer; ms_swift: messages; "
    "llava: conversations"
)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            {"question": "q", "pic": "a.png"},
            (
                f"The columns fit no known shape; got columns pic, question; needed {NEEDS}. "
                "Set data.columns, e.g. {prompt: question}, or data.shape."
            ),
        ),
        ({}, f"The columns fit no known shape; got columns none; needed {NEEDS}. Set data.columns"),
        (
            {"prompt": None, "image": None, "text": "q"},
            f"The columns fit no known shape; got columns text; needed {NEEDS}. Set data.columns",
        ),
        (
            {"prompt": "q", "problem": "q", "answer": "a"},
            (
                "The columns fit several shapes; got columns answer, problem, prompt; needed trl: prompt; "
                "easyr1: problem, answer. Set data.shape."
            ),
        ),
        (
            {"messages": MESSAGES, "conversations": TURNS},
            (
                "The columns fit several shapes; got columns conversations, messages; needed ms_swift: messages; "
                "llava: conversations. Set data.shape."
            ),
        ),
    ],
)
def test_a_dataset_of_no_shape_or_of_several_is_refused_with_what_each_needs(
    row: dict[str, Any], says: str, rows_of: RowsOf
) -> None:
    with pytest.raises(DataError) as caught:
        rows_of(row)
    assert str(caught.value).partition("(row 0): ")[2].startswith(says)


def test_an_ambiguous_dataset_is_read_in_the_shape_that_is_named(rows_of: RowsOf) -> None:
    row = {"prompt": "raw", "problem": "q", "answer": "a"}
    assert rows_of(row, shape=ShapeName.TRL).row(0).prompt == "raw"
    assert rows_of(row, shape=ShapeName.EASYR1).row(0).prompt == MESSAGES


def test_verls_rows_are_not_taken_for_trls(rows_of: RowsOf) -> None:
    row = {"prompt": MESSAGES, "data_source": "s", "reward_model": {"ground_truth": 3}}
    assert rows_of(row).shape.name is ShapeName.VERL
    assert json.loads(rows_of(row).for_rewards(0))["extra_info"] == {}
    assert rows_of({"prompt": MESSAGES, "data_source": "s"}).shape.name is ShapeName.TRL


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        ({"prompt": "q"}, {"problem": "q", "answer": "a"}, 'This row has no "prompt"; got columns answer, problem'),
        (
            {"problem": "q", "answer": "a"},
            {"problem": "q"},
            'This row has no "answer"; got columns problem; needed "answer", as all rows of the shape easyr1 have it',
        ),
        (
            {"problem": "q", "answer": "a"},
            {"problem": 3, "answer": "a"},
            '"problem" has the wrong form; got a number: 3',
        ),
        ({"messages": MESSAGES}, {"messages": "q"}, "\"messages\" has the wrong form; got text: 'q'"),
        ({"messages": MESSAGES}, {"messages": ["q"]}, '"messages"[0] is not an object'),
        ({"messages": MESSAGES}, {"messages": []}, "The prompt is empty"),
        (
            {"messages": MESSAGES},
            {"messages": [*MESSAGES, *[{"role": "assistant", "content": "a"}] * 2]},
            "The last message is the assistant's",
        ),
        ({"conversations": TURNS}, {"conversations": [{"from": "cat"}]}, '"conversations"[0] has no known speaker'),
        ({"conversations": TURNS}, {"conversations": [{"from": "human"}]}, "message 0 has no content"),
        (
            {"prompt": MESSAGES, "data_source": "s", "reward_model": {"ground_truth": 3}},
            {"prompt": "q", "data_source": "s", "reward_model": {"ground_truth": 3}},
            '"prompt" has the wrong form',
        ),
        (
            {"prompt": MESSAGES, "data_source": "s", "reward_model": {"ground_truth": 3}},
            {"prompt": MESSAGES, "data_source": "s", "reward_model": {"style": "rule"}},
            '"reward_model" has no ground truth',
        ),
    ],
)
def test_a_row_that_does_not_fit_the_shape_of_the_first_is_named_with_its_column(
    first: dict[str, Any], second: dict[str, Any], says: str, rows_of: RowsOf
) -> None:
    rows = rows_of(first, second, first)
    assert rows.row(0).prompt == rows.row(2).prompt
    for read in (rows.row, rows.for_rewards):
        with pytest.raises(DataError) as caught:
            read(1)
        assert f"rows.jsonl:2 (row 1): {says}" in str(caught.value)


def test_columns_are_read_under_the_names_that_the_configuration_gives_them(rows_of: RowsOf) -> None:
    row = {"question": "q <image>", "pics": "a.png", "reply": "a", "images": "not these"}
    rows = rows_of(row, columns={"prompt": "question", "images": "pics"})
    assert (rows.shape.name, rows.row(0).prompt, rows.row(0).images) == (ShapeName.TRL, "q <image>", ("a.png",))
    assert rows.row(0).columns == row
    rows = rows_of(row, columns={"problem": "question", "answer": "reply", "images": "pics"})
    assert rows.shape.name is ShapeName.EASYR1
    assert rows.row(0).images == ("a.png",)
    assert rows.row(0).columns["ground_truth"] == "a"


def test_a_column_that_was_renamed_no_longer_speaks_for_another_shape(rows_of: RowsOf) -> None:
    rows = rows_of({"problem": "q", "answer": "a"}, columns={"prompt": "problem"})
    assert (rows.shape.name, rows.row(0).prompt) == (ShapeName.TRL, "q")


def test_columns_that_were_renamed_are_named_as_the_file_has_them(rows_of: RowsOf) -> None:
    rows = rows_of({"q": "a", "p": "x"}, {"p": 3}, {"q": "a", "p": 3}, columns={"prompt": "q", "images": "p"})
    with pytest.raises(DataError, match=r'\(row 1\): This row has no "q"; got columns images'):
        rows.row(1)
    with pytest.raises(DataError, match=r'\(row 2\): "p" has the wrong form'):
        rows.row(2)


def test_a_renaming_that_cannot_be_meant_is_refused(rows_of: RowsOf) -> None:
    with pytest.raises(ConfigError, match="no shape knows; got promt; needed prompt, .*Did you mean prompt?"):
        rows_of({"q": "a"}, columns={"promt": "q"})
    with pytest.raises(DataError, match=r"a column that the rows lack; got prompt: q; needed one of query, x"):
        rows_of({"query": "a", "x": 1}, columns={"prompt": "q"})


FORMAT = "\n{{ content | trim }} Think first.\n\n"


def test_a_format_prompt_is_put_around_the_question_as_easyr1_does(rows_of: RowsOf, tmp_path: Path) -> None:
    from jinja2 import Template

    (tmp_path / "format.jinja").write_text(FORMAT)
    row = {"problem": "  <image>what?\n", "answer": "a"}
    expected = Template(FORMAT.strip()).render(content=row["problem"])
    assert expected == "<image>what? Think first."
    for source in (FORMAT, str(tmp_path / "format.jinja")):
        assert rows_of(row, format_prompt=source).row(0).prompt == [{"role": "user", "content": expected}]
    assert json.loads(rows_of(row, format_prompt=FORMAT).for_rewards(0))["prompt"][0]["content"] == expected


def test_a_format_prompt_goes_around_the_last_user_message_or_the_plain_text(rows_of: RowsOf) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "a"}, {"role": "user", "content": "r"}]
    prompt = rows_of({"prompt": messages}, format_prompt="<{{ content }}>").row(0).prompt
    assert prompt == [*messages[:2], {"role": "user", "content": "<r>"}]
    assert rows_of({"prompt": "a"}, format_prompt="<{{ content }}>").row(0).prompt == "<a>"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([{"role": "system", "content": "s"}], "no question to be put around; got no user message"),
        ([{"role": "user", "content": [{"type": "text", "text": "q"}]}], "got message 0, a list of parts"),
    ],
)
def test_a_prompt_without_a_text_to_format_is_refused(content: object, says: str, rows_of: RowsOf) -> None:
    with pytest.raises(DataError, match=says):
        rows_of({"prompt": content}, format_prompt="{{ content }}").row(0)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ content", "does not compile"),
        ("{{ question }}", "other variables than the question; got question; needed {{ content }}, and no other"),
        ("{{ content }} {{ os }}", "got content, os"),
        ("{{ 'constant' }}", "got none"),
        ("absent.jinja", "The format prompt cannot be read; got 'absent.jinja': No such file"),
    ],
)
def test_a_format_prompt_that_cannot_be_used_is_refused_at_once(source: str, says: str, rows_of: RowsOf) -> None:
    with pytest.raises(ConfigError) as caught:
        rows_of({"problem": "q", "answer": "a"}, format_prompt=source)
    assert says in str(caught.value)
    assert caught.value.where == "data.format_prompt"


@pytest.mark.parametrize(
    "source",
    [
        "{{ content.__class__.__mro__ }}",
        "{% for i in range(10000000) %}{{ content }}{% endfor %}",
        "{% include '/etc/passwd' %}{{ content }}",
    ],
)
def test_a_format_prompt_runs_in_a_sandbox(source: str, rows_of: RowsOf) -> None:
    with pytest.raises((DataError, ConfigError), match="fails on this row|does not compile"):
        rows_of({"problem": "q", "answer": "a"}, format_prompt=source).row(0)
