"""`rollplex rewards check`: the reward child without a run, given responses that are made up from the rows.

Owns these responses and the table. What functions may do and how they are called is the reward child's.
"""

from __future__ import annotations

import json
import logging
import queue
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from rollplex.cli.output import columns
from rollplex.config import Config, load
from rollplex.config.checks import TRAIN
from rollplex.config.wire import data_sources, reward_functions
from rollplex.data.rows import Rows
from rollplex.data.tokenizer import TextTokenizer
from rollplex.errors import RewardError
from rollplex.protocol.common import Failed, Responses
from rollplex.protocol.reward import (
    FromReward,
    GroupRewarded,
    OpenRewards,
    RewardFailed,
    RewardGroup,
    RewardsOpened,
)
from rollplex.rewards.call import answer_of
from rollplex.rewards.child import RewardService

EXIT_FAILED = 1
GRACE_S = 60.0
"""Beyond the functions' own time limit, for what is around them."""
HEADING = ("row", "function", "right answer", "in tags", "empty")


def check_rewards(config_file: Path, overrides: Sequence[str], *, num_rows: int, say: Callable[[str], None]) -> int:
    """Call the functions for the first rows of the training data and say what they return; the exit code.

    Raises:
        ConfigError: the configuration is wrong.
        DataError, ModelError, RewardError: rows, the tokenizer or a function cannot be loaded.
    """
    config = load(config_file, overrides)
    logging.getLogger("rollplex.rewards").addHandler(logging.NullHandler())  # what fails is said once, at the end
    source = data_sources(config)[0]
    rows, tokenizer = Rows.of(source, binary=False), TextTokenizer(config.model.path)
    service = RewardService()
    try:
        for note in _open(config, service):
            say(note)
        table: list[Sequence[str]] = [HEADING]
        failures: list[str] = []
        better = tried = 0
        for number in range(min(num_rows, len(rows))):
            right = _right_answer(rows.for_rewards(number))
            texts = ("", "", "") if right is None else (right, f"<think></think><answer>{right}</answer>", "")
            answer = _ask(service, _group(number, [tokenizer.encode(text) for text in texts]), config)
            if isinstance(answer, RewardFailed):
                failures.append(f"{answer.place}: {answer.function} {answer.problem}: {answer.detail}")
                continue
            table += _lines(number, config, answer, known=right is not None)
            if right is not None:
                *good, empty = _numbers(answer.rewards)
                tried, better = tried + 1, better + any(value > empty for value in good)
    finally:
        service.close()
    if len(table) > 1:
        say(columns(table))
    for failure in failures:
        say(f"failed: {failure}")
    if failures:
        say(f"{len(failures)} rows failed")
        return EXIT_FAILED
    say(_verdict(better, tried))
    return 0


def _open(config: Config, service: RewardService) -> tuple[str, ...]:
    answers: list[FromReward] = []
    message = OpenRewards(
        cause=1,
        model_path=str(config.model.path),
        sources=data_sources(config),
        functions=reward_functions(config),
        time_limit_s=config.rewards.time_limit_s,
        memory_limit_bytes=config.rewards.memory_limit,
    )
    service.handle(message, answers.append)
    (opened,) = answers
    assert isinstance(opened, RewardsOpened), f"the reward child answers OpenRewards with {opened}"
    return opened.notes


def _group(row: int, samples: Sequence[Sequence[int]]) -> RewardGroup:
    return RewardGroup(
        cause=2,
        step=0,
        source=TRAIN,
        row=row,
        responses=Responses(
            group=0,
            lengths=tuple(map(len, samples)),
            tokens=b"".join(struct.pack(f"<{len(ids)}i", *ids) for ids in samples),
        ),
        stopped=(True,) * len(samples),
    )


def _ask(service: RewardService, message: RewardGroup, config: Config) -> GroupRewarded | RewardFailed:
    answers: queue.SimpleQueue[FromReward] = queue.SimpleQueue()
    service.handle(message, answers.put)
    answer = answers.get(timeout=config.rewards.time_limit_s + GRACE_S)
    if isinstance(answer, Failed):
        error = answer.error
        raise RewardError(error.what, got=error.got, needed=error.needed, do=error.do, where=error.where)
    assert isinstance(answer, GroupRewarded | RewardFailed), f"the reward child answers RewardGroup with {answer}"
    return answer


def _right_answer(line: bytes) -> str | None:
    row: Mapping[str, object] = msgspec.json.decode(line)
    try:
        answer = answer_of(row)
    except RewardError:
        return None
    return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)


def _lines(number: int, config: Config, answer: GroupRewarded, *, known: bool) -> list[Sequence[str]]:
    """One line a function, and the sum where there are several. Without a right answer only the empty response."""
    named = [(function.name, blob) for function, blob in zip(config.rewards.functions, answer.by_function, strict=True)]
    named += [("weighted sum", answer.rewards)] if len(named) > 1 else []
    lines: list[Sequence[str]] = []
    for name, blob in named:
        cells = ["none" if value != value else f"{value:g}" for value in _numbers(blob)]  # noqa: PLR0124 - NaN: abstains
        lines.append([str(number), name, *(cells if known else ["-", "-", cells[-1]])])
    return lines


def _numbers(blob: bytes) -> list[float]:
    return [value for (value,) in struct.iter_unpack("<d", blob)]


def _verdict(better: int, tried: int) -> str:
    if not tried:
        return "no row has a right answer (reward_model.ground_truth, ground_truth, answer or solution) to try"
    warning = "" if better == tried else ": look at the functions, or at what form of answer they want"
    return f"the right answer is worth more than an empty response in {better} of {tried} rows{warning}"
